"""Engines side by side: turns, what is seen of each, what is said of it, and that nothing is left running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.deploy import machine, processes
from tailrace.deploy.engines.driver import Command, Found, Gauges, Options
from tailrace.deploy.local import Replica
from tailrace.measure import gauges, statistics
from tailrace.measure.counting import Plan
from tailrace.measure.engines import judge, sizes, turns
from tailrace.measure.engines.turns import Contest, Entrant, Setup
from tailrace.measure.record import Outcome
from tailrace.measure.report import html
from tailrace.measure.result import Bench, Decision, Measured, Side, Turn
from tailrace.measure.slo import Slo
from tailrace.measure.summary import summarise
from tailrace.workload import spec
from tailrace.workload.arrivals import Closed, Poisson
from tests.deploy import standin
from tests.measure.support import ran, record

FOUND = Found(("standin",), "9.9", "here")
TASK = spec.parse("input = 10\noutput = 4", "test")


@dataclass
class Scripted:
    """A driver of the stand-in: `flags` are those of its first start, of its second, and so on (the last again)."""

    name: str
    flags: tuple[tuple[str, ...], ...] = ((),)
    formats = "anything"
    gauges = Gauges(running=("busy",), kv_use=("used",), cache_hits=("hits",), cache_queries=("asked",))
    starts: int = 0

    def find(self, given: str | None) -> Found:
        return FOUND

    def unfit(self, model: str) -> str | None:
        return None

    def command(self, found: Found, options: Options, port: int) -> Command:
        if not port:  # only to be shown
            return Command(self.name, ("standin",), port, "model")
        flags = self.flags[min(self.starts, len(self.flags) - 1)]
        self.starts += 1
        script = str(Path(standin.__file__))
        return Command(self.name, (sys.executable, "-I", "-S", script, str(port), *flags), port, "model")


def entrant(name: str, *flags: tuple[str, ...]) -> Entrant:
    return Entrant(name, Scripted(name, flags or ((),)), FOUND, Options("some/model"), f"weights of {name}")


def setup(tmp_path: Path, *, at_a_time: int = 2, turns: int = 2, **more: Any) -> Setup:
    plan = Plan(Closed(at_a_time), sessions=4, warmup=1, sustain=False)
    return Setup(TASK, plan, turns=turns, logs=tmp_path, **more)


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of single runs are not looked at here, and take longest."""
    monkeypatch.setattr(statistics, "DRAWS", 100)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Replica]:
    """Every server that is started; none may be left at the end."""
    found: list[Replica] = []
    real = Replica.start

    def start(*given: Any, **more: Any) -> Replica:
        found.append(real(*given, **more))
        return found[-1]

    monkeypatch.setattr(Replica, "start", start)
    return found


def test_turns_are_interleaved_and_each_has_the_same_requests(tmp_path: Path, started: list[Replica]) -> None:
    slow = ("first=0.02", "metrics=busy 3;used 0.5")
    contest = Contest([entrant("a"), entrant("b", slow)], setup(tmp_path, between="suspend"))
    contest.run()
    assert [run.label for run in contest.runs] == ["a 1", "b 1", "b 2", "a 2"]
    assert len(started) == 2  # suspended, not started again
    a, b = contest.sides
    assert {run.summary.outcomes["ok"] for run in contest.runs} == {4}
    assert {run.model for run in contest.runs} == {"model"}
    assert a.turns[0].ready is not None
    assert a.turns[0].first_token is not None
    assert b.turns[0].first_token > b.turns[0].ready > 0  # type: ignore[operator]
    assert a.turns[1].ready is None
    assert a.turns[0].rss > 2**20  # type: ignore[operator]
    assert a.turns[0].tokens == 5 * 4  # that of the warm-up, too
    assert (b.turns[0].running, b.turns[0].kv_use, b.turns[0].cached) == (3, 0.5, None)
    assert (a.version, a.weights, a.command) == ("9.9", "weights of a", ["standin"])
    assert not any(replica.alive for replica in started)


def test_engines_may_be_stopped_between_turns_and_are_where_memory_is_short(
    tmp_path: Path, started: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[int] = []

    def begin(label: str, plan: Plan) -> Callable[[Any], object]:
        alone.append(sum(replica.alive for replica in started))
        return lambda _: None

    contest = Contest([entrant("a"), entrant("b")], setup(tmp_path, turns=1, between="restart", begin=begin))
    contest.run()
    assert alone == [1, 1]
    assert [turn.ready is not None for side in contest.sides for turn in side.turns] == [True] * 2
    monkeypatch.setattr(machine, "available_memory", lambda: 2**20)
    said: list[str] = []
    contest = Contest([entrant("a"), entrant("b")], setup(tmp_path, between="suspend", say=said.append))
    assert contest.suspends
    contest = Contest([entrant("a"), entrant("b")], setup(tmp_path, turns=1, say=said.append))
    contest.run()
    assert not contest.suspends
    assert "memory is short: engines are stopped between their turns" in said
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    assert not Contest([], setup(tmp_path)).suspends


def test_one_that_ends_in_the_middle_is_counted_and_started_again_for_its_next_turn(
    tmp_path: Path, started: list[Replica]
) -> None:
    both = [entrant("good"), entrant("bad", ("dies=8",), ())]
    contest = Contest(both, setup(tmp_path, at_a_time=1, between="suspend"))
    contest.run()
    good, bad = contest.sides
    assert [turn.died for turn in bad.turns] == [True, False]
    assert contest.runs[1].summary.failures == 2  # after four to get to know it and a warm-up: the third, and the last
    assert contest.runs[2].summary.failures == 0
    assert bad.turns[0].cpu is None
    found = judge.differences([good, bad], contest.runs)
    decision = judge.decide([good, bad], contest.runs, found)
    assert decision.chosen == "good"
    assert any("bad failed: 2 of 8 requests" in text for text in decision.reasons)
    assert "bad ended in the middle of turn 1." in decision.reasons
    assert not any(replica.alive for replica in started)


def test_one_that_cannot_be_started_is_left_out_and_the_others_go_on(tmp_path: Path, started: list[Replica]) -> None:
    broken = entrant("broken", ("says=out of memory", "ends=5"))
    contest = Contest([broken, entrant("good")], setup(tmp_path, between="suspend"))
    contest.run()
    first, second = contest.sides
    assert "broken ended with status 5 before it was ready" in first.absent
    assert "out of memory" in first.absent
    assert len(first.turns) == 1  # it was not tried again
    assert len(second.turns) == 2
    later = Contest([entrant("late", (), ("ends=6",))], setup(tmp_path, between="restart"))
    later.run()
    (side,) = later.sides
    assert not side.absent  # it has run
    assert [turn.run for turn in side.turns] == [0, None]
    assert "status 6" in side.turns[1].failed


def test_an_interrupted_comparison_ends_with_what_there_is_and_leaves_nothing(
    tmp_path: Path, started: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = turns.bench.once
    count = 0

    async def once(*given: Any) -> Measured:
        nonlocal count
        count += 1
        made = await real(*given)
        summary = msgspec.structs.replace(made.summary, interrupted=count == 2)
        return msgspec.structs.replace(made, summary=summary)

    monkeypatch.setattr(turns.bench, "once", once)
    contest = Contest([entrant("a"), entrant("b")], setup(tmp_path))
    contest.run()
    assert contest.interrupted
    assert [len(side.turns) for side in contest.sides] == [1, 1]

    def broken(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(turns.gauges, "Look", broken)
    contest = Contest([entrant("a"), entrant("b")], setup(tmp_path))
    contest.run()
    assert contest.interrupted
    assert contest.runs == []
    assert len(started) == 3
    assert not any(processes.alive(processes.tree(replica._root)) for replica in started)


def test_where_none_can_take_part_that_is_what_is_said(tmp_path: Path) -> None:
    contest = Contest([], setup(tmp_path))
    contest.run()
    sides = [Side(label="a", engine="a", absent="a is not installed")]
    decision = judge.decide(sides, contest.runs, judge.differences(sides, contest.runs))
    assert decision.chosen is None
    assert decision.reasons == ["a was not measured: a is not installed", "Nothing was measured."]
    page = html.html(Bench(kind="engines", runs=[], sides=sides, decision=decision))
    assert "None can be chosen" in page
    assert "a is not installed" in page


def test_the_order_of_turns_favours_nobody() -> None:
    made = ["".join(turns.order("ABC", number)) for number in range(6)]
    assert made == ["ABC", "CBA", "BCA", "ACB", "CAB", "BAC"]
    for place in range(3):
        assert sorted(one[place] for one in made) == sorted("ABC" * 2)


# --- what the turns show ----------------------------------------------------------------------------------------------


@cache
def measured(label: str, speed: float = 1.0, ttft: float | None = None, *, failures: int = 0, requests: int = 10,
             open_loop: bool = False, output: int | None = 4) -> Measured:  # fmt: skip
    """Ten requests at once of four tokens each: the first after 0.1 s, a token each 0.1 s, over the speed."""
    good = [
        record([0.1 / speed * (1 + place) for place in range(4)], tokens=output) for _ in range(requests - failures)
    ]
    bad = [record([], outcome=Outcome.REFUSED, error="503: no room") for _ in range(failures)]
    for one in [*good, *bad]:
        one.wanted_output = 4
    run = ran([*good, *bad], (0.0, 0.4 / speed))
    slo = None if ttft is None else Slo({"ttft": ttft})
    return Measured(label=label, url="", model="m", workload="w", load="8 at a time", level=8, open_loop=open_loop,
                    summary=summarise(run, slo), records=run.records)  # fmt: skip


def contested(
    speeds: dict[str, list[float]], slo: Slo | None = None, **more: dict[str, Any]
) -> tuple[list[Side], list[Measured], Decision]:
    """Engines with a speed for each turn; `more` has what else is said of a run, or of an engine, by its name."""
    runs: list[Measured] = []
    sides = []
    for name, each in speeds.items():
        own = dict(more.get(name, {}))
        price, weights, rss = own.pop("price", None), own.pop("weights", "w"), own.pop("rss", 2**20)
        made = []
        for speed in each:
            runs.append(measured(name, speed, None if slo is None else slo.bounds["ttft"], **own))
            made.append(Turn(run=len(runs) - 1, rss=rss, cpu=1 / speed, tokens=40.0))
        sides.append(Side(label=name, engine=name, weights=weights, price=price, turns=made))
    return sides, runs, judge.decide(sides, runs, judge.differences(sides, runs), slo)


STEADY = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95]


def faster(times: float) -> list[float]:
    return [speed * times for speed in STEADY]


def test_the_faster_one_is_chosen_and_by_how_much_is_said() -> None:
    sides, runs, decision = contested({"a": STEADY, "b": faster(1.5)})
    assert decision.chosen == "b"
    assert decision.goal == "output tokens/s"
    assert decision.reasons[0] == (
        "b is better than a in output tokens/s: 150 against 100, 1.50 times as much (1.50 to 1.50, p = 0.031, 6 pairs)."
    )
    found = judge.differences(sides, runs)
    one = judge.between(found, "TTFT, median", "b", "a")
    assert one is not None
    assert one.ratio.ratio == pytest.approx(1.5)
    assert one.sides == ("b", "a")


def test_runs_that_cannot_tell_say_so_and_what_else_differs() -> None:
    noisy = [1.1, 0.9, 1.0, 1.0, 1.2, 0.8]
    _, _, decision = contested({"a": STEADY, "b": noisy}, a={"rss": 2**20}, b={"rss": 2**21})
    assert decision.chosen is None
    assert sorted(decision.ties) == ["a", "b"]
    assert "No difference that these runs can show between" in decision.reasons[0]
    _, _, few = contested({"a": STEADY[:3], "b": faster(3)[:3]})
    assert few.chosen is None
    assert "With 3 turns of 2 engines no difference can be sure; 6 are the fewest." in few.reasons


def test_what_another_is_better_in_is_said_beside_the_choice() -> None:
    _, _, decision = contested({"a": STEADY, "b": faster(1.5)}, b={"rss": 2**22})
    assert decision.chosen == "b"
    assert "a is better than b in memory (1 MiB against 4 MiB)." in decision.reasons


def test_comparisons_of_many_engines_need_more_than_those_of_two() -> None:
    _, _, two = contested({"a": STEADY, "b": faster(1.5)})
    _, _, three = contested({"a": STEADY, "b": faster(1.5), "c": faster(1.2)})
    assert two.chosen == "b"
    assert three.chosen is None  # p = 0.031 of three comparisons is none
    assert "With 6 turns of 3 engines no difference can be sure; 7 are the fewest." in three.reasons
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert [statistics.least_pairs(count) for count in (1, 3, 6, 21)] == [6, 7, 8, 10]


def test_who_fails_is_set_aside_however_fast_it_is() -> None:
    _, _, decision = contested({"a": STEADY, "b": faster(3)}, b={"failures": 2})
    assert decision.chosen == "a"
    assert "b failed: 12 of 60 requests, most often with “503: no room”." in decision.reasons
    _, _, decision = contested({"a": STEADY, "b": STEADY}, b={"failures": 10})
    assert decision.chosen == "a"
    assert any(text.startswith("b only failed: 60 of 60") for text in decision.reasons)
    _, _, decision = contested({"a": STEADY}, a={"failures": 10})
    assert decision.chosen is None


def test_with_an_slo_only_those_that_keep_it_can_be_chosen_and_goodput_judges() -> None:
    slo = Slo({"ttft": 0.15})
    _, _, decision = contested({"a": STEADY, "b": [0.5] * 6}, slo)
    assert decision.chosen == "a"
    assert decision.goal == "goodput"
    assert any(text.startswith("a kept ttft <= 0.15 s for 95%: 100.0%") for text in decision.reasons)
    assert any(text.startswith("b did not keep") for text in decision.reasons)
    _, _, decision = contested({"a": [0.1] * 6, "b": [0.2] * 6}, slo)
    assert "None kept it; the nearest is named." in decision.reasons


def test_a_price_decides_where_it_is_given() -> None:
    _, _, decision = contested({"a": STEADY, "b": faster(1.5)}, a={"price": 1.0}, b={"price": 4.0})
    assert decision.goal == "$ a million output tokens"
    assert decision.chosen == "a"
    assert "2.78 against $7.41" in decision.reasons[0]
    _, _, decision = contested({"a": STEADY, "b": faster(1.5)}, a={"price": 1.0})
    assert decision.goal == "output tokens/s"  # not known of both


def test_in_an_open_loop_what_users_wait_decides() -> None:
    _, _, decision = contested({"a": STEADY, "b": faster(1.5)}, a={"open_loop": True}, b={"open_loop": True})
    assert decision.goal == "E2E, median"
    assert decision.chosen == "b"


def test_what_makes_a_comparison_unfair_is_said() -> None:
    _, _, decision = contested({"a": STEADY, "b": faster(1.5)}, a={"weights": "x"}, b={"weights": "y", "output": 2})
    assert any("They did not run the same weights (a: x; b: y)" in text for text in decision.reasons)
    assert any(text.startswith("b gave answers of 2 tokens where 4 were asked for") for text in decision.reasons)


def test_gauges_are_read_whatever_labels_they_have_and_what_is_not_told_is_not_known() -> None:
    page = '# HELP busy\nbusy{a="1"} 2\nbusy{a="2"} 3\nbusy_max 9\nused 0.5\n'
    assert gauges.value(page, ("gone", "busy")) == 5
    assert gauges.value(page, ("busy",), largest=True) == 3
    assert gauges.value(page, ("us",)) is None


def test_servers_are_made_for_what_the_workload_needs() -> None:
    plan = Plan(Closed(3), sessions=5)
    assert sizes.context(spec.parse("input = 100\noutput = 50", "t"), plan, 2) == 165 + 64
    agent = spec.load("agent")
    assert sizes.context(agent, plan, 1) > 1000
    assert sizes.parallel(TASK, plan) == 3
    assert sizes.parallel(agent, plan) == 6
    assert sizes.parallel(TASK, Plan(Poisson(1.0))) == 32


def test_a_comparison_is_kept_and_read_again() -> None:
    sides, runs, decision = contested({"a": STEADY, "b": faster(1.5)})
    bench = Bench(kind="engines", runs=runs, sides=sides, decision=decision,
                  differences=judge.differences(sides, runs))  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(bench), type=Bench).decision == decision
