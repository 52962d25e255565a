"""What experiments stand on: servers, how quick they are, and what is known of the model from the inside."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from tailrace.ledger import price
from tailrace.measure import load, metrics, probe
from tailrace.measure.counting import Plan
from tailrace.measure.http import Pool
from tailrace.measure.lab.inside import Inside
from tailrace.measure.load import Run
from tailrace.measure.record import Outcome, Record
from tailrace.measure.target import Api, Target
from tailrace.terms import TailraceError
from tailrace.workload.arrivals import Closed
from tailrace.workload.session import Piece, Session, Turn

NO_DRAFTS = ("--draft-tokens", "0")
"""One token a step: what is measured is the model, not how well its text can be guessed."""
PACE_INPUT, PACE_OUTPUT = 256, 16
"""Tokens of the request by which a server's pace is known."""
DEFAULT_CONTEXT = 2048
"""Tokens that a server of unknown context is taken to have."""


class Host(Protocol):
    """A running server."""

    @property
    def url(self) -> str:
        """Its address."""

    def rss(self) -> int | None:
        """Bytes of memory that it holds; None where that is not known."""


class Pace(msgspec.Struct, frozen=True):
    """How quick a server is with one request alone, in tokens a second: a first guess, by which runs are sized."""

    prefill: float
    decode: float

    def seconds(self, tokens_in: float, tokens_out: float) -> float:
        """How long such a request takes."""
        return tokens_in / self.prefill + tokens_out / self.decode


@dataclass(frozen=True)
class Served:
    """A server that was prepared. `host` is None where it is somebody else's. `context`: tokens of a request, prompt
    and answer. `notes`: what a reader of its numbers should know. `salt`: as of the stand."""

    pool: Pool
    target: Target
    pace: Pace
    context: int
    host: Host | None
    notes: tuple[str, ...] = ()
    salt: str = ""

    @property
    def ours(self) -> bool:
        """Whether it was started here."""
        return self.host is not None

    def rss(self) -> int | None:
        """Bytes of memory that it holds."""
        return self.host.rss() if self.host is not None else None


Start = Callable[[Sequence[str]], AbstractContextManager[Host]]


@dataclass(frozen=True)
class Stand:
    """What an experiment gets. Without `start` there is only the server at `url`. `budget`: about how many seconds it
    may measure. `say` gets a few words as it goes on. `salt` makes prompts like none that a server has seen before."""

    model: str
    budget: float
    start: Start | None = None
    url: str | None = None
    key: str | None = None
    inside: Inside | None = None
    prices: dict[str, price.Api] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None
    salt: str = field(default_factory=lambda: str(time.time_ns()))

    @asynccontextmanager
    async def server(self, *options: str, api: Api = "chat") -> AsyncIterator[Served]:
        """A server for the time of a block: one of our own with these options, or the one at `url`, which has those
        that it has. It has answered a few requests by then, so that it is warm. Raises TailraceError."""
        if self.start is None:
            assert self.url is not None
            async with _prepared(
                Pool(self.url, key=self.key, headers=TIMELINE), None, self.model, api, self.salt
            ) as made:
                yield made
            return
        self.say("starting a server")
        with self.start((*NO_DRAFTS, *options)) as host:
            async with _prepared(Pool(host.url, headers=TIMELINE), host, None, api, self.salt) as made:
                yield made

    def rounds(self, *, least: int = 3, most: int = 20, share: float = 1.0) -> Iterator[int]:
        """0, 1, 2 ...: rounds of which another one begins as long as one more fits that share of the budget; at least
        `least`, at most `most`."""
        begin = time.perf_counter()
        for number in range(most):
            spent = time.perf_counter() - begin
            if number >= least and spent * (number + 1) / number > self.budget * share:
                return
            yield number


TIMELINE = {"x-tailrace-timeline": "1"}


@asynccontextmanager
async def _prepared(pool: Pool, host: Host | None, model: str | None, api: Api, salt: str) -> AsyncIterator[Served]:
    try:
        served = await probe.models(pool)
        name = model if model in served else next(iter(served))
        target, notes = await _target(pool, name, api)
        if model is not None and name != model:
            notes = [*notes, f"It has no model called {model}: {name} was measured."]
        made = Served(pool, target, Pace(1.0, 1.0), served[name] or DEFAULT_CONTEXT, host, tuple(notes), salt)
        yield replace(made, pace=await _pace(made))
    finally:
        pool.close()


async def _target(pool: Pool, model: str, api: Api) -> tuple[Target, list[str]]:
    """How it is asked: as a chat, unless that is not wanted or the model has none."""
    extra = {"temperature": 0}
    try:
        return await probe.prepare(pool, model=model, api=api, form="text", extra=extra, exact=True)
    except TailraceError:
        if api == "completions":
            raise
        with contextlib.suppress(TailraceError):
            target, notes = await probe.prepare(
                pool, model=model, api="completions", form="text", extra=extra, exact=True
            )
            return target, [*notes, "It takes no chats: prompts are plain text (/v1/completions)."]
        raise


async def _pace(served: Served) -> Pace:
    """From the second of two requests: the first finds caches cold."""
    length = min(PACE_INPUT, served.context // 4)
    sessions = [alone(place, f"pace/{id(served)}", length, PACE_OUTPUT) for place in range(2)]
    run = await drive(served, sessions, concurrency=1)
    record = done(run)[-1]
    first, token = metrics.ttft(record), metrics.tpot(record)
    tokens = record.input_tokens or record.wanted_input
    if not first:
        raise TailraceError(f"{served.pool.url} answers without a time: nothing can be measured")
    return Pace(tokens / first, 1 / token if token else tokens / first)


def alone(number: int, source: str, tokens_in: int, tokens_out: int) -> Session:
    """A session of one request whose prompt is like no other's, from its first token on."""
    return Session(number, (Turn((Piece(f"{source}/{number}", tokens_in),), tokens_out),))


async def drive(served: Served, sessions: Sequence[Session], *, concurrency: int, warmup: int = 0) -> Run:
    """Sends all sessions, so many at a time; the first `warmup` are not measured. Raises TailraceError where one fails:
    what was measured then would not be what was asked."""
    plan = Plan(Closed(concurrency), sessions=len(sessions) - warmup, warmup=warmup, sustain=False)
    run = await load.run(served.pool, served.target, (_salted(one, served.salt) for one in sessions), plan)
    failed = next((one for one in run.records if one.outcome not in (Outcome.OK, Outcome.STOPPED)), None)
    if failed is not None:
        raise TailraceError(f"a request to {served.pool.url} failed ({failed.outcome}): {failed.error}")
    if run.interrupted:
        raise asyncio.CancelledError
    if any(not record.chunks for record in run.measured):
        raise TailraceError(f"{served.pool.url} gave an answer without any text: there is nothing to time")
    return run


def _salted(session: Session, salt: str) -> Session:
    """The same session in other words: what shared something still does."""
    turns = (
        replace(turn, pieces=tuple(replace(piece, source=f"{salt}/{piece.source}") for piece in turn.pieces))
        for turn in session.turns
    )
    return replace(session, turns=tuple(turns))


def done(run: Run) -> list[Record]:
    """The measured records, in the order in which their sessions began."""
    return sorted(run.measured, key=lambda record: (record.session, record.turn))


def by(records: Sequence[Record], key: Callable[[Record], Any]) -> Iterator[tuple[Any, list[Record]]]:
    """Records by what they have in common, in the order in which that first comes."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return iter(groups.items())


def defined(values: Iterator[float | None]) -> list[float]:
    """Those that there are, and are more than nothing: tokens that came in one piece have no time between them."""
    return [value for value in values if value]
