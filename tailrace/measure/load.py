"""The load generator: sessions of a workload against one server, in an open or a closed loop.

An open loop sends each session when it is due, whatever the server does, and waiting counts from then. A closed one
keeps a number of them going. Warm-up comes first and is not measured. The load goes on as it was until the last
measured request has ended, so that none of them is measured on a server that empties; what runs then is hung up on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import chain

import msgspec

from tailrace.measure.counting import Counting, Plan
from tailrace.measure.exchange import Exchange
from tailrace.measure.http import Pool
from tailrace.measure.record import Outcome, Record
from tailrace.measure.target import Target
from tailrace.measure.watch import Client, Watch
from tailrace.workload import arrivals as arriving
from tailrace.workload.arrivals import Closed, Recorded
from tailrace.workload.session import Session, Turn


class Run(msgspec.Struct):
    """What came of it. `window`: the seconds, from the run's beginning, over which rates are taken: the load was then
    as it was meant to be. `began`: seconds since the epoch."""

    began: float
    window: tuple[float, float]
    records: list[Record]
    client: Client
    interrupted: bool = False
    open_loop: bool = False

    @property
    def measured(self) -> list[Record]:
        """The records that were measured."""
        return [record for record in self.records if record.measured]


Observe = Callable[[Record], object]


async def run(
    pool: Pool, target: Target, sessions: Iterator[Session], plan: Plan, observe: Observe = lambda _: None
) -> Run:
    """Runs the load; `observe` gets each record as it is closed. Cancelling ends it early, with what there is."""
    return await _Load(pool, target, sessions, plan, observe).run()


class _Load:
    def __init__(self, pool: Pool, target: Target, sessions: Iterator[Session], plan: Plan, observe: Observe) -> None:
        self._pool, self._target, self._plan, self._observe = pool, target, plan, observe
        self._sessions = sessions
        self._watch = Watch()
        self._start = time.perf_counter()
        self._over = asyncio.Event()
        self._counting = Counting(plan, self._over.set)
        self._records: list[Record] = []

    async def run(self) -> Run:
        plan, began, interrupted = self._plan, time.time(), False
        if isinstance(plan.arrivals, Recorded | Closed):
            first = next(self._sessions, None)  # a trace is opened, or found wanting, before the clock runs
            self._sessions = chain(() if first is None else (first,), self._sessions)
        self._start = time.perf_counter()
        self._watch.start()
        source = asyncio.create_task(
            self._closed(plan.arrivals.concurrency) if isinstance(plan.arrivals, Closed) else self._open()
        )
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((source, over), return_when=asyncio.FIRST_COMPLETED)
            if source.done():
                source.result()
        except asyncio.CancelledError:
            interrupted = True
        now = self._now()
        client = self._watch.stop([record for record in self._records if record.measured])
        for task in (source, over):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if interrupted:
            for record in self._records:
                record.measured &= record.outcome is not Outcome.STOPPED
        return Run(
            began, self._counting.window(now), self._records, client, interrupted, not isinstance(plan.arrivals, Closed)
        )

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _until(self, at: float) -> None:
        """Not a moment before, where the event loop's timers are of whole milliseconds."""
        while (wait := at - self._now()) > 0:
            await asyncio.sleep(wait)

    # --- which sessions ---------------------------------------------------------------------------------------------

    def _take(self) -> Session | None:
        """The next session; None where there is none or no more is needed."""
        return next(self._sessions, None) if self._counting.more() else None

    # --- when they begin --------------------------------------------------------------------------------------------

    async def _closed(self, concurrency: int) -> None:
        async def user() -> None:
            while (session := self._take()) is not None:
                await self._session(session, None, self._counting.begins(self._now()))
            self._counting.falls(self._now())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
            if self._plan.seconds is not None:
                group.create_task(self._stop_after(self._plan.seconds))

    async def _stop_after(self, seconds: float) -> None:
        """A closed loop over a time whose sessions are longer than it is still ends."""
        while self._counting.begun is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(max(0.0, self._counting.begun + seconds - self._now()))
        self._counting.enough()

    async def _open(self) -> None:
        plan = self._plan
        assert not isinstance(plan.arrivals, Closed)
        times = None if isinstance(plan.arrivals, Recorded) else arriving.times(plan.arrivals, plan.seed)
        async with asyncio.TaskGroup() as group:
            while (session := self._take()) is not None:
                if times is not None:
                    due = next(times)
                else:
                    assert isinstance(plan.arrivals, Recorded)
                    due = (session.at or 0.0) / plan.arrivals.speed
                measured = self._counting.begins(due)
                body = self._request(session.turns[0], {})  # made before it is due
                await self._until(due)
                group.create_task(self._session(session, due, measured, body))
            self._counting.falls(self._now())

    # --- one session ------------------------------------------------------------------------------------------------

    async def _session(self, session: Session, due: float | None, measured: bool, body: bytes | None = None) -> None:
        try:
            if len(session.turns) == 1:
                await self._turn(session, 0, due, measured, {}, body)
            else:
                await self._turns(session, due, measured, body)
        finally:
            if measured:
                self._counting.ended()

    async def _turns(self, session: Session, due: float | None, measured: bool, body: bytes | None) -> None:
        answers: dict[int, str] = {}
        tasks: list[asyncio.Task[float | None]] = []

        async def after(number: int, turn: Turn) -> float | None:
            if not turn.after:
                return await self._turn(session, number, due, measured, answers, body if not number else None)
            ends = [await asyncio.shield(tasks[before]) for before in turn.after]
            ended = [end for end in ends if end is not None]
            if len(ended) < len(ends):
                self._close(self._record(session, number, None, measured), Outcome.ABANDONED)
                return None
            then = max(ended) + turn.pause
            request = self._request(turn, answers)
            await self._until(then)
            return await self._turn(session, number, None if due is None else then, measured, answers, request)

        async with asyncio.TaskGroup() as group:
            for number, turn in enumerate(session.turns):
                tasks.append(group.create_task(after(number, turn)))

    def _record(self, session: Session, number: int, due: float | None, measured: bool) -> Record:
        turn = session.turns[number]
        record = Record(session.number, number, measured, turn.input, turn.output, due=due)
        self._records.append(record)
        return record

    def _request(self, turn: Turn, answers: dict[int, str]) -> bytes:
        return self._pool.request("POST", self._target.path, self._target.body(turn, answers))

    async def _turn(
        self, session: Session, number: int, due: float | None, measured: bool, answers: dict[int, str],
        request: bytes | None,
    ) -> float | None:  # fmt: skip
        """One request; when it ended, None where it failed."""
        record = self._record(session, number, due, measured)
        kept = len(session.turns) > 1 and self._target.form == "text"
        exchange = Exchange(record, self._start, keep_text=kept, marked=self._target.marked)
        if request is None:
            request = self._request(session.turns[number], answers)
        self._watch.one_more()
        try:
            await exchange.run(self._pool, request, self._plan.timeout)
        finally:
            self._watch.in_flight -= 1
        if kept:
            answers[number] = exchange.text
        self._observe(record)
        return record.ended if record.outcome is Outcome.OK else None

    def _close(self, record: Record, outcome: Outcome) -> None:
        record.outcome, record.error = outcome, "a turn before it failed"
        self._observe(record)
