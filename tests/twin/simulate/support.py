"""The real engine, with a stand-in for a backend that computes, on the clock of the same cost; and small fleets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tailrace.backends import Batch
from tailrace.engine.config import EngineConfig
from tailrace.engine.core import EngineCore
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.fleet import placement
from tailrace.ledger.timeline import Timeline
from tailrace.measure.counting import Counting, Plan
from tailrace.terms import Event, EventKind
from tailrace.twin.simulate.cost import Linear, Step, StepCost
from tailrace.twin.simulate.fleet import Answered, Fleet
from tailrace.twin.simulate.replica import Replica
from tailrace.twin.simulate.traffic import Traffic
from tailrace.workload import make, spec
from tests.fakes import FakeBackend, FakeClock

COST = Linear(step=0.01, token=0.001, request=0.0005, sample=0.0002, read=0.00001, pair=0.000001)
VOCAB = 512


class Call(NamedTuple):
    """One request: when, what, and the token that its answer consists of."""

    at: float
    prompt: Sequence[int]
    output: int
    answer: int


def submit(number: int, call: Call) -> Submit:
    """With a bias, so that a backend that computes draws that token too."""
    params = SamplingParams(max_tokens=call.output, ignore_eos=True, logit_bias={call.answer: 100.0})
    return Submit(str(number), list(call.prompt), params)


def engine_events(calls: Sequence[Call], config: EngineConfig, cost: StepCost) -> list[Event]:
    """What the real engine says, its backend and its batches included, when it is called at these times."""
    clock = FakeClock(0.0)
    waiting = [(call.at, submit(number, call)) for number, call in enumerate(calls)]

    def duration(batch: Batch) -> float:
        step = Step(np.diff(batch.starts).tolist(), batch.context.tolist(), len(batch.wanted))
        seconds = cost.seconds(step)
        if waiting and waiting[0][0] <= clock.now + seconds:
            core.interrupt()
        return seconds

    backend = FakeBackend(config.pages, VOCAB, clock=clock, duration=duration)
    core = EngineCore(backend, config, eos_ids=(), vocab_size=VOCAB, clock=clock)
    events: list[Event] = []

    def take_in() -> None:
        while waiting and waiting[0][0] <= clock.now:
            core.submit(waiting.pop(0)[1])

    while waiting or core.has_work:
        if not core.has_work:
            clock.now = waiting[0][0]
            core.submit(waiting.pop(0)[1])
            news = core.step()
        else:
            news = core.step(take_in)
        events += news.events if news is not None else []
        core.check_integrity()
    assert not backend.violations
    return events


def simulated_events(
    calls: Sequence[Call], config: EngineConfig, cost: StepCost, *, at_once: bool = True
) -> tuple[list[Event], list[Timeline]]:
    """What a simulated replica says, and the timelines made of that."""
    timelines: list[Timeline] = []
    replica = Replica(0, config, cost, timelines.append, at_once=at_once)
    events: list[Event] = []
    add = replica.book.add

    def listened(more: Sequence[Event]) -> None:
        events.extend(more)
        add(more)

    replica.book.add = listened  # type: ignore[method-assign]
    left = list(enumerate(calls))
    while left or replica.due < float("inf"):
        if left and left[0][1].at <= replica.due:
            number, call = left.pop(0)
            replica.give(submit(number, call), call.at, call.answer)
        else:
            replica.proceed()
        replica.core.check_integrity()
    ours = (EventKind.SUBMITTED, EventKind.DELIVERED)
    return [event for event in events if event.kind not in ours], timelines


def ran(
    workload: str, plan: Plan, *, replicas: int = 1, place: str = "turns", config: EngineConfig | None = None,
    cost: StepCost = COST, at_once: bool = True,
) -> tuple[list[Answered], Fleet, Counting]:  # fmt: skip
    """A workload of TOML on a fleet."""
    config = config or EngineConfig(kv_tokens=16 * 2048, step_tokens=256, max_running=16, draft_tokens=0)
    fleet = Fleet(replicas, config, cost, placement.make(place), at_once=at_once)
    answered: list[Answered] = []
    counting = Counting(plan)
    sessions = make.sessions(spec.parse(workload, "test"), plan.seed)
    fleet.run(Traffic(sessions, plan.arrivals, seed=plan.seed, gate=counting), answered.append)
    for replica in fleet.replicas:
        replica.core.check_integrity()
    return answered, fleet, counting
