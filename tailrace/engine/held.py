"""The requests that an engine client holds: where each stands, who hears of it, and what becomes of it when an engine
dies. A request ends exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.engine.protocol import Encode, Output, Submit
from tailrace.terms import EngineDied, Event, EventKind, TailraceError

RESUBMITS = 1
"""How often a queued request is handed to another engine. An engine that dies in the step that admits a request takes
the news of that with it, so the request that killed it may look like one that was queued: it gets no third engine."""


class Sink(Protocol):
    """Where one request's news goes. Called on the loop; must not block and must not raise."""

    def queued(self) -> None:
        """The engine has taken it in."""

    def output(self, output: Output) -> None:
        """What one step gave it."""

    def failed(self, error: TailraceError) -> None:
        """It ended without a finish reason; nothing follows."""


@dataclass
class Held:
    """A request that has not ended."""

    submit: Submit | Encode
    sink: Sink | None  # None once its client has left
    sent: bool = False
    admitted: bool = False
    produced: bool = False
    attempts: int = 0

    @property
    def survives(self) -> bool:
        """Whether another engine may take it over without anybody noticing."""
        return not self.admitted and not self.produced and self.attempts < RESUBMITS


class HeldRequests:
    """On the client's loop. `tell` is called with events that no engine will send."""

    def __init__(self, tell: Callable[[Sequence[Event]], None]) -> None:
        self.not_admitted = 0
        self.idle = asyncio.Event()  # set while nothing is held
        self.idle.set()
        self._tell = tell
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, submit: Submit | Encode, sink: Sink) -> Held:
        """One more, that was not sent yet."""
        held = self._held[submit.request] = Held(submit, sink)
        self.not_admitted += 1
        self.idle.clear()
        return held

    def unsent(self) -> Iterator[Held]:
        """Those that no engine has."""
        return (held for held in list(self._held.values()) if not held.sent)

    def leave(self, requests: Iterable[str]) -> list[str]:
        """Their clients have left: the sinks hear nothing more. Returns those that the engine is to be told of."""
        sent = []
        for request in requests:
            held = self._held.get(request)
            if held is None or held.sink is None:
                continue
            held.sink = None
            if held.sent:
                sent.append(request)
            else:
                self._forget(request)
                self._tell([Event(request, EventKind.FINISHED, time.monotonic(), cause="abort")])
        return sent

    def note(self, events: Sequence[Event]) -> None:
        """Who is in the queue now, and who runs."""
        for event in events:
            kind = event.kind
            if kind is EventKind.QUEUED or kind is EventKind.ADMITTED:
                held = self._held.get(event.request)
                if held is None:
                    continue
                if kind is EventKind.ADMITTED and not held.admitted:
                    held.admitted = True
                    self.not_admitted -= 1
                elif kind is EventKind.QUEUED and held.sink is not None:
                    held.sink.queued()

    def spread(self, output: Output) -> None:
        """Hands on what a step gave a request."""
        held = self._held.get(output.request)
        if held is None:
            return
        held.produced = True
        sink = held.sink
        if output.finish is not None:
            self._forget(output.request)
        if sink is not None:
            sink.output(output)

    def ended(self, events: Sequence[Event]) -> None:
        """An engine that closes a request by its event alone (an abort) is done with it too."""
        for event in events:
            if event.kind is EventKind.FINISHED or event.kind is EventKind.FAILED:
                held = self._held.get(event.request)
                if held is not None and held.sink is None:
                    self._forget(event.request)

    def fail(self, why: str, *, queue_survives: bool) -> int:
        """Fails what cannot be handed on; returns how many that were."""
        now = time.monotonic()
        lost: list[Held] = []
        for request, held in list(self._held.items()):
            if queue_survives and held.survives and held.sink is not None:
                held.sent = False
                held.attempts += 1
                continue
            self._forget(request)
            lost.append(held)
        self._tell([Event(held.submit.request, EventKind.FAILED, now, cause="engine died") for held in lost])
        for held in lost:
            if held.sink is not None:
                held.sink.failed(EngineDied(f"{why}; the request was lost, try again"))
        return sum(held.sink is not None for held in lost)

    def _forget(self, request: str) -> Held | None:
        held = self._held.pop(request, None)
        if held is not None:
            if not held.admitted:
                self.not_admitted -= 1
            if not self._held:
                self.idle.set()
        return held
