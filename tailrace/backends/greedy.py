"""The sampling of steps whose tokens nobody chooses: measurements, and passes that only want hidden rows."""

from __future__ import annotations

import numpy as np

from tailrace.backends import Sampling


def greedy(rows: int) -> Sampling:
    """Greedy sampling of this many rows, no log-probabilities."""
    zeros, starts = np.zeros(rows, np.float32), np.zeros(rows + 1, np.int32)
    none = np.full(rows, -1, np.int32)
    return Sampling(
        temperature=zeros,
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=zeros,
        presence=zeros,
        frequency=zeros,
        repetition=np.ones(rows, np.float32),
        seed=np.zeros(rows, np.uint64),
        position=np.zeros(rows, np.int32),
        forced=none,
        logprobs=none,
        seen_start=starts,
        seen_token=np.zeros(0, np.int32),
        seen_count=np.zeros(0, np.int32),
        bias_start=starts,
        bias_token=np.zeros(0, np.int32),
        bias_value=np.zeros(0, np.float32),
    )
