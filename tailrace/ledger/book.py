"""Every live request's fold. One stream of events in; closed timelines out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tailrace.ledger.steps import Step
from tailrace.ledger.timeline import Fold, Timeline
from tailrace.terms import Event, EventKind

Closed = Callable[[Timeline], None]
Observer = Callable[[Fold, Event, float], None]
"""Called with the fold, the CHUNK or TOKEN event it has just taken in, and the time of the token before (0: none)."""
ENGINE_DONE = (EventKind.FINISHED, EventKind.FAILED)


class Book:
    """Opened by RECEIVED; closed once the engine (or whoever survived it) has ended the request *and* its last byte was
    handed over, so that neither side's time is missing. A request that is never submitted closes with DELIVERED.

    `parity`: see `ledger.steps`; 0 counts tokens alone."""

    def __init__(self, on_closed: Closed, observer: Observer | None = None) -> None:
        self.parity = 0.0
        self._folds: dict[str, Fold] = {}
        self._on_closed = on_closed
        self._observer = observer
        self._waiting: set[str] = set()  # in the engine's queue
        self._running: set[str] = set()

    def __len__(self) -> int:
        return len(self._folds)

    def open(self, request: str, at: float, *, keep_times: bool = False) -> Fold:
        """Begins a request that was received at `at`."""
        fold = self._folds[request] = Fold(request, keep_times=keep_times)
        fold.add(Event(request, EventKind.RECEIVED, at))
        return fold

    def fold(self, request: str) -> Fold | None:
        """The fold of a request that is still open."""
        return self._folds.get(request)

    def add(self, events: Sequence[Event]) -> None:
        """Takes events in, in order; those of unknown requests (a warm-up) are passed over. The events of one step come
        in one call."""
        folds = self._folds
        step: Step | None = None
        closing: list[Fold] = []
        for event in events:
            fold = folds.get(event.request)
            if fold is None:
                continue
            kind = event.kind
            before = fold.last_token
            fold.add(event)
            if kind is EventKind.TOKEN or kind is EventKind.CHUNK or kind is EventKind.STALLED:
                if step is None or event.at != step.at or event.begin != step.begin:
                    if step is not None:
                        step.divide()
                    step = Step(event.begin, event.at, self.parity)
                step.take(fold, event)
                if self._observer is not None and kind is not EventKind.STALLED:
                    self._observer(fold, event, before)
            else:
                self._move(fold, kind)
                if (kind is EventKind.DELIVERED and fold.finish) or (kind in ENGINE_DONE and fold.closed):
                    closing.append(fold)
        if step is not None:
            step.divide()
        for fold in closing:
            self._close(fold)

    def _move(self, fold: Fold, kind: EventKind) -> None:
        """Who waits and who runs."""
        name = fold.request
        if kind is EventKind.QUEUED:
            fold.waiting_before, fold.running_before = len(self._waiting), len(self._running)
            self._waiting.add(name)
        elif kind is EventKind.ADMITTED:
            self._waiting.discard(name)
            self._running.add(name)
        elif kind is EventKind.PREEMPTED:
            self._running.discard(name)
            self._waiting.add(name)
        elif kind in ENGINE_DONE:
            self._running.discard(name)
            self._waiting.discard(name)

    def discard(self, requests: Iterable[str]) -> None:
        """Forgets requests that ended before they reached the engine."""
        for request in requests:
            self._folds.pop(request, None)

    def _close(self, fold: Fold) -> None:
        if self._folds.pop(fold.request, None) is not None:
            self._on_closed(fold.timeline())
