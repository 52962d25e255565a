"""A trace of one server as Chrome's and Perfetto's JSON: what the engine, the API process and each request did.

Like `engine.profile`, it puts itself between objects and their methods for as long as it runs, and costs nothing before
and after. A trace has ids, sizes and times, never text.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.api import schema
from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.engine.protocol import Span, Spans
from tailrace.terms import Event, EventKind, InvalidInput

if TYPE_CHECKING:
    from tailrace.api.service import Service

MOST_SECONDS = 60.0
MOST_STEPS = 10_000
MOST_EVENTS = 200_000
"""Of requests and of the API process; the engine bounds its own."""
GRACE = 2.0
"""Longest that the engine may take to send the rest."""
LOOK = 0.05
API, ENGINE, REQUESTS = 1, 2, 3
STEPS, LOOP, KERNELS = 1, 2, 3
PROCESSES = {API: "api process", ENGINE: "engine process", REQUESTS: "requests"}
ENGINE_TRACKS = {STEPS: "steps", LOOP: "loop", KERNELS: "kernels by kind (one thread; laid end to end in their step)"}
WAITS = {
    EventKind.SUBMITTED: "queue",
    EventKind.QUEUED: "queue",
    EventKind.LOOKING: "kv lookup",
    EventKind.LOOKED: "queue",
    EventKind.LOADING: "kv load",
    EventKind.PREEMPTED: "queue",
    EventKind.FINISHED: "stream",
    EventKind.FAILED: "stream",
}
"""What begins with an event, and lasts until the next."""
STEP_NAMES = {EventKind.CHUNK: "prefill", EventKind.TOKEN: "decode", EventKind.STALLED: "stall"}


def check(seconds: float | None, steps: int | None) -> None:
    """Raises InvalidInput where a profile cannot be that long."""
    if seconds is None and steps is None:
        raise InvalidInput("give seconds, steps or both", param="seconds")
    if seconds is not None and not (math.isfinite(seconds) and 0 < seconds <= MOST_SECONDS):
        raise InvalidInput(f"seconds must be above 0 and at most {MOST_SECONDS:g}, not {seconds}", param="seconds")
    if steps is not None and not 0 < steps <= MOST_STEPS:
        raise InvalidInput(f"steps must be 1 .. {MOST_STEPS}, not {steps}", param="steps")


async def record(service: Service, exchange: Exchange, seconds: float | None, steps: int) -> bytes:
    """The trace, once it is complete: after so many seconds or steps, whichever comes first, when the client leaves, or
    when the engine ends. Raises HttpError 409 while another one is recorded."""
    client = service.client
    if client.on_spans is not None:
        raise HttpError(409, "a profile is being made already; one at a time", code="busy")
    recorder = Recorder(service)
    client.on_spans = recorder.take
    recorder.begin()
    incarnation = client.incarnation

    def over() -> bool:
        return client.incarnation != incarnation or client.state != "ready" or exchange.lost

    try:
        client.profile(steps)
        await _until(recorder, seconds or MOST_SECONDS, over)
        client.end_profile()
        await _until(recorder, GRACE, lambda: client.state != "ready")
    finally:
        recorder.end()
        client.on_spans = None
        client.end_profile()
    return await asyncio.to_thread(recorder.trace)


async def _until(recorder: Recorder, seconds: float, over: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not (recorder.done.is_set() or over()) and (left := end - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(min(LOOK, left)):
                await recorder.done.wait()
        except TimeoutError:
            continue


class Recorder:
    """Collects what happens between `begin` and `end`."""

    def __init__(self, service: Service) -> None:
        self.done = asyncio.Event()  # the engine has sent all that it will
        self.cut = False
        self._service = service
        self._from = self._to = 0.0
        self._engine: list[Span] = []
        self._api: list[tuple[int, str, float, float]] = []  # thread, name, begin, end
        self._events: list[Event] = []
        self._received: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []
        self._open = False

    def begin(self) -> None:
        """Puts itself between."""
        service, book = self._service, self._service.book
        service.settle()
        self._open = True
        self._from = time.monotonic()
        add, opened = book.add, book.open

        def added(events: Sequence[Event]) -> None:
            self._note(events)
            add(events)

        def received(request: str, at: float, *, keep_times: bool = False) -> Any:
            self._received[request] = at
            return opened(request, at, keep_times=keep_times)

        self._replace(book, "add", added)
        self._replace(book, "open", received)
        self._time(schema, "decode", "parse")
        for method in ("encode", "encode_chat"):
            self._time(service.text, method, "tokenize")
        self._time(service.client, "_receive", "engine news")
        self._time(service.client, "submit", "submit")
        self._time(service, "settle", "account")
        self._time(Exchange, "write_now", "send")
        for method in ("answer", "write"):
            self._time_sending(method)

    def end(self) -> None:
        """Takes itself out."""
        if self._open:
            self._service.settle()
            self._open = False
            self._to = time.monotonic()
            for undo in reversed(self._undo):
                undo()

    def take(self, piece: Spans) -> None:
        """A piece of the engine's profile."""
        self._engine += piece.spans
        self.cut = self.cut or piece.cut
        if piece.done:
            self.done.set()

    # Between

    def _replace(self, owner: Any, name: str, value: object) -> None:
        own = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def _time(self, owner: Any, name: str, shown: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            begin = time.monotonic()
            try:
                return original(*args, **named)
            finally:
                self._add(shown, begin)

        self._replace(owner, name, timed)

    def _time_sending(self, name: str) -> None:
        """A coroutine that runs through at once unless the client's buffers are full: then it is left out, since others
        run meanwhile."""
        original = getattr(Exchange, name)

        async def timed(exchange: Exchange, *args: Any, **named: Any) -> Any:
            blocked = exchange.line.blocked_since
            begin = time.monotonic()
            result = await original(exchange, *args, **named)
            if not blocked:
                self._add("send", begin)
            return result

        self._replace(Exchange, name, timed)

    def _add(self, name: str, begin: float) -> None:
        if len(self._api) < MOST_EVENTS:
            self._api.append((threading.get_ident(), name, begin, time.monotonic()))
        else:
            self.cut = True

    def _note(self, events: Sequence[Event]) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events += events
        else:
            self.cut = True

    # The trace

    def trace(self) -> bytes:
        """The file. Times are microseconds since the beginning; on every track, what overlaps lies one in the other."""
        rows: list[dict[str, Any]] = [_meta("process_name", pid, 0, name) for pid, name in PROCESSES.items()]
        rows += [_meta("thread_name", ENGINE, tid, name) for tid, name in ENGINE_TRACKS.items()]
        spans = [*self._engine_rows(), *self._api_rows(rows), *self._request_rows(rows)]
        spans.sort(key=lambda row: (row["ts"], -row["dur"]))
        other = {"seconds": round(self._to - self._from, 6), "cut": self.cut, "steps": self._steps()}
        return msgspec.json.encode({"traceEvents": [*rows, *spans], "displayTimeUnit": "ms", "otherData": other})

    def _steps(self) -> int:
        return sum(span.track == "steps" for span in self._engine)

    def _row(self, pid: int, tid: int, name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
        start = round((max(begin, self._from) - self._from) * 1e6)
        stop = round((max(end, self._from) - self._from) * 1e6)
        row: dict[str, Any] = {
            "name": name,
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": start,
            "dur": max(0, stop - start),
        }
        row["cat"] = PROCESSES[pid]
        return row | {"args": args} if args else row

    def _engine_rows(self) -> list[dict[str, Any]]:
        rows, last = [], self._from
        for span in self._engine:
            if span.track != "steps":
                rows.append(self._row(ENGINE, LOOP, span.name, span.begin, span.end))
                continue
            begin = max(last, span.begin)
            last = span.end
            kernels = {name: value for name, value in span.facts.items() if name.startswith("kernel_")}
            facts = {name: value for name, value in span.facts.items() if name not in kernels}
            rows.append(self._row(ENGINE, STEPS, span.name, begin, span.end, **facts))
            scale = min(1.0, (span.end - begin) / (sum(kernels.values()) or 1.0))
            at = begin
            for name, took in sorted(kernels.items(), key=lambda item: -item[1]):
                shown = name.removeprefix("kernel_")
                rows.append(self._row(ENGINE, KERNELS, shown, at, at + took * scale, measured_us=round(took * 1e6, 3)))
                at += took * scale
        return rows

    def _api_rows(self, names: list[dict[str, Any]]) -> list[dict[str, Any]]:
        threads: dict[int, int] = {threading.main_thread().ident or 0: 1}
        rows = []
        for thread, name, begin, end in self._api:
            tid = threads.setdefault(thread, len(threads) + 1)
            rows.append(self._row(API, tid, name, begin, end))
        names += [
            _meta("thread_name", API, tid, "loop" if tid == 1 else f"worker {tid - 1}") for tid in threads.values()
        ]
        return rows

    def _request_rows(self, names: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_request: dict[str, list[Event]] = {}
        for event in self._events:
            if event.at >= self._from:
                by_request.setdefault(event.request, []).append(event)
        rows = []
        for tid, (request, events) in enumerate(by_request.items(), 1):
            names.append(_meta("thread_name", REQUESTS, tid, request))
            rows += self._of_request(tid, request, events)
        return rows

    def _of_request(self, tid: int, request: str, events: Sequence[Event]) -> list[dict[str, Any]]:
        first = self._received.get(request, self._from)
        last = max(events[-1].at, first)
        rows = [self._row(REQUESTS, tid, "request", first, last, request=request)]
        at, state = max(first, self._from), "prepare" if request in self._received else ""
        for event in events:
            name = STEP_NAMES.get(event.kind)
            begin = max(at, event.begin) if name else event.at
            if begin > at and state:
                rows.append(self._row(REQUESTS, tid, state, at, begin))
            if name:
                facts = {"tokens": event.computed} if event.computed else {"cause": event.cause}
                rows.append(self._row(REQUESTS, tid, name, begin, max(begin, event.at), **facts))
            state = WAITS.get(event.kind, "")
            at = max(at, event.at)
        return rows


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
