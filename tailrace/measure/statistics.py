"""Percentiles that say how many values they are of and how far they can be trusted; shares; whether two differ.

Intervals are of 95 % and, but for `share`, bootstrapped (Efron 1979, percentile method). What comes from one request is
drawn together: the gaps of one answer are alike, and are no independent values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Interval = tuple[float, float]

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
CONFIDENCE = 0.95
DRAWS = 1000
MOST_DRAWN = 20_000_000
"""Values that are drawn for one metric at most: of very many, fewer draws give as good an interval."""
_AT_ONCE = 1_000_000
"""Of them, that are held in memory."""


class Stat(msgspec.Struct, frozen=True):
    """One metric over many requests. `n` values of `requests` requests; `undefined`: requests that have none."""

    n: int
    requests: int
    undefined: int
    mean: float
    deviation: float
    least: float
    most: float
    quantiles: dict[str, float]
    intervals: dict[str, Interval]
    """Of `mean` and of each quantile."""


def describe(groups: Sequence[Sequence[float]], undefined: int = 0, seed: int = 0) -> Stat | None:
    """The values of each request; None where there are none at all."""
    filled = [group for group in groups if len(group)]
    if not filled:
        return None
    values = np.concatenate([np.asarray(group, np.float64) for group in filled])
    owner = np.repeat(np.arange(len(filled)), [len(group) for group in filled])
    quantiles = dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values())).tolist(), strict=True))
    return Stat(
        n=len(values), requests=len(filled), undefined=undefined, mean=float(values.mean()),
        deviation=float(values.std()), least=float(values.min()), most=float(values.max()), quantiles=quantiles,
        intervals=_bootstrap(values, owner, len(filled), seed),
    )  # fmt: skip


def _bootstrap(values: Values, owner: NDArray[np.int64], groups: int, seed: int) -> dict[str, Interval]:
    """Requests drawn with replacement, as weights of their values, which are sorted once."""
    rng = np.random.default_rng(seed)
    order = np.argsort(values)
    values, owner = values[order], owner[order]
    drawn = []
    for _ in range(max(100, min(DRAWS, MOST_DRAWN // len(values)))):
        weights = np.bincount(rng.integers(0, groups, groups), minlength=groups)[owner]
        below = np.cumsum(weights)
        places = np.searchsorted(below, np.array(list(QUANTILES.values())) * below[-1])
        drawn.append([float(weights @ values) / below[-1], *values[np.minimum(places, len(values) - 1)]])
    low, high = np.quantile(np.array(drawn), _edges(), axis=0)
    return {name: (float(a), float(b)) for name, a, b in zip(("mean", *QUANTILES), low, high, strict=True)}


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Of the mean of at least one value, each by itself."""
    known, rng = np.asarray(values, np.float64), np.random.default_rng(seed)
    draws, rows = max(100, min(DRAWS, MOST_DRAWN // len(known))), max(1, _AT_ONCE // len(known))
    drawn = [
        known[rng.integers(0, len(known), (min(rows, draws - at), len(known)))].mean(axis=1)
        for at in range(0, draws, rows)
    ]
    low, high = np.quantile(np.concatenate(drawn), _edges())
    return float(low), float(high)


def _edges() -> tuple[float, float]:
    return (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2


def share(good: int, of: int) -> Interval:
    """The interval of a share (Wilson 1927): of 0 out of 20 it does not say that there are none."""
    if not of:
        return (0.0, 1.0)
    z = 1.959964
    middle = (good + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * math.sqrt(good * (of - good) / of + z * z / 4)
    return (max(0.0, middle - half), min(1.0, middle + half))


class Ratio(msgspec.Struct, frozen=True):
    """B over A, from pairs: the median of the pairs' ratios, its interval, and how likely pairs this unequal are where
    there is no difference (`p`, two-sided, by exchanging A and B within pairs)."""

    ratio: float
    interval: Interval
    p: float
    pairs: int


def ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Ratio:
    """Of values of A and B that were measured side by side, all above 0; at least one pair."""
    logs = np.log(np.asarray(b, np.float64) / np.asarray(a, np.float64))
    rng = np.random.default_rng(seed)
    drawn = np.median(logs[rng.integers(0, len(logs), (DRAWS, len(logs)))], axis=1)
    low, high = np.quantile(drawn, _edges())
    return Ratio(
        float(np.exp(np.median(logs))), (float(np.exp(low)), float(np.exp(high))), _exchanged(logs, rng), len(logs)
    )


def _exchanged(logs: Values, rng: np.random.Generator) -> float:
    """A sign-flip test of the mean: of all flips where these are few, else of ten thousand."""
    n = len(logs)
    if n <= 13:
        signs = 1 - 2 * ((np.arange(1 << n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(np.abs(signs @ logs) >= abs(logs.sum()) - 1e-12))
    signs = 1 - 2 * rng.integers(0, 2, (10_000, n))
    return float((1 + np.sum(np.abs(signs @ logs) >= abs(logs.sum()) - 1e-12)) / 10_001)


def holm(values: Sequence[float]) -> list[float]:
    """The p of each of several comparisons, so that any false finding is as unlikely as with one (Holm 1979)."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    made, most = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        most = max(most, min(1.0, values[place] * (len(values) - rank)))
        made[place] = most
    return made


def least_pairs(comparisons: int) -> int:
    """The fewest pairs with which a sign-flip test can find anything at 5 %, in so many comparisons."""
    pairs = 1
    while 2.0 ** (1 - pairs) * comparisons > 1 - CONFIDENCE:
        pairs += 1
    return pairs
