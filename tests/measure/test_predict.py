"""A simulated load as a run: by hand where that is easy, and by the rules of a measured one."""

from __future__ import annotations

from collections import Counter

import pytest

from tailrace.engine.config import EngineConfig
from tailrace.fleet import placement
from tailrace.measure import predict
from tailrace.measure.counting import Plan
from tailrace.measure.load import Run
from tailrace.measure.record import Outcome
from tailrace.measure.summary import summarise
from tailrace.twin.simulate.cost import Linear
from tailrace.twin.simulate.fleet import Fleet
from tailrace.workload import spec
from tailrace.workload.arrivals import Closed, Constant

CONFIG = EngineConfig(kv_tokens=16 * 256, step_tokens=64, max_running=4, max_waiting=2, draft_tokens=0)


def predicted(text: str, plan: Plan, replicas: int = 1) -> tuple[Run, Fleet]:
    fleet = Fleet(replicas, CONFIG, Linear(step=0.1), placement.make("turns"))
    return predict.run(fleet, spec.parse(text, "test"), plan), fleet


def test_a_request_alone_waits_a_step_for_each_chunk_of_its_prompt_and_each_token() -> None:
    run, _ = predicted("input = 150\noutput = 5", Plan(Constant(0.1), sessions=2, sustain=False))
    first, second = run.records
    assert (first.due, second.due) == (0.0, 10.0)
    assert first.chunks == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7])
    assert second.chunks == pytest.approx([10.3, 10.4, 10.5, 10.6, 10.7])
    assert (first.outcome, first.finish, first.input_tokens, first.output_tokens) == (Outcome.OK, "length", 150, 5)
    assert first.phases == pytest.approx({"prefill": 0.3, "decode": 0.4})
    latency = summarise(run).latency
    assert {name: stat.mean for name, stat in latency.items() if stat is not None} == pytest.approx(
        {"ttft": 0.3, "tpot": 0.1, "itl": 0.1, "e2e": 0.7, "gap": 0.1}
    )


def test_warm_up_and_what_outlasts_the_measurement_are_not_measured() -> None:
    run, _ = predicted("input = 20\noutput = 9", Plan(Closed(3), sessions=6, warmup=3))
    assert [record.session for record in run.measured] == [3, 4, 5, 6, 7, 8]
    assert {record.outcome for record in run.measured} == {Outcome.OK}
    others = Counter(record.outcome for record in run.records if not record.measured)
    assert others[Outcome.OK] >= 3
    assert others[Outcome.STOPPED] > 0
    assert run.window[0] == min(record.sent or 0.0 for record in run.measured)


def test_what_the_engine_refuses_is_a_failure_and_so_are_the_turns_after_it() -> None:
    run, _ = predicted("input = 20\noutput = 9\n[turns]\ncount = 2", Plan(Constant(100.0), sessions=20, sustain=False))
    outcomes = Counter((record.turn, record.outcome) for record in run.records)
    assert outcomes[0, Outcome.REFUSED] > 0
    assert outcomes[1, Outcome.ABANDONED] == outcomes[0, Outcome.REFUSED]
    summary = summarise(run)
    assert summary.requests == 40
    assert summary.errors["429 overloaded"] == summary.outcomes["refused"]


def test_a_prompt_that_no_replica_can_hold_is_an_error_and_not_a_latency() -> None:
    run, _ = predicted("input = 5000\noutput = 9", Plan(Closed(1), sessions=2, sustain=False))
    assert [(record.outcome, record.status, record.error) for record in run.records] == [
        (Outcome.ERROR, 400, "400 context_length_exceeded")
    ] * 2


def test_the_notes_say_how_busy_the_replicas_were() -> None:
    run, fleet = predicted("input = 20\noutput = 9", Plan(Constant(0.5), sessions=4, sustain=False), replicas=2)
    assert len(run.records) == 4
    assert fleet.now == pytest.approx(6.9)
    assert predict.notes(fleet, Counter({0: 2, 1: 2})) == [
        "2 replicas: 2 to 2 requests each, busy 26% to 26% of the time, 0 preemptions"
    ]
