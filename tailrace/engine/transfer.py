"""Pages on their way between the pool and a tier (`kv.tiers`), on a thread of their own.

The engine's thread hands over and takes back; it never waits. Loads go first, a page at a time. Pages to be stored are
copied out of the pool by the engine's thread, beside a running step, into a queue that is bounded: where it is full
they are dropped, which costs a later miss. They are stored while nothing is computed, so that they take no core from a
step, or once they fill half of the queue.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.kv.cost import LoadCost
from tailrace.kv.tiers import PageKey, Tier, TierStats

if TYPE_CHECKING:
    from tailrace.backends import Backend, Pages
    from tailrace.engine.request import Request

QUEUE_BYTES = 64 << 20
"""Most bytes of pages that wait to be stored."""
CLOSE_SECONDS = 0.5
"""Longest that the pages which still wait to be stored may take at the end."""

_log = logging.getLogger("tailrace")


class Load:
    """Pages of a request that are being filled from a tier: number `first` of its chain, and those that follow. Until
    it has been taken back (`Transfers.finished`) it holds `pages` in the pool, beside the request: the thread may be
    writing them, whatever happens to the request meanwhile."""

    __slots__ = (
        "before",
        "begun",
        "cancelled",
        "done",
        "ended",
        "first",
        "keys",
        "pages",
        "predicted",
        "request",
        "started",
    )

    def __init__(
        self, request: Request, first: int, pages: Sequence[Pages], keys: Sequence[PageKey], predicted: float
    ) -> None:
        self.request = request
        self.first = first
        self.pages = list(pages)
        self.keys = list(keys)
        self.predicted = predicted  # seconds that it should take
        self.before = 0  # bytes that it had to wait for
        self.begun = 0.0  # when it was handed over, when its first page's turn came, and when it was done
        self.started = 0.0
        self.ended = 0.0
        self.done = 0  # pages that are complete, in a row
        self.cancelled = False


@dataclass(frozen=True)
class TransferStats:
    """Since the start, but for `queued`, the pages that wait to be stored now. Seconds are of loads that have ended."""

    tier: TierStats
    queued: int
    dropped: int
    loads: int
    load_seconds: float
    predicted_seconds: float


class Transfers:
    """The thread between the pool and one tier. `notify` is called on it whenever a load has ended. Without `thread`
    whoever calls `work` is the thread."""

    def __init__(
        self,
        tier: Tier,
        backend: Backend,
        *,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ) -> None:
        self.tier = tier
        self.cost = LoadCost()
        self.page_bytes = backend.page_bytes
        self.notify: Callable[[], None] = lambda: None
        self.dropped = 0
        self._backend = backend
        self._clock = clock
        self._room = max(1, queue_bytes // self.page_bytes)
        self._loads: deque[Load] = deque()
        self._stores: deque[tuple[PageKey, bytearray]] = deque()
        self._buffers: list[bytearray] = []  # spare ones: their memory has been touched already
        self._busy = False
        self._waiting: set[bytes] = set()  # digests of pages that are queued or being stored
        self._ended: deque[Load] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._ended_loads = 0
        self._load_seconds = self._predicted_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    # --- the engine's thread

    @property
    def stats(self) -> TransferStats:
        """What has happened so far."""
        return TransferStats(
            self.tier.stats(),
            len(self._stores),
            self.dropped,
            self._ended_loads,
            self._load_seconds,
            self._predicted_seconds,
        )

    def before(self) -> int:
        """Bytes that a load that began now would have to wait for."""
        with self._wake:
            return sum(len(load.pages) - load.done for load in self._loads if not load.cancelled) * self.page_bytes

    def begin(self, load: Load) -> None:
        """Begins to fill the load's pages. No step that runs may touch them, nor any that is launched before the load
        is `finished`."""
        load.begun = self._clock()
        load.before = self.before()
        with self._wake:
            self._loads.append(load)
            self._wake.notify()

    @property
    def has_finished(self) -> bool:
        """Whether `finished` has something to give."""
        return bool(self._ended)

    def finished(self) -> list[Load]:
        """The loads that have ended since the last call, each once. Their pages are the caller's again."""
        ended = []
        while self._ended:
            load = self._ended.popleft()
            ended.append(load)
            self._ended_loads += 1
            self._load_seconds += load.ended - load.begun
            self._predicted_seconds += load.predicted
            if not load.before:
                size = load.done * self.page_bytes
                self.cost.loaded(size, load.ended - load.started, load.started - load.begun)
        return ended

    def busy(self, on: bool) -> None:
        """Whether steps run."""
        if on != self._busy:
            with self._wake:
                self._busy = on
                self._wake.notify()

    def store(self, key: PageKey, page: Pages) -> None:
        """Copies a complete page out of the pool and queues it, unless the tier has it or is about to."""
        if key.digest in self._waiting or self.tier.holds(key.digest):
            return
        if len(self._stores) >= self._room:
            self.dropped += 1
            return
        data = self._backend.read_page(page, self._buffers.pop() if self._buffers else None)
        with self._wake:
            self._waiting.add(key.digest)
            self._stores.append((key, data))
            if self._may_store():
                self._wake.notify()

    def close(self) -> None:
        """Stores what is queued, as far as that goes in half a second, and ends the thread."""
        with self._wake:
            self._closing = True
            for load in self._loads:
                load.cancelled = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # --- the thread

    def work(self) -> bool:
        """One page; False where there is nothing to do."""
        with self._wake:
            load = self._loads[0] if self._loads else None
            store = self._stores.popleft() if load is None and self._may_store() else None
        if load is not None:
            if not self._fill(load):
                with self._wake:
                    self._loads.popleft()
                load.ended = self._clock()
                self._ended.append(load)
                self.notify()
        elif store is not None:
            key, data = store
            with contextlib.suppress(Exception):  # a page that is not stored is only a miss
                self.tier.store(key, data)
            self._waiting.discard(key.digest)
            self._buffers.append(data)
        return load is not None or store is not None

    def _may_store(self) -> bool:
        return bool(self._stores) and (self._closing or not self._busy or 2 * len(self._stores) > self._room)

    def _fill(self, load: Load) -> bool:
        """Loads the next page; False where the load has ended."""
        first = not load.started
        load.started = load.started or self._clock()
        if load.cancelled:
            return False
        try:
            if first:
                self.tier.prepare(load.keys)
            data = self.tier.load(load.keys[load.done])
            if data is None:
                return False
            self._backend.write_page(load.pages[load.done], data)
        except Exception:  # noqa: BLE001 - whatever it was, the request computes instead
            _log.exception("tailrace: a KV page could not be loaded")
            return False
        load.done += 1
        return load.done < len(load.pages)

    def _run(self) -> None:
        while True:
            if not self.work():
                with self._wake:
                    if self._loads or self._may_store():
                        continue
                    if self._closing:
                        return
                    self._wake.wait()
