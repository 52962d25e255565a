"""Steps to measure: greedy batches of sequences at given contexts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.backends import PAGE_SIZE, Batch
from tailrace.backends.greedy import greedy


def step(parts: Sequence[tuple[Sequence[int], int]], *, all_rows: bool = False) -> Batch:
    """One step of sequences (tokens, context), each in its own pages; logits of the last token of each, or of all."""
    pages = [-(-(context + len(tokens)) // PAGE_SIZE) for tokens, context in parts]
    tables = np.zeros((len(parts), max(pages)), np.int32)
    first = 0
    for row, count in enumerate(pages):
        tables[row, :count] = range(first, first + count)
        first += count
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in parts)]).astype(np.int32)
    wanted = np.arange(starts[-1], dtype=np.int32) if all_rows else starts[1:] - 1
    return Batch(
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in parts]),
        starts=starts,
        context=np.array([context for _, context in parts], np.int32),
        tables=tables,
        wanted=wanted,
        sampling=greedy(len(wanted)),
        want_logits=all_rows,
    )
