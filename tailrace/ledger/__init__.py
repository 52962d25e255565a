"""What happened to every request: folds over the event stream, the line a request leaves in the log, and its row in a
database that can be asked what was used, what it cost, and why it took so long.

From events to a timeline: `timeline` (one request), `steps` (one step, all its requests), `book` (all of them). Into
the database: `record` (a row), `writer` (the thread), `spool` (on the way), `store` and `schema` (there). Out of it:
`usage`, `cost` and `price`, `lookup` and `words`. What imports SQLAlchemy (`schema` and whatever needs it) is imported
when it is needed, never by a start.

Called by `api` and whatever stands above it. Knows events and phases; never HTTP, tokens' text, or how the engine
decides.
"""
