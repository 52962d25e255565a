"""Files and batches: many requests that nobody waits for, answered while the server has nothing better to do.

What lives here: `multipart.py` (uploads), `files.py` (the endpoints of files), `state.py` (a batch as it is stored),
`shelf.py` (what of it is asked of the database), `lines.py` (a line of an input file, and its answer), `offline.py` (a
request without a client), `job.py` (one batch that runs), `runner.py` (all of them), `endpoints.py`.

The state of a batch is in the content store and nowhere else: a server that ends in the middle, however it ends, goes
on where it was.
"""
