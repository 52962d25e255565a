"""What callers have asked to be stored: responses, chat completions, files, batches. Never in logs or metrics.

What lives here: `database.py` (SQLite or PostgreSQL behind one small interface), `shelf.py` (what is asked of it, in
SQL), `store.py` (the event loop's side: one thread, bounds, retention), `keep.py` (one answer on its way to the store),
`query.py` and `pages.py` (lists), `chats.py` (the endpoints of stored chat completions).

Every row belongs to a tenant, and whoever is another one finds nothing. Imported only where a store is configured or an
endpoint of it is asked for.
"""
