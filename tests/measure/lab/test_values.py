"""Means, lines and verdicts."""

from __future__ import annotations

import pytest

from tailrace.measure.lab.experiment import Verdict, judge
from tailrace.measure.lab.values import Mean, exponent, mean, slope
from tailrace.measure.report.words import ms


def test_a_mean_says_how_far_it_can_be_trusted() -> None:
    found = mean([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.value, found.n) == (2.0, 3)
    assert 1.0 <= found.low < 2.0 < found.high <= 3.0
    assert mean([]) is None
    alone = mean([4.0])
    assert alone == Mean(4.0, 4.0, 4.0, 1)


def test_a_unit_that_both_ends_have_is_said_once() -> None:
    assert Mean(0.2, 0.1, 0.3, 5).shown(ms) == "200 ms (100 to 300 ms)"
    assert Mean(1.0, 0.5, 2.0, 5).shown(ms) == "1 s (500 ms to 2 s)"
    assert Mean(0.5, 0.4, 0.6, 5).shown(lambda v: f"{v:.0%}") == "50% (40% to 60%)"
    assert Mean(0.2, 0.2, 0.2, 1).shown(ms) == "200 ms"


def test_lines_and_powers_are_found() -> None:
    assert slope([(1, 5.0), (4, 11.0), (8, 19.0)]) == pytest.approx((3.0, 2.0))
    assert exponent([(x, 3.0 * x**1.5) for x in (100, 200, 800)]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("low", "high", "above", "verdict"),
    [(1.1, 2.0, True, Verdict.HOLDS), (0.1, 0.9, True, Verdict.FAILS), (0.9, 1.1, True, Verdict.OPEN),
     (0.1, 0.9, False, Verdict.HOLDS), (1.1, 2.0, False, Verdict.FAILS)],
)  # fmt: skip
def test_what_lies_on_both_sides_of_the_bar_is_not_decided(
    low: float, high: float, above: bool, verdict: Verdict
) -> None:
    assert judge(low, high, 1.0, above=above) is verdict
