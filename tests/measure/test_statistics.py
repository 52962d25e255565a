"""Intervals hold what they say, and tests find differences that are there and none that are not."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.measure import statistics


def test_quantiles_and_counts() -> None:
    found = statistics.describe([[1.0, 2.0], [], [3.0], [4.0, 5.0]], undefined=2)
    assert found is not None
    assert (found.n, found.requests, found.undefined) == (5, 3, 2)
    assert (found.mean, found.least, found.most, found.quantiles["p50"]) == (3.0, 1.0, 5.0, 3.0)
    assert statistics.describe([[]]) is None


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for trial in range(60):
        found = statistics.describe([(value,) for value in rng.exponential(1.0, 80)], seed=trial)
        assert found is not None
        low, high = found.intervals["mean"]
        held += low <= 1.0 <= high
    assert held >= 50


def test_values_of_one_request_are_no_independent_ones() -> None:
    rng = np.random.default_rng(6)
    levels = rng.normal(1.0, 0.2, 20)
    together = statistics.describe([[level] * 50 for level in levels])
    apart = statistics.describe([[level] for level in np.repeat(levels, 50)])
    assert together is not None
    assert apart is not None
    width = [high - low for low, high in (together.intervals["mean"], apart.intervals["mean"])]
    assert width[0] > 4 * width[1]


def test_a_share_of_none_is_not_none_for_sure() -> None:
    assert statistics.share(0, 20) == (0.0, pytest.approx(0.161, abs=0.001))
    assert statistics.share(20, 20)[1] == 1.0
    assert statistics.share(0, 0) == (0.0, 1.0)


def test_pairs_show_a_difference_that_is_smaller_than_the_drift() -> None:
    rng = np.random.default_rng(7)
    drift = rng.uniform(1, 5, 20)
    a, b = drift * rng.normal(1, 0.01, 20), 1.05 * drift * rng.normal(1, 0.01, 20)
    found = statistics.ratio(list(a), list(b))
    assert found.ratio == pytest.approx(1.05, abs=0.01)
    assert found.interval[0] > 1.0
    assert found.p < 0.001
    same = statistics.ratio(list(a), list(drift * rng.normal(1, 0.01, 20)))
    assert same.p > 0.05
    assert same.interval[0] < 1.0 < same.interval[1]


def test_few_pairs_cannot_be_sure() -> None:
    assert statistics.ratio([1.0] * 3, [2.0] * 3).p == 0.25
    assert statistics.ratio([1.0] * 6, [2.0] * 6).p == pytest.approx(2 / 64)
    assert statistics.ratio([1.0], [1.0]).p == 1.0


def test_the_interval_of_a_mean_alone_is_that_of_all_metrics() -> None:
    values = [float(value) for value in range(40)]
    stat = statistics.describe([(value,) for value in values])
    assert stat is not None
    assert statistics.mean_interval(values) == pytest.approx(stat.intervals["mean"], rel=0.05)
    assert statistics.mean_interval([3.0]) == (3.0, 3.0)
