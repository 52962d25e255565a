"""Runs and records for tests: load against a mock server, and records with times that a test chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import uvloop

from tailrace.measure import load
from tailrace.measure.counting import Plan
from tailrace.measure.http import Pool
from tailrace.measure.load import Run
from tailrace.measure.record import Outcome, Record
from tailrace.measure.target import Target
from tailrace.measure.watch import Client
from tailrace.workload import make, spec
from tailrace.workload.arrivals import Closed
from tests.measure.mock import Mock

IDLE = Client(cpu=0.1, lag_p99=0.001, lag_max=0.002, dispatch_p99=0.001, dispatch_max=0.002, most_in_flight=1)


def loaded(
    mock: Mock | str, plan: Plan | None = None, workload: str = "input = 10\noutput = 4", target: Target | None = None,
    observe: Callable[[Record], object] = lambda _: None,
) -> Run:  # fmt: skip
    """A run against a mock server."""
    url = mock if isinstance(mock, str) else mock.url

    async def run() -> Run:
        pool = Pool(url)
        try:
            sessions = make.sessions(spec.parse(workload, "test"))
            return await load.run(
                pool, target or Target("mock"), sessions, plan or Plan(Closed(1), sessions=3, sustain=False), observe
            )
        finally:
            pool.close()

    return uvloop.run(run())


def record(
    chunks: Sequence[float], *, sent: float = 0.0, due: float | None = None, tokens: int | None = -1,
    outcome: Outcome = Outcome.OK, measured: bool = True, **more: Any,
) -> Record:  # fmt: skip
    """A record whose pieces came at these times; as many tokens as pieces unless said otherwise."""
    count = len(chunks) if tokens == -1 else tokens
    return Record(
        0, 0, measured, 10, 4, due=due, began=sent, sent=sent, chunks=list(chunks),
        ended=chunks[-1] if chunks else sent, outcome=outcome, input_tokens=more.pop("input", 10), output_tokens=count,
        **more,
    )  # fmt: skip


def ran(records: Sequence[Record], window: tuple[float, float] = (0.0, 10.0)) -> Run:
    return Run(0.0, window, list(records), IDLE)
