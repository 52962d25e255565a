"""What is asked of a server, and when: shapes, arrivals, what requests share, traces. Read, made and replayed.

`spec` reads a workload from a small TOML file (`builtin/` has those that have names), `make` turns it into sessions of
turns, `content` turns the pieces of a prompt into token ids or words. Pure, and reproducible by a seed: session k of a
workload is the same whoever asks for it, and in whichever order. Called by `measure` (which sends them) and by
simulators (which do not); knows nothing of HTTP, servers or clocks.
"""
