"""KV pages of the one engine: which are free, who holds them, what they hold (`pages`, `prefix`), and how long one that
nobody holds is kept (`retention`); where they go that outlive the pool (`tiers`), and whether fetching them from there
is worth it (`cost`); and what others are told of all that (`events`).

Called by `engine`; `cli` replays recorded traces (`replay`). Knows page numbers, token ids and digests; must never know
of requests' parameters, schedulers, clocks, text, or what the tensors that the pages stand for mean.
"""
