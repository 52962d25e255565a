"""What a batch gives and takes."""

from __future__ import annotations

import pytest

from tailrace.measure.lab import batch
from tailrace.measure.lab.experiment import Verdict
from tailrace.measure.lab.values import Mean
from tests.measure.support import ran, record


def exact(value: float, n: int = 5) -> Mean:
    return Mean(value, value, value, n)


def batches(steps: dict[int, float]) -> batch.Batches:
    """Sizes whose steps take so many seconds, and that spend no time on prompts."""
    made = [batch.Batch(size, exact(size / step), exact(step), exact(step), exact(0.1), 5 * size)
            for size, step in steps.items()]  # fmt: skip
    return batch.Batches(64, 32, made, [])


def test_a_step_is_timed_while_all_are_writing() -> None:
    early = record([1.0, 3.0, 3.1, 3.2, 3.3, 3.4])  # waits for the other's prompt after its first token
    late = record([3.0, 3.1, 3.2, 3.3, 3.4, 3.5])
    assert batch.step_of([early, late]) == pytest.approx(0.1)
    assert batch.step_of([record([1.0, 1.1]), record([2.0, 2.1])]) is None
    twice = record([1.0, 1.2, 1.4, 1.6], tokens=8)  # two tokens a piece
    assert batch.step_of([twice]) == pytest.approx(0.1)


def test_throughput_is_that_of_whole_waves() -> None:
    waves = [ran([record([1.0, 1.5, 2.0]), record([1.5, 2.0, 2.5])]) for _ in range(3)]
    found = batch.folded(2, waves)
    assert found.throughput.value == pytest.approx(6 / 2.5)
    assert (found.throughput.n, found.requests) == (3, 6)
    assert found.tpot.value == pytest.approx(0.5)


def test_what_is_shared_is_read_off_a_line() -> None:
    said = " ".join(one.text for one in batch.Experiment().teach(batches({1: 0.05, 4: 0.08, 8: 0.12})).findings)
    assert "8 at once gave 66.7 output tokens a second, 3.33 times" in said
    assert "40 ms of a step is there for all" in said
    assert "10 ms is added by each request" in said
    assert "Of a step with one request 80% is shared" in said
    assert "half of a step at 4.0 requests" in said


def test_where_nothing_is_shared_that_is_said() -> None:
    lesson = batch.Experiment().teach(batches({1: 0.05, 4: 0.2, 8: 0.4}))
    assert "no part of a step is shared" in lesson.findings[-1].text
    assert [one.verdict for one in lesson.beliefs] == [Verdict.FAILS, Verdict.HOLDS]


def test_a_free_batch_is_believed() -> None:
    lesson = batch.Experiment().teach(batches({1: 0.05, 4: 0.05, 8: 0.05}))
    assert [one.verdict for one in lesson.beliefs] == [Verdict.HOLDS, Verdict.OPEN]
    assert "the intervals overlap" in lesson.beliefs[1].because
