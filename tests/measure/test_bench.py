"""Sweeps, searches and comparisons, against servers whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

import msgspec
import pytest
import uvloop

from tailrace.measure import bench, importing, probe, result
from tailrace.measure.bench import Bed
from tailrace.measure.counting import Plan
from tailrace.measure.http import Pool
from tailrace.measure.result import Bench, Measured
from tailrace.measure.slo import Slo
from tailrace.measure.summary import summarise
from tailrace.measure.target import Target
from tailrace.terms import InvalidInput, TailraceError
from tailrace.workload import spec
from tailrace.workload.arrivals import Closed, Constant, Poisson
from tests.measure import mock
from tests.measure.mock import Body, Mock, Script, piece, running, usage
from tests.measure.support import ran, record

T = TypeVar("T")


def bed(server: Mock, plan: Plan, slo: Slo | None = None, label: str = "") -> Bed:
    return Bed(Pool(server.url), Target("mock"), spec.parse("input = 5\noutput = 3", "tiny"), plan, slo, label)


def done(work: Coroutine[Any, Any, T], *beds: Bed) -> T:
    """What it gives; connections are closed then."""

    async def main() -> T:
        try:
            return await work
        finally:
            for one in beds:
                one.pool.close()

    return uvloop.run(main())


def measured(level: float, tokens: int = 3, *, good: int = 0, bad: int = 0) -> Measured:
    """A run at a level whose rate is `tokens` a second, with so many good and bad requests."""
    records = [record([0.5] * tokens)] if not good + bad else []
    records += [record([0.1, 0.2]) for _ in range(good)] + [record([9.0, 9.1]) for _ in range(bad)]
    slo = Slo({"ttft": 1.0}, 0.9) if good + bad else None
    return Measured(
        label=str(level), url="", model="m", workload="w", load="", level=level, open_loop=False,
        summary=summarise(ran(records, (0.0, 1.0)), slo),
    )  # fmt: skip


def test_the_knee_is_where_throughput_bends() -> None:
    found = bench.knee([measured(level, min(level, 9) * 10) for level in (1, 4, 8, 12, 20, 30)])
    assert found is not None
    assert found.level == 8
    assert bench.knee([measured(level, level * 10) for level in (1, 2, 3, 4, 5)]) is None
    assert bench.knee([measured(1), measured(2, 5)]) is None


def test_the_highest_load_has_an_interval_of_what_is_sure() -> None:
    runs = [measured(2, good=100), measured(4, good=93, bad=7), measured(8, good=89, bad=11), measured(16, bad=50)]
    found = bench.found(runs, Slo({"ttft": 1.0}, 0.9))
    assert (found.level, found.run, found.interval) == (4, 1, (2, 16))
    none = bench.found([measured(2, bad=50)], Slo({"ttft": 1.0}, 0.9))
    assert (none.level, none.interval) == (None, (0.0, 2))


def in_turn(limit: int) -> Callable[[Body], Script]:
    """Quick while there are at most so many at a time; the mock tells by how many sessions a prompt's number says."""
    running_now: list[float] = []

    def answer(body: Body) -> Script:
        import time

        now = time.monotonic()
        running_now[:] = [end for end in running_now if end > now]
        slow = len(running_now) >= limit
        running_now.append(now + 0.03)
        return mock.steady(0.1 if slow else 0.03)(body)

    return answer


def test_bisection_finds_the_most_at_a_time_that_keeps_the_slo() -> None:
    with running(in_turn(5)) as server:
        plan = Plan(Closed(1), sessions=40, warmup=1)
        place = bed(server, plan, Slo({"ttft": 0.09}, 0.9))
        runs, found = done(bench.search(place, 1, 32), place)
    assert found.level is not None
    assert 3 <= found.level <= 8
    assert len(runs) <= 8
    assert {run.level for run in runs} >= {1, 32}
    assert all(len(run.summary.latency) == 5 for run in runs)


def test_a_search_whose_least_load_is_too_much_says_so() -> None:
    with running(mock.steady(0.05)) as server:
        place = bed(server, Plan(Closed(1), sessions=4), Slo({"ttft": 0.001}))
        runs, found = done(bench.search(place, 1, 8), place)
    assert found.level is None
    assert len(runs) == 1


def test_a_sweep_runs_every_level_with_a_load_of_its_own() -> None:
    with running(mock.steady(0.005)) as server:
        place = bed(server, Plan(Closed(2), sessions=6, warmup=2, sustain=False))
        runs, _ = done(bench.sweep(place, [1, 3]), place)
        assert [run.level for run in runs] == [1, 3]
        assert [run.label for run in runs] == ["1 at a time", "3 at a time"]
        assert [run.summary.client.most_in_flight for run in runs] == [1, 3]
        prompts = {json.dumps(body["messages"]) for body in server.requests}
        assert len(prompts) == len(server.requests) == 6 + 1 + 6 + 3, "no run finds what another had cached"


def test_a_and_b_are_measured_in_turns_and_the_slower_one_is_found() -> None:
    with running(mock.steady(0.010)) as quick, running(mock.steady(0.030)) as slow:
        plan = Plan(Closed(1), sessions=3, sustain=False)
        a, b = bed(quick, plan, label="A"), bed(slow, plan, label="B")
        runs, found = done(bench.compare(a, b, 6), a, b)
        bodies = [[body["messages"] for body in server.requests] for server in (quick, slow)]
    assert [run.label[0] for run in runs] == list("ABBAABBAABBA")
    assert bodies[0] == bodies[1], "a pair is asked the same"
    ttft = next(one for one in found if one.metric == "TTFT, median")
    assert 2.0 < ttft.ratio.ratio < 4.0
    assert ttft.ratio.p < 0.05
    assert ttft.ratio.interval[0] > 1.0
    assert "goodput" not in {one.metric for one in found}


def asked(server: Mock | str, **how: object) -> tuple[Target, list[str]]:
    async def prepare() -> tuple[Target, list[str]]:
        pool = Pool(server if isinstance(server, str) else server.url)
        try:
            given = {"model": None, "api": "chat", "form": "text", "extra": {}, "exact": True} | how
            return await probe.prepare(pool, **given)  # type: ignore[arg-type]  # as a command line gives them
        finally:
            pool.close()

    return uvloop.run(prepare())


def two_tokens_a_word(body: Body) -> Script:
    words = sum(len(message["content"].split()) for message in body["messages"])
    return Script([(0, piece("a") + usage(2 * words + 11, 1) + mock.DONE)])


def test_how_words_become_tokens_is_asked() -> None:
    with running(two_tokens_a_word) as server:
        target, notes = asked(server)
    assert (target.model, target.fit.slope, target.fit.offset) == ("mock", 2.0, 11.0)
    assert target.extra == {"ignore_eos": True}
    assert notes == []


def strict(body: Body) -> Script:
    if "ignore_eos" in body:
        return Script(status=400, error={"error": {"message": "unknown parameter ignore_eos"}})
    return mock.steady()(body)


def test_a_server_that_does_not_know_ignore_eos_is_asked_without() -> None:
    with running(strict) as server:
        target, notes = asked(server)
        assert target.extra == {}
        assert "ignore_eos" in notes[0]
        with pytest.raises(TailraceError, match="unknown parameter ignore_eos"):
            asked(server, extra={"ignore_eos": True})


def small(body: Body) -> Script:
    if max(body["prompt"]) >= 1000:
        return Script(status=400, error={"error": {"message": "token id out of range"}})
    return mock.steady()(body)


def test_a_small_vocabulary_is_found() -> None:
    with running(small) as server:
        target, _ = asked(server, api="completions", form="ids")
    assert 400 < target.vocabulary <= 1000


def test_without_usage_words_are_taken_for_tokens_and_that_is_said() -> None:
    with running(lambda _: Script([(0, piece("a") + mock.DONE)])) as server:
        target, notes = asked(server)
    assert target.fit.slope == 1.0
    assert "no usage" in notes[0]


def test_servers_that_cannot_be_measured_say_why() -> None:
    with pytest.raises(TailraceError, match="No server answers"):
        asked("http://127.0.0.1:9")
    with running(mock.refuse(401, "wrong key")) as server, pytest.raises(TailraceError, match="401: wrong key"):
        asked(server)


def test_results_are_kept_and_come_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("results")
    numbers = count()
    one = Bench(kind="run", runs=[measured(next(numbers), good=3, bad=1)], slo=Slo({"ttft": 1.0}, 0.9), price=2.0)
    result.save(one, folder / "a.json")
    result.save(one, folder / "b.json")
    assert importing.read([folder / "a.json"]) == one
    both = importing.read([folder / "a.json", folder / "b.json"], price=3.0)
    assert (both.kind, len(both.runs), both.slo, both.price) == ("import", 2, one.slo, 3.0)
    (folder / "c.json").write_text("[]")
    for path, said in ((folder / "c.json", "no result"), (folder / "no.json", "cannot be read")):
        with pytest.raises(InvalidInput, match=said):
            importing.read([path])
    (folder / "d.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(one, format=99)))
    with pytest.raises(InvalidInput, match="format 99"):
        importing.read([folder / "d.json"])


def test_what_it_costs_counts_idle_time() -> None:
    summary = summarise(ran([record([1.0, 2.0], tokens=36)], (0.0, 10.0)))
    cost = result.cost(summary, 3.6)
    assert cost.per_million_output == pytest.approx(0.001 / 3.6 * 1e6)
    assert cost.per_thousand_requests == pytest.approx(10.0)
    assert cost.per_thousand_good is None


def test_a_table_of_requests_quotes_what_needs_it() -> None:
    run = measured(1, good=1)
    odd = record([], error='said "no", then left')
    lines = result.csv([msgspec.structs.replace(run, label="a,b", records=[odd])]).decode().splitlines()
    assert lines[0].startswith("run,session,turn,measured,outcome")
    assert lines[1].startswith('"a,b",0,0,1,ok,')
    assert lines[1].endswith('"said ""no"", then left"')


@pytest.mark.parametrize(("arrivals", "said"), [(Closed(3), "3 at a time"), (Poisson(2.5), "2.5 a second"),
                                                (Constant(2), "2 a second, evenly")])  # fmt: skip
def test_loads_have_words(arrivals: Closed | Poisson | Constant, said: str) -> None:
    assert bench.spoken(arrivals) == said
