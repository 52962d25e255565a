"""The prefix cache, on and off."""

from __future__ import annotations

import pytest

from tailrace.measure.lab import prefix
from tailrace.measure.lab.experiment import Verdict
from tailrace.measure.record import Record
from tests.measure.support import record


def answers(first: float, rest: float, *, gap: float = 0.1, cached: int = 80) -> list[Record]:
    """Seven answers of three tokens; the first finds nothing cached."""
    made = []
    for number in range(7):
        wait = first if not number else rest * (1 + number / 100)
        one = record([wait, wait + gap, wait + 2 * gap], input=100)
        one.cached_tokens = cached if number else 0
        made.append(one)
    return made


def found(on: list[Record], off: list[Record]) -> prefix.Prefix:
    return prefix.found(on, off, (80, 20, 3), "an option", [])


def test_the_request_that_fills_the_cache_is_not_counted() -> None:
    made = found(answers(1.0, 0.1), answers(1.0, 1.0, cached=0))
    assert made.on.ttft.n == made.off.ttft.n == made.ttft.pairs == 6
    assert made.on.ttft.value == pytest.approx(0.1 * 1.035)
    assert made.ttft.ratio == pytest.approx(10.0)
    assert made.on.cached == pytest.approx(0.8)
    assert made.on.wall == pytest.approx(sum(0.1 * (1 + at / 100) + 0.2 for at in range(1, 7)))
    assert len(made.on.firsts) == 7


def test_what_it_saves_is_said_and_what_it_does_not() -> None:
    lesson = prefix.Experiment().teach(found(answers(1.0, 0.1), answers(1.0, 1.0, cached=0)))
    assert [one.verdict for one in lesson.beliefs] == [Verdict.HOLDS, Verdict.HOLDS]
    said = " ".join(one.text for one in lesson.findings)
    assert "10.00 times (10.00 to 10.00) as long without" in said
    assert "80% of the prompts' tokens came from the cache; 80% are common to all" in said
    assert "for about 80 tokens" in said


def test_a_cache_that_saves_nothing_is_not_praised() -> None:
    lesson = prefix.Experiment().teach(found(answers(1.0, 1.0, cached=8), answers(1.0, 1.0, cached=0)))
    assert lesson.beliefs[0].verdict is Verdict.OPEN
    assert "did not find all that it could" in " ".join(one.text for one in lesson.findings)
    slower = prefix.Experiment().teach(found(answers(1.0, 2.0), answers(1.0, 1.0)))
    assert slower.beliefs[0].verdict is Verdict.FAILS
    assert "nothing was gained" in slower.findings[1].text


def test_a_change_of_the_later_tokens_is_seen() -> None:
    lesson = prefix.Experiment().teach(found(answers(1.0, 0.1, gap=0.1), answers(1.0, 1.0, gap=0.2)))
    assert lesson.beliefs[1].verdict is Verdict.FAILS
