"""A file for each engine, with its `DRIVER`: how it is found, started, and what its gauges are called.

`driver` has what they have in common. To add an engine, write a file like the others and name it in `names`. A
driver imports nothing of the engine that it drives, and starts nothing but short questions for a version.
"""
