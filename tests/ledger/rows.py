"""Timelines and records for tests of the ledger."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tailrace.ledger.book import Book
from tailrace.ledger.record import Note, Record, record_of
from tailrace.ledger.run import Run
from tailrace.ledger.slo import parse
from tailrace.ledger.timeline import Timeline
from tailrace.terms import Event, EventKind

E = EventKind
DAY = 86_400
NOW = 1_780_000_000
"""A moment, in seconds since 1970: within an hour and a day, not where one begins."""
RUN = Run("run-1", NOW * 1_000_000, "host", "m", "avx2, 2 threads")


def timeline(
    name: str = "r1", *, at: float = 100.0, prompt: int = 20, output: int = 4, finish: str = "stop"
) -> Timeline:
    """A request that was received at `at`: a second in the queue, one for its prompt, a tenth a token."""
    closed: list[Timeline] = []
    book = Book(closed.append)
    book.open(name, at)
    book.add([Event(name, E.SUBMITTED, at), Event(name, E.QUEUED, at)])
    book.add([Event(name, E.ADMITTED, at + 1, cached=0, cause="slots")])
    now = at + 2
    book.add([Event(name, E.CHUNK, now, at + 1, prompt), Event(name, E.TOKEN, now, at + 1, 1)])
    for _ in range(output - 1):
        book.add([Event(name, E.TOKEN, now + 0.1, now, 1)])
        now += 0.1
    book.add([Event(name, E.FINISHED, now, cause=finish), Event(name, E.DELIVERED, now)])
    return closed[0]


def note(**values: Any) -> Note:
    usual = {"key": "ada", "tenant": "t", "model": "m", "endpoint": "chat", "workload": "w", "slo": parse("ttft=3")}
    return Note(**{**usual, **values})


def record(name: str = "r1", *, ended: float = NOW, usd: float | None = 3.6, **values: Any) -> Record:
    """A record of `timeline` that ended then; `values` are changed."""
    made = record_of(timeline(name), note(), clock=0.0, usd_per_hour=usd)
    end = round(ended * 1_000_000)
    return msgspec.structs.replace(made, **{"received": end - made.e2e_us, "ended": end, **values})


def until(holds: Any, what: str, seconds: float = 20.0) -> Any:
    """Waits until it holds."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(0.01)
    return value
