"""Means that say how many values they are of and how far they can be trusted, and lines through points."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tailrace.measure import statistics


class Mean(msgspec.Struct, frozen=True):
    """The mean of `n` values with its interval of 95 % (bootstrap); of one value the interval is not known, and is the
    value itself."""

    value: float
    low: float
    high: float
    n: int

    def shown(self, show: Callable[[float], str]) -> str:
        """The mean and its interval in words."""
        low, high = show(self.low), show(self.high)
        if self.n < 2 or low == high:
            return show(self.value)
        number, _, unit = low.partition(" ")
        return f"{show(self.value)} ({number if unit and high.endswith(f' {unit}') else low} to {high})"


def mean(values: Sequence[float]) -> Mean | None:
    """None where there are no values."""
    if not values:
        return None
    return Mean(float(np.mean(values)), *statistics.mean_interval(values), len(values))


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least squares line through at least two points with different x."""
    x, y = np.array(points, np.float64).T
    rise, start = np.polyfit(x, y, 1)
    return float(start), float(rise)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """p of the y = c x^p that fits points best on logarithmic axes: 1 is proportional, 2 quadratic. At least two points
    with different x, all above 0."""
    return slope([(float(np.log(x)), float(np.log(y))) for x, y in points])[1]
