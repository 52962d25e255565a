"""A load that was simulated, as a run: the same sessions measured, the same records, the same summary.

What a client adds is left out: requests are sent when they are due, every token is a piece of its own that comes the
moment its step ends, and nobody gives up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tailrace.ledger.record import ENGINE_REFUSALS
from tailrace.measure.counting import Counting, Plan
from tailrace.measure.load import Run
from tailrace.measure.record import Outcome, Record
from tailrace.measure.watch import UNKNOWN
from tailrace.twin.simulate.fleet import Answered, Fleet
from tailrace.twin.simulate.traffic import Asked, Traffic
from tailrace.workload import make
from tailrace.workload.spec import Workload

Observe = Callable[[Answered], object]


def run(fleet: Fleet, workload: Workload, plan: Plan, observe: Observe = lambda _: None) -> Run:
    """Sends the workload to a fleet that has not been used; `observe` gets each request as it ends. `Plan.timeout` has
    no part in it. Raises InvalidInput where the workload is a trace that cannot be read."""
    counting = Counting(plan)
    records: list[Record] = []

    def answered(one: Answered) -> None:
        records.append(record(one))
        observe(one)

    def abandoned(asked: Asked) -> None:
        left = _asked(asked)
        left.due, left.outcome, left.error = None, Outcome.ABANDONED, "a turn before it failed"
        records.append(left)

    traffic = Traffic(
        make.sessions(workload, plan.seed), plan.arrivals, seed=plan.seed, gate=counting, abandoned=abandoned
    )
    fleet.run(traffic, answered)
    return Run(0.0, counting.window(fleet.now), records, UNKNOWN, open_loop=traffic.open_loop)


def record(one: Answered) -> Record:
    """One request, as a client would have seen it."""
    asked, timeline = one.asked, one.timeline
    made = _asked(asked)
    made.began = made.sent = asked.at
    made.chunks = [asked.at + after for after in timeline.token_times]
    if not one.ended:
        return made
    made.input_tokens, made.output_tokens = asked.turn.input, timeline.output_tokens
    made.cached_tokens = timeline.cached_tokens
    made.ended = asked.at + timeline.e2e
    made.finish = timeline.finish
    made.phases = {phase.value: seconds for phase, seconds in timeline.phases.items() if seconds}
    if timeline.finish == "length":
        made.outcome, made.status = Outcome.OK, 200
    else:
        made.status = ENGINE_REFUSALS.get(timeline.cause, 500)
        made.outcome = Outcome.REFUSED if made.status in (429, 503) else Outcome.ERROR
        made.error = f"{made.status} {timeline.cause}"
    return made


def notes(fleet: Fleet, answered: Counter[int]) -> list[str]:
    """How the requests were spread over the replicas, and what these did, in words. `answered`: requests by replica."""
    counts = [answered[replica.number] for replica in fleet.replicas]
    many = len(fleet.replicas)
    spread = f"{min(counts):,} to {max(counts):,} requests each" if many > 1 else f"{counts[0]:,} requests"
    busy = [replica.busy / fleet.now if fleet.now else 0.0 for replica in fleet.replicas]
    low, high = min(busy), max(busy)
    kept = f"busy {low:.0%} to {high:.0%} of the time" if many > 1 else f"busy {high:.0%} of the time"
    preempted = sum(replica.core.scheduler.preemptions for replica in fleet.replicas)
    return [f"{many:,} {'replicas' if many > 1 else 'replica'}: {spread}, {kept}, {preempted:,} preemptions"]


def _asked(asked: Asked) -> Record:
    turn = asked.turn
    return Record(asked.session.number, asked.number, asked.counts, turn.input, turn.output, due=asked.due)
