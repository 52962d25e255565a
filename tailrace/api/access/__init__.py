"""Who may do what: API keys, what each may use, and what it has used.

`store.py` is the file of keys, which only the command line writes and a server only reads. `window.py` counts what was
used over the last minute; it is pure, and is handed the time. `account.py` holds one key's or tenant's windows, and the
leases of its running requests. `guard.py` says who asks, and follows the file while the server runs.

Called by `api.front` (which asks before anything else happens) and by the command `keys`. Knows tokens as numbers;
never a prompt, an engine or a model.
"""
