"""Tailrace: serves open-weight language models and accounts for every millisecond that a request costs.

Rooms, top to bottom; a room imports only rooms below it (checked by import-linter):
`cli`, `api`, `ledger`, `engine`, `kv`, `text`, `models`, `backends`, `native`, `terms`.
"""

__version__ = "0.1.0"
