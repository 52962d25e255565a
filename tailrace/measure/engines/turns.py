"""Turns: A B C, then in another order, each with the same requests. One engine runs at a time; the others are
suspended, or stopped where that is wanted or memory is short.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from tailrace.deploy import machine
from tailrace.deploy.engines.driver import Driver, Found, Options
from tailrace.deploy.local import START_LIMIT, Replica
from tailrace.measure import bench, gauges, probe
from tailrace.measure.bench import Bed, Observe
from tailrace.measure.counting import Plan
from tailrace.measure.exchange import Exchange
from tailrace.measure.http import Pool
from tailrace.measure.record import Outcome, Record
from tailrace.measure.result import Measured, Side, Turn
from tailrace.measure.slo import Slo
from tailrace.measure.summary import tokens_per_chunk
from tailrace.measure.target import Api, Form, Target
from tailrace.terms import TailraceError
from tailrace.workload.session import Piece
from tailrace.workload.session import Turn as Prompt
from tailrace.workload.spec import Workload

Between = Literal["auto", "suspend", "restart"]
SPARE = 2**30
"""Bytes of memory that have to be left for another engine to be started beside those that are suspended."""


@dataclass(frozen=True)
class Entrant:
    """An engine that takes part. `label` tells it from another configuration of the same engine."""

    label: str
    driver: Driver
    found: Found
    options: Options
    weights: str = ""
    price: float | None = None


@dataclass(frozen=True)
class Setup:
    """What each is asked, how often, and what happens to it between its turns. `body`: parameters of every request."""

    workload: Workload
    plan: Plan
    slo: Slo | None = None
    api: Api = "chat"
    form: Form = "text"
    body: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    exact: bool = True
    turns: int = 6
    between: Between = "auto"
    limit: float = START_LIMIT
    logs: Path | None = None
    begin: Callable[[str, Plan], Observe] = lambda _label, _plan: lambda _record: None
    say: Callable[[str], object] = lambda _text: None


@dataclass
class _Seat:
    """An entrant, and what runs of it."""

    entrant: Entrant
    turns: list[Turn]
    replica: Replica | None = None
    target: Target | None = None
    notes: tuple[str, ...] = ()
    starts: int = 0
    out: str = ""


class Contest:
    """Runs the turns; `runs` and `sides` are what there is of them, at any time."""

    def __init__(self, entrants: Sequence[Entrant], setup: Setup) -> None:
        self._seats = [_Seat(entrant, []) for entrant in entrants]
        self._setup = setup
        self._suspends = setup.between == "suspend" or (setup.between == "auto" and not machine.has_gpu())
        self.runs: list[Measured] = []
        self.interrupted = False

    @property
    def suspends(self) -> bool:
        """Whether engines were suspended between their turns, and not stopped."""
        return self._suspends

    @property
    def sides(self) -> list[Side]:
        """The engines with what was seen of them."""
        return [_side(seat) for seat in self._seats]

    def run(self) -> None:
        """All turns. Whatever ends it, no server is left. Ctrl-C ends it with what there is by then."""
        try:
            with ExitStack() as stack:
                for seat in self._seats:
                    stack.callback(_stop, seat)
                self._take_turns()
        except KeyboardInterrupt:  # also one that comes while servers are stopped, which all are in the end
            self.interrupted = True

    def _take_turns(self) -> None:
        for number in range(self._setup.turns):
            for seat in order(self._seats, number):
                if not seat.out:
                    seat.turns.append(self._turn(seat, number))
                if self.interrupted:
                    return

    def _turn(self, seat: _Seat, number: int) -> Turn:
        label = seat.entrant.label
        try:
            started = self._wake(seat)
        except TailraceError as error:
            _stop(seat)
            if not any(turn.run is not None for turn in seat.turns):
                seat.out = str(error)  # it never ran: another attempt would be the same
            self._setup.say(f"{label}: {error}")
            return Turn(failed=str(error))
        try:
            return self._measured(seat, number, started)
        except TailraceError as error:
            self._setup.say(f"{label}: {error}")
            return Turn(failed=str(error), died=not _alive(seat))
        finally:
            self._rest(seat)

    def _wake(self, seat: _Seat) -> tuple[float | None, float | None]:
        """Sees to it that it runs; seconds to ready and to the first token, where it was started for that."""
        if seat.replica is not None and _alive(seat):
            seat.replica.resume()
            return None, None
        _stop(seat)
        entrant, setup = seat.entrant, self._setup
        setup.say(f"starting {entrant.label}")
        seat.starts += 1
        log = None if setup.logs is None else setup.logs / f"{entrant.label.replace(':', '-')}-{seat.starts}.log"
        command = partial(entrant.driver.command, entrant.found, entrant.options)
        seat.replica = Replica.start(command, log=log, limit=setup.limit)
        first = bench.drive(self._first(seat.replica))
        if seat.target is None:
            seat.target, seat.notes = bench.drive(self._prepare(seat.replica))
        return seat.replica.ready_after, first

    def _extra(self, replica: Replica) -> dict[str, Any]:
        return {**replica.command.body, **self._setup.body}

    async def _first(self, replica: Replica) -> float | None:
        """Seconds from its start until it has given a token; None where it would not."""
        pool = Pool(replica.url)
        begun = time.perf_counter() - (time.monotonic() - replica.started_at)
        record = Record(0, 0, False, 8, 1)
        target = Target(replica.model, self._setup.api, self._setup.form, self._extra(replica))
        body = target.body(Prompt((Piece(f"first/{time.time_ns()}", 8),), 1), {})
        await Exchange(record, begun).run(pool, pool.request("POST", target.path, body), probe.PATIENCE)
        pool.close()
        return record.chunks[0] if record.chunks else None

    async def _prepare(self, replica: Replica) -> tuple[Target, tuple[str, ...]]:
        setup, pool = self._setup, Pool(replica.url)
        try:
            target, notes = await probe.prepare(
                pool, model=replica.model, api=setup.api, form=setup.form, extra=self._extra(replica),
                exact=setup.exact and replica.command.ignore_eos,
            )  # fmt: skip
        finally:
            pool.close()
        return target, tuple(notes)

    def _measured(self, seat: _Seat, number: int, started: tuple[float | None, float | None]) -> Turn:
        replica, setup = seat.replica, self._setup
        assert replica is not None
        before = replica.cpu_seconds()
        measured, seen = bench.drive(self._run(seat, replica, number))
        after, alive = replica.cpu_seconds(), _alive(seat)
        self.runs.append(measured)
        self.interrupted |= measured.summary.interrupted
        if not alive:
            setup.say(f"{seat.entrant.label} ended in the middle of turn {number + 1}: {replica.last_lines()}")
        return Turn(
            run=len(self.runs) - 1, died=not alive, failed="" if alive else replica.last_lines(), ready=started[0],
            first_token=started[1], cpu=after - before if alive and before is not None and after is not None else None,
            tokens=given(measured.records), rss=replica.rss() if alive else None, running=seen.running,
            waiting=seen.waiting, kv_use=seen.kv_use, cached=seen.cached,
        )  # fmt: skip

    async def _run(self, seat: _Seat, replica: Replica, number: int) -> tuple[Measured, gauges.Seen]:
        setup, pool = self._setup, Pool(replica.url, headers={"x-tailrace-timeline": "1"})
        assert seat.target is not None
        label = f"{seat.entrant.label} {number + 1}"
        bed = Bed(pool, seat.target, setup.workload, setup.plan, setup.slo, label, seat.notes, setup.begin)
        look = gauges.Look(pool, seat.entrant.driver.gauges)
        try:
            await look.begin()
            measured = await bench.once(bed, setup.plan.seed + number)
            name = Path(seat.entrant.options.model).name  # not what it is served as
            measured = msgspec.structs.replace(measured, model=name)
            try:
                return measured, await look.end()
            except asyncio.CancelledError:  # Ctrl-C: the run is there all the same
                self.interrupted = True
                return measured, gauges.Seen()
        finally:
            pool.close()

    def _rest(self, seat: _Seat) -> None:
        """After its turn: suspended, or stopped."""
        if seat.replica is None:
            return
        if self._suspends and _alive(seat) and self._room(seat.replica):
            seat.replica.suspend()
        else:
            _stop(seat)

    def _room(self, replica: Replica) -> bool:
        """Whether another may be started beside it; if not, all are stopped between turns from now on."""
        if self._setup.between == "suspend" or all(seat.starts for seat in self._seats):
            return True
        free, held = machine.available_memory(), replica.rss()
        if free is not None and held is not None and free < SPARE + held:
            self._suspends = False
            self._setup.say("memory is short: engines are stopped between their turns")
            for seat in self._seats:
                _stop(seat)
            return False
        return True


def order(seats: Sequence[Any], number: int) -> list[Any]:
    """Who goes when in a turn: every second turn backwards, and another begins every two turns, so that each is as
    often early as late."""
    first = (number // 2) % max(1, len(seats))
    turned = [*seats[first:], *seats[:first]]
    return turned[::-1] if number % 2 else turned


def given(records: Sequence[Record]) -> float | None:
    """Output tokens of a run, those of its warm-up and of what was hung up on at its end included."""
    per_chunk = tokens_per_chunk([one for one in records if one.outcome in (Outcome.OK, Outcome.STOPPED)])
    if per_chunk is None:
        return None
    return float(sum(one.output_tokens or per_chunk * len(one.chunks) for one in records))


def _alive(seat: _Seat) -> bool:
    return seat.replica is not None and seat.replica.alive


def _stop(seat: _Seat) -> None:
    if seat.replica is not None:
        seat.replica.stop()
        seat.replica = None


def _side(seat: _Seat) -> Side:
    entrant = seat.entrant
    try:
        command = entrant.driver.command(entrant.found, entrant.options, 0)
    except TailraceError as error:
        return Side(label=entrant.label, engine=entrant.driver.name, absent=str(error))
    return Side(
        label=entrant.label, engine=entrant.driver.name, version=entrant.found.version, model=entrant.options.model,
        weights=entrant.weights, command=list(command.argv), environment=dict(command.env), price=entrant.price,
        absent=seat.out, turns=seat.turns,
    )  # fmt: skip
