"""The command line: one file a command; parses, calls, prints. No logic; nobody imports it.

- `main`: the entry point. `serve` has a fast path that imports neither typer nor rich; all else goes to `app`.
- `app`: the commands put together. `options`: the declaration that both of serve's parsers are made from.
- `pull`, `info`, `serve`, `chat`, `generate`, `machine`: the commands.
- `output`: words for people. `client`: HTTP to a running server. `local`: a server of our own for one command.
"""
