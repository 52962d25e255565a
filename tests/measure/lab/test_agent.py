"""An agent's loop: what it sends, and what that costs."""

from __future__ import annotations

import pytest

from tailrace.ledger.price import Api
from tailrace.measure.lab import agent, caching
from tailrace.measure.lab.experiment import Mark, Verdict
from tailrace.measure.record import Record
from tailrace.terms import TailraceError
from tests.measure.support import record

API = Api(usd_per_million_input=1.0, usd_per_million_cached=0.1, usd_per_million_output=10.0, source="a page")


def step(turn: int, tokens_in: int, seconds: float, *, out: int = 10, cached: int | None = None) -> Record:
    made = record([0.1, seconds], input=tokens_in, tokens=out)
    made.turn, made.cached_tokens = turn, cached
    return made


def rounds(inputs: tuple[int, ...], on: float, off: float, *, cached: bool = True) -> agent.Agent:
    """Two rounds of a loop. With the cache every step takes `on`, without it the k-th takes k times `off`."""
    with_it = [step(at, tokens, on, cached=tokens // 2 if cached else None)
               for _ in range(2) for at, tokens in enumerate(inputs)]  # fmt: skip
    without = [step(at, tokens, (at + 1) * off) for _ in range(2) for at, tokens in enumerate(inputs)]
    once = [step(0, inputs[-1], 3.0, out=10 * len(inputs))] * 2
    return agent.found(with_it, without, once, {"some": API}, "an option", [])


def test_every_step_carries_all_before_it() -> None:
    session = agent.loop(7, 100, 40, 10)
    assert [turn.input for turn in session.turns] == [100, 150, 200, 250, 300]
    assert [turn.after for turn in session.turns] == [(), (0,), (1,), (2,), (3,)]
    for before, after in zip(session.turns, session.turns[1:], strict=False):
        assert after.pieces[: len(before.pieces)] == before.pieces
    whole = agent.at_once(7, 100, 40, 10).turns[0]
    assert (whole.input, whole.output) == (100 + 4 * 40, 50)


def test_a_prompt_that_no_cache_can_know_differs_from_its_first_token_on() -> None:
    session = agent.loop(0, 100, 40, 10)
    marked = caching.unknown(session)
    firsts = {turn.pieces[0].source for turn in marked.turns}
    assert len(firsts) == len(session.turns)
    assert all(new.pieces[1:] == old.pieces for new, old in zip(marked.turns, session.turns, strict=True))


def test_the_bill_follows_from_the_tokens() -> None:
    found = rounds((100, 150, 200, 250, 300), 1.0, 1.0)
    (bill,) = found.bills
    assert bill.loop == pytest.approx((1000 * 1.0 + 50 * 10.0) / 1e6)
    assert bill.first == pytest.approx((100 * 1.0 + 10 * 10.0) / 1e6)
    assert bill.loop_cached == pytest.approx((500 * 1.0 + 500 * 0.1 + 50 * 10.0) / 1e6)
    lesson = agent.Experiment().teach(found)
    said = " ".join(one.text for one in lesson.findings)
    assert "100 + 150 + 200 + 250 + 300 = 1,000 tokens, 10.0 times those of its first step" in said
    assert "3.3 times what there is to read once (300)" in said
    assert "7.5 times" in said
    assert Mark.ASSUMED in {one.mark for one in lesson.findings}


def test_twelve_times_is_judged_by_this_run() -> None:
    assert _first(rounds((100, 150, 200, 250, 300), 1.0, 1.0)) is Verdict.FAILS  # 7.5
    assert _first(rounds((100, 300, 500, 600, 500), 1.0, 1.0)) is Verdict.HOLDS  # 12.5
    cheap = rounds((100, 150), 1.0, 1.0)
    assert "7.5" not in agent.Experiment().teach(cheap).beliefs[0].because


def _first(found: agent.Agent) -> Verdict:
    return agent.Experiment().teach(found).beliefs[0].verdict


def test_growing_steps_are_seen_and_equal_ones_too() -> None:
    beliefs = agent.Experiment().teach(rounds((100, 150, 200), 1.0, 1.0)).beliefs
    assert [one.verdict for one in beliefs[1:]] == [Verdict.HOLDS, Verdict.HOLDS]
    flat = agent.Experiment().teach(rounds((100, 150, 200), 1.0, 0.0001)).beliefs
    assert "The last took 1.00 times" in flat[2].because


def test_a_server_that_tells_no_cached_tokens_gets_no_bill_for_them() -> None:
    found = rounds((100, 150), 1.0, 1.0, cached=False)
    assert found.bills[0].loop_cached is None
    lesson = agent.Experiment().teach(found)
    assert lesson.tables[0].rows[0][2] == "not told"
    assert lesson.tables[1].rows[0][2] == "not known"


def test_without_usage_there_is_no_bill() -> None:
    with pytest.raises(TailraceError, match="no usage"):
        agent.found([record([1.0, 2.0], tokens=None)], [record([1.0, 2.0])], [record([1.0, 2.0])], {}, "", [])
