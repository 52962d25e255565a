"""The dashboard: static pages without a build step, and the JSON that they show, of a running server or of a ledger.

Nothing is measured here: what is shown are folds that `api`, `engine` and `ledger` make anyway. `desk` tells the pages,
`reader` asks the ledger on a thread of its own, `live` follows a running server, `steps` keeps its last steps; `mount`
hands the pages to a server's API, `alone` serves them by themselves.

Called by `cli`. Knows HTTP and the ledger; never how the engine decides, nor any text that was asked or answered.
"""
