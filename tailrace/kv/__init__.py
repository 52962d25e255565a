"""KV pages of the one engine: which are free, who holds them, and what they hold (`pages`, `prefix`); where they go
that outlive the pool (`tiers`), and whether fetching them from there is worth it (`cost`).

Called by `engine` alone. Knows page numbers, token ids and digests; must never know of requests' parameters,
schedulers, clocks, text, or what the tensors that the pages stand for mean.
"""
