"""Batches for tests of backends: one prompt, many sequences, greedy or sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tailrace.backends import PAGE_SIZE, Backend, Batch, Sampling
from tailrace.backends.reference.ops import Rounded

_FIELDS: dict[str, tuple[float, Any]] = {
    "temperature": (0.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "presence": (0.0, np.float32),
    "frequency": (0.0, np.float32),
    "repetition": (1.0, np.float32),
    "seed": (0, np.uint64),
    "position": (0, np.int32),
    "forced": (-1, np.int32),
    "logprobs": (-1, np.int32),
}
_LISTS: dict[str, Any] = {
    "seen_token": np.int32,
    "seen_count": np.int32,
    "bias_token": np.int32,
    "bias_value": np.float32,
}


def sampling(rows: int, **values: Any) -> Sampling:
    """Sampling of this many rows: greedy, unless `values` say otherwise (a scalar counts for every row)."""
    arrays = {}
    for name, (default, dtype) in _FIELDS.items():
        arrays[name] = np.broadcast_to(np.asarray(values.pop(name, default), dtype), (rows,)).copy()
    for name in ("seen_start", "bias_start"):
        arrays[name] = np.asarray(values.pop(name, np.zeros(rows + 1)), np.int32)
    for name, dtype in _LISTS.items():
        arrays[name] = np.asarray(values.pop(name, []), dtype)
    assert not values, f"no such field: {sorted(values)}"
    return Sampling(**arrays)


def batch(
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]], wanted: Sequence[int], logits: bool = True, **values: Any
) -> Batch:
    """A batch of sequences (tokens, context, page table), with raw logits of the wanted flat rows."""
    width = max(len(table) for _, _, table in parts)
    tables = np.zeros((len(parts), width), np.int32)
    for row, (_, _, table) in enumerate(parts):
        tables[row, : len(table)] = table
    starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in parts)])
    return Batch(
        tokens=np.array([token for tokens, _, _ in parts for token in tokens], np.int32),
        starts=starts.astype(np.int32),
        context=np.array([context for _, context, _ in parts], np.int32),
        tables=tables,
        wanted=np.array(wanted, np.int32),
        sampling=sampling(len(wanted), **values),
        want_logits=logits,
    )


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def logits_of(
    backend: Backend, tokens: Sequence[int], positions: Sequence[int], *, chunk: int = 1 << 30, first_page: int = 0
) -> np.ndarray:
    """Raw logits of a prompt at these positions, ascending, fed in chunks of this many tokens: [positions, vocab]."""
    table = list(range(first_page, first_page + pages_for(len(tokens))))
    found = []
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        wanted = [position - begin for position in positions if begin <= position < begin + len(part)]
        logits = backend.run(batch([(part, begin, table)], wanted)).logits
        assert logits is not None
        found.append(logits)
    return np.concatenate(found)


def rounding(kernels: str) -> Rounded:
    """How the reference must round to follow a kernel build."""
    return "bf16" if kernels == "amx" else "int8"
