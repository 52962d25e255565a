"""Measuring servers from outside: load, the definitions of the metrics, statistics, comparison, reports, and the
lab's experiments.

`load` sends a workload to any OpenAI-compatible server and gives a `record.Record` for each request; everything else
is made of those records: `metrics` says what is measured of one, `summary` of many. Called by `cli`; treats every
server alike and knows none from the inside.
"""
