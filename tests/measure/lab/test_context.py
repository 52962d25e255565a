"""Context and users."""

from __future__ import annotations

import pytest

from tailrace.measure.lab import context
from tailrace.measure.lab.experiment import Verdict
from tailrace.measure.lab.values import Mean
from tests.measure.support import record


def level(users: int, tokens: int, ttft: float, *, tpot: float = 0.01, rss: int | None = None) -> context.Level:
    def exact(value: float) -> Mean:
        return Mean(value, value, value, 3)

    throughput, reading = exact(users * 10.0), exact(users * tokens / ttft)
    return context.Level(users, tokens, exact(ttft), exact(tpot), throughput, reading, rss, users * tokens * 1000)


USERS = [level(1, 400, 0.4), level(8, 400, 3.2)]


def taught(lengths: list[context.Level]) -> context.Lesson:
    made = context.Context(lengths, USERS, 50_000_000, 4_000_000, 1000, [])
    return context.Experiment().teach(made)


def test_levels_are_folded_from_waves() -> None:
    waves = [[record([1.0, 1.1, 1.2], input=100), record([2.0, 2.1, 2.2], input=100)] for _ in range(2)]
    found = context.level(2, waves, 7, 1000)
    assert found.ttft.value == pytest.approx(1.5)
    assert found.throughput.value == pytest.approx(6 / 2.2)
    assert found.reading.value == pytest.approx(200 / 2.0)
    assert (found.ttft.n, found.throughput.n) == (4, 2)
    assert found.kv == 2 * (100 + context.OUT) * 1000


def test_growth_is_measured_not_assumed() -> None:
    straight = taught([level(1, n, n / 1000) for n in (100, 200, 400)])
    assert straight.beliefs[0].verdict is Verdict.FAILS
    assert "to the power 1.00" in straight.beliefs[0].because
    square = taught([level(1, n, (n / 1000) ** 2) for n in (100, 200, 400)])
    assert square.beliefs[0].verdict is Verdict.HOLDS
    assert "4 times the tokens, 16.0 times the wait" in square.findings[0].text


def test_slower_steps_are_claimed_only_where_they_are_surely_slower() -> None:
    flat = taught([level(1, n, 0.1) for n in (100, 400)])
    assert "does not surely show" in flat.findings[1].text
    slow = taught([level(1, 100, 0.1, tpot=0.01), level(1, 400, 0.4, tpot=0.04)])
    assert "about 100 ms for a thousand tokens" in slow.findings[1].text


def test_users_who_share_nothing_are_said_to_queue() -> None:
    said = " ".join(one.text for one in taught([level(1, 100, 0.1, rss=60_000_000)]).findings)
    assert "8 users at once waited 3.2 s for their first token on average, one alone 400 ms" in said
    assert "so users queue for it" in said
    assert "from 4,000 tokens on" in said
