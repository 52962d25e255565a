"""Steps to measure: greedy batches of sequences at given contexts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.backends import PAGE_SIZE, Batch, Sampling


def greedy(rows: int) -> Sampling:
    """Greedy sampling of this many rows, no log-probabilities."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(rows, value, dtype)

    def empty(dtype: type) -> np.ndarray:
        return np.zeros(0, dtype)

    starts = np.zeros(rows + 1, np.int32)
    return Sampling(
        temperature=full(0, np.float32),
        top_k=full(0, np.int32),
        top_p=full(1, np.float32),
        min_p=full(0, np.float32),
        presence=full(0, np.float32),
        frequency=full(0, np.float32),
        repetition=full(1, np.float32),
        seed=full(0, np.uint64),
        position=full(0, np.int32),
        forced=full(-1, np.int32),
        logprobs=full(-1, np.int32),
        seen_start=starts,
        seen_token=empty(np.int32),
        seen_count=empty(np.int32),
        bias_start=starts,
        bias_token=empty(np.int32),
        bias_value=empty(np.float32),
    )


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
