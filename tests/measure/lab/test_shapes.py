"""Where a request's time goes, by its shape."""

from __future__ import annotations

import pytest

from tailrace.measure.lab import shapes
from tailrace.measure.lab.experiment import Verdict
from tailrace.measure.lab.stand import Pace, Served, Stand
from tailrace.measure.record import Record
from tests.measure.lab.support import served
from tests.measure.support import record

SIZES = {"A": (10, 2), "B": (100, 2), "C": (10, 20), "D": (100, 20)}


def of(letter: str, prefill: float, decode: float, *, told: bool = True) -> Record:
    """A request of a shape, whose server says what it says after `prefill` seconds and then evenly for `decode`."""
    tokens_in, tokens_out = SIZES[letter]
    chunks = [prefill + decode * at / (tokens_out - 1) for at in range(tokens_out)]
    made = record(chunks, input=tokens_in, tokens=tokens_out)
    made.wanted_input, made.wanted_output = tokens_in, tokens_out
    made.phases = {"prefill": prefill, "decode": decode, "other": 0.1 * (prefill + decode)} if told else {}
    return made


def all_of(times: dict[str, tuple[float, float]], *, told: bool = True) -> list[Record]:
    return [of(letter, *pair, told=told) for _ in range(3) for letter, pair in times.items()]


USUAL = {"A": (0.1, 0.1), "B": (1.0, 0.1), "C": (0.1, 1.9), "D": (1.0, 1.9)}


def test_shares_are_from_the_servers_timeline() -> None:
    found = shapes.found(all_of(USUAL), SIZES, [])
    assert found.source == shapes.TIMELINE
    by = {one.letter: one for one in found.shapes}
    assert by["B"].prefill.value == pytest.approx(1.0 / 1.21)
    assert by["B"].decode.value == pytest.approx(0.1 / 1.21)
    assert by["C"].e2e.value == pytest.approx(2.0)
    assert (by["D"].tokens_in, by["D"].tokens_out, by["D"].e2e.n) == (100, 20, 3)
    assert by["B"].prefill_rate is not None
    assert by["B"].prefill_rate.value == pytest.approx(100.0)


def test_without_one_they_are_from_the_client_and_it_is_said() -> None:
    found = shapes.found(all_of(USUAL, told=False), SIZES, ["a note"])
    assert found.source == shapes.CLIENT
    assert found.shapes[1].prefill.value == pytest.approx(1.0 / 1.1)
    lesson = shapes.Experiment().teach(found)
    assert any("TTFT and E2E" in note for note in lesson.notes)
    assert "a note" in lesson.notes


def test_findings_are_this_runs_numbers() -> None:
    said = " ".join(one.text for one in shapes.Experiment().teach(shapes.found(all_of(USUAL), SIZES, [])).findings)
    assert "A took 200 ms, D 2.9 s, 14.5 times as long" in said
    assert "read at 100 tokens a second (B), an answer written at 10 (C)" in said
    assert "as long as 10.0 tokens in" in said
    assert "for 100 tokens in, from about 10 out on" in said


def test_a_run_that_contradicts_what_people_say_says_so() -> None:
    usual = shapes.Experiment().teach(shapes.found(all_of(USUAL), SIZES, [])).beliefs
    assert [one.verdict for one in usual] == [Verdict.HOLDS] * 3
    odd = {**USUAL, "B": (0.1, 1.0), "C": (1.9, 0.1), "D": (5.0, 1.0)}
    found = shapes.Experiment().teach(shapes.found(all_of(odd), SIZES, [])).beliefs
    assert [one.verdict for one in found] == [Verdict.FAILS] * 3
    assert "prefill was 76% of D" in found[2].because


def test_sizes_fit_the_context_and_the_time() -> None:
    def longest(made: Served, budget: float) -> tuple[int, int]:
        return shapes.sized(made, Stand("m", budget))["D"]

    assert longest(served(Pace(1e6, 1e6)), 60.0) == (2048, 256)
    assert longest(served(Pace(1e6, 1e6), context=700), 60.0) == (512, 64)
    assert longest(served(Pace(400.0, 25.0)), 60.0) == (1024, 128)
    assert longest(served(Pace(1.0, 1.0)), 1.0) == (128, 16)
