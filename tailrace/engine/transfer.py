"""Pages on their way between the pool and a tier (`kv.tiers`), on a thread of their own.

The engine's thread hands over and takes back; it never waits. Loads go first, a page at a time. Pages to be stored are
copied out of the pool by the engine's thread, beside a running step, into a queue that is bounded: where it is full
they are dropped, which costs a later miss; those of a preempted request, which comes back for certain, push out others
instead. They are stored while nothing is computed, so that they take no core from a step, or once they fill half of the
queue. A page that still waits there is found and loaded like any other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tailrace.kv.cost import LoadCost
from tailrace.kv.tiers import PageKey, Tier, TierStats

if TYPE_CHECKING:
    from tailrace.backends import Backend, Pages
    from tailrace.engine.request import Request
    from tailrace.kv.prefix import PageChain

QUEUE_BYTES = 64 << 20
"""Most bytes of pages that wait to be stored."""
CLOSE_SECONDS = 0.5
"""Longest that the pages which still wait to be stored may take at the end."""

_log = logging.getLogger("tailrace")


class Offered(NamedTuple):
    """What a tier has of a chain beyond what the pool has, and whether it is to be loaded: how many pages in a row are
    better loaded than computed, in which tier they are, and the seconds that loading them and computing their tokens
    are expected to take (computing: infinite where it is not known). Without pages, `why` there are none: "absent",
    "slower" (computing them should be quicker; tier and seconds say of what) or "late" (an earlier load is overdue)."""

    pages: int = 0
    tier: str = ""
    loading: float = 0.0
    computing: float = 0.0
    why: str = "absent"


class Load:
    """Pages of a request that are being filled from a tier: number `first` of its chain, and those that follow. Until
    it has been taken back (`Transfers.finished`) it holds `pages` in the pool, beside the request: the thread may be
    writing them, whatever happens to the request meanwhile."""

    __slots__ = (
        "before",
        "begun",
        "cancelled",
        "computing",
        "done",
        "ended",
        "first",
        "keys",
        "pages",
        "predicted",
        "queued",
        "request",
        "started",
        "tier",
    )

    def __init__(
        self,
        request: Request,
        first: int,
        pages: Sequence[Pages],
        keys: Sequence[PageKey],
        predicted: float,
        computing: float = 0.0,
        tier: str = "",
    ) -> None:
        self.request = request
        self.first = first
        self.pages = list(pages)
        self.keys = list(keys)
        self.predicted = predicted  # seconds that it should take
        self.computing = computing  # seconds that computing the same should take
        self.tier = tier  # where its first page comes from
        self.before = 0  # bytes that it had to wait for
        self.begun = 0.0  # when it was handed over, when its first page's turn came, and when it was done
        self.started = 0.0
        self.ended = 0.0
        self.done = 0  # pages that are complete, in a row
        self.queued = 0  # of those: that still waited to be stored
        self.cancelled = False


@dataclass(frozen=True)
class TransferStats:
    """Since the start, but for `queued`, the pages that wait to be stored now. `requeued` pages were loaded while they
    still waited there. Seconds are of loads that have ended: what they took, should have taken, and what computing the
    pages that they gave should have taken, where that was known."""

    tier: TierStats
    queued: int
    dropped: int
    loads: int
    load_seconds: float
    predicted_seconds: float
    computing_seconds: float = 0.0
    requeued: int = 0


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
        self._stores: OrderedDict[bytes, tuple[PageKey, bytearray]] = OrderedDict()  # by digest; oldest first
        self._urgent: OrderedDict[bytes, tuple[PageKey, bytearray]] = OrderedDict()  # of preempted requests
        self._buffers: list[bytearray] = []  # spare ones: their memory has been touched already
        self._busy = False
        self._waiting: set[bytes] = set()  # digests of pages that are queued or being stored
        self._ended: deque[Load] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._ended_loads = 0
        self._load_seconds = self._predicted_seconds = self._computing_seconds = 0.0
        self._requeued = 0
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    # --- the engine's thread

    @property
    def stats(self) -> TransferStats:
        """What has happened so far."""
        return TransferStats(
            self.tier.stats(),
            self._queue_length,
            self.dropped,
            self._ended_loads,
            self._load_seconds,
            self._predicted_seconds,
            self._computing_seconds,
            self._requeued,
        )

    @property
    def _queue_length(self) -> int:
        return len(self._stores) + len(self._urgent)

    def lookup(self, chain: PageChain, first: int, limit: int) -> tuple[int, int]:
        """How many of the chain's pages first .. limit-1 can be loaded, in a row from `first`, as far as is known: from
        the tier, or from the queue of those that it is about to get. And how many of them are in that queue."""
        digests, at, queued = chain.digests, first, 0
        while at < limit:
            if digests[at] in self._waiting:
                queued += 1
                at += 1
            elif found := self.tier.lookup(chain, at, limit):
                at += found
            else:
                break
        return at - first, queued

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
            self._requeued += load.queued
            if load.computing < float("inf"):
                self._computing_seconds += load.computing * load.done / len(load.pages)
            if not load.before and not load.queued:
                size = load.done * self.page_bytes
                self.cost.loaded(size, load.ended - load.started, load.started - load.begun)
        return ended

    def busy(self, on: bool) -> None:
        """Whether steps run."""
        if on != self._busy:
            with self._wake:
                self._busy = on
                self._wake.notify()

    def store(self, key: PageKey, page: Pages, *, urgent: bool = False) -> None:
        """Copies a complete page out of the pool and queues it, unless the tier has it or is about to. Where the queue
        is full it is dropped; an urgent one pushes out the latest of those that are not."""
        digest = key.digest
        if digest in self._waiting:
            if urgent:
                with self._wake:
                    if digest in self._stores:
                        self._urgent[digest] = self._stores.pop(digest)
            return
        if self.tier.holds(digest):
            return
        if self._queue_length >= self._room:
            self.dropped += 1
            with self._wake:
                if not urgent or not self._stores:
                    return
                self._waiting.discard(self._stores.popitem()[0])  # its buffer may be being read: it is no spare one
        data = self._backend.read_page(page, self._buffers.pop() if self._buffers else None)
        with self._wake:
            self._waiting.add(digest)
            (self._urgent if urgent else self._stores)[digest] = (key, data)
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
            queue = self._urgent or self._stores
            store = queue.popitem(last=False)[1] if load is None and self._may_store() else None
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
        count = self._queue_length
        return count > 0 and (self._closing or not self._busy or 2 * count > self._room)

    def _fill(self, load: Load) -> bool:
        """Loads the next page; False where the load has ended."""
        first = not load.started
        load.started = load.started or self._clock()
        if load.cancelled:
            return False
        try:
            if first:
                self.tier.prepare(load.keys)
            key = load.keys[load.done]
            waiting = self._waiting_page(key)
            data = waiting if waiting is not None else self.tier.load(key)
            if data is None:
                return False
            self._backend.write_page(load.pages[load.done], data)
            load.queued += waiting is not None
        except Exception:  # noqa: BLE001 - whatever it was, the request computes instead
            _log.exception("tailrace: a KV page could not be loaded")
            return False
        load.done += 1
        return load.done < len(load.pages)

    def _waiting_page(self, key: PageKey) -> bytearray | None:
        """The page, where it still waits to be stored. Token ids and parent are compared, as a tier does."""
        with self._wake:
            found = self._urgent.get(key.digest) or self._stores.get(key.digest)
        return found[1] if found is not None and found[0] == key else None

    def _run(self) -> None:
        while True:
            if not self.work():
                with self._wake:
                    if self._loads or self._may_store():
                        continue
                    if self._closing:
                        return
                    self._wake.wait()
