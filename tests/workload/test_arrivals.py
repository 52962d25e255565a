"""Arrivals have the rate and the shape that they say, and are the same for the same seed."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise

import pytest

from tailrace.workload import arrivals
from tailrace.workload.arrivals import Closed, Constant, Gamma, Open, Poisson, Ramp, Recorded


def gaps(process: Open, count: int = 20_000) -> list[float]:
    return [after - before for before, after in pairwise(islice(arrivals.times(process, 7), count))]


def test_constant_is_even() -> None:
    assert list(islice(arrivals.times(Constant(4), 0), 4)) == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("process", "variation"), [(Poisson(5), 1.0), (Gamma(5, 0.25), 2.0), (Gamma(5, 4), 0.5), (Gamma(5, 1), 1.0)]
)
def test_the_mean_is_the_rate_and_the_spread_is_the_burstiness(process: Open, variation: float) -> None:
    found = gaps(process)
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.04)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(variation, rel=0.05)


def test_the_same_seed_is_the_same_load() -> None:
    assert gaps(Poisson(2), 50) == gaps(Poisson(2), 50)
    assert next(arrivals.times(Poisson(2), 1)) != next(arrivals.times(Poisson(2), 2))


@pytest.mark.parametrize("ramp", [Ramp(0, 100, 20), Ramp(100, 20, 10), Ramp(50, 50, 10)])
def test_a_ramp_comes_as_its_rate_says(ramp: Ramp) -> None:
    times = list(islice(arrivals.times(ramp, 3), 6000))
    assert times == sorted(times)
    for at in (ramp.seconds / 2, ramp.seconds, ramp.seconds + 5):
        slope = (ramp.last - ramp.first) / ramp.seconds
        during = min(at, ramp.seconds)
        expected = ramp.first * during + slope * during**2 / 2 + ramp.last * (at - during)
        assert sum(time <= at for time in times) == pytest.approx(expected, abs=4 * expected**0.5)


def test_a_level_is_what_the_load_has_more_or_less_of() -> None:
    assert arrivals.scaled(Closed(3), 8) == Closed(8)
    assert arrivals.scaled(Gamma(1, 0.5), 8) == Gamma(8, 0.5)
    assert arrivals.scaled(Constant(1), 8) == Constant(8)
    assert arrivals.scaled(Ramp(1, 2, 3), 8) == arrivals.scaled(Poisson(1), 8) == Poisson(8)
    assert arrivals.scaled(Recorded(), 2) == Recorded(2)
