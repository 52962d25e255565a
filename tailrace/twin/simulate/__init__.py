"""What a fleet of our engines would have done with a load: the engine itself under a clock that is moved by a cost.

`replica` drives `engine.core.EngineCore` (its scheduler, prefix index, pools and step loop, none of it copied) with a
device that computes nothing: a step takes the seconds that a `cost` says of its composition. `fleet` has many of them
and places requests on them as a gateway would (`tailrace.fleet`); `traffic` says when which turn of which session
comes. What comes out are the engine's own events, folded by the ledger's own book into the ledger's own timelines.

Pure: no clock, no files (but for `cost.read`), no randomness beside the workload's seed. Knows nothing of HTTP and of
how results are shown: `measure.predict` makes records of them.
"""
