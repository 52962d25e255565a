"""The classic experiments on serving language models, one command each, on any model and server.

One file an experiment; each answers a question, and knows how it measures, what its numbers say and how they are drawn
(`experiment.Experiment`). What they need of the world is a `stand.Stand`: servers, and what only rooms that the load
generator must not know can tell (how a model keeps its KV, what rounding its weights costs), handed in by `cli`.
`perform` runs one, `page` makes the report. A finding is worked out from the numbers of the run, never assumed.
"""
