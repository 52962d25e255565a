"""The thread that moves pages between the pool and one tier (`kv.tiers`), so that one that is slow or hangs keeps none
of the others waiting.

Questions what a tier has go first, then loads, a page at a time. Pages to be stored, copies that the engine's thread
has made, wait in a queue that is bounded: where it is full they are dropped, which costs a later miss; those of a
preempted request, which comes back for certain, push out others instead. They are stored while nothing is computed, so
that they take no core from a step, or once they fill half of the queue. A page that still waits there is found and
loaded like any other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tailrace.kv.tiers import PageKey, Tier

if TYPE_CHECKING:
    from tailrace.backends import Backend, Pages
    from tailrace.engine.request import Request
    from tailrace.kv.cost import LoadCost
    from tailrace.kv.prefix import PageChain

CLOSE_SECONDS = 0.5
"""Longest that the pages which still wait to be stored may take at the end."""

_log = logging.getLogger("tailrace")


class Load:
    """Pages of a request that are being filled from tiers: number `first` of its chain, and those that follow. Until it
    has been taken back (`Transfers.finished`) it holds `pages` in the pool, beside the request: threads may be writing
    them, whatever happens to the request meanwhile.

    `split` says which tier (by its number) fills how many of them, in order; each is a `Part`, and all go on at
    once."""

    __slots__ = (
        "begun",
        "cancelled",
        "computing",
        "cut",
        "ended",
        "first",
        "keys",
        "left",
        "pages",
        "parts",
        "predicted",
        "request",
        "tiers",
    )

    def __init__(
        self,
        request: Request,
        first: int,
        pages: Sequence[Pages],
        keys: Sequence[PageKey],
        predicted: float,
        split: Sequence[tuple[int, int]] = (),
        *,
        computing: float = 0.0,
        tiers: str = "",
    ) -> None:
        self.request = request
        self.first = first
        self.pages = list(pages)
        self.keys = list(keys)
        self.predicted = predicted  # seconds that it should take
        self.computing = computing  # seconds that computing the same should take; infinite where that is not known
        self.tiers = tiers  # names of those that it is from
        self.parts: list[Part] = []
        at = 0
        for tier, count in split or [(0, len(self.pages))]:
            self.parts.append(Part(self, tier, at, count))
            at += count
        self.left = len(self.parts)  # parts that have not ended
        self.begun = 0.0  # when it was handed over, and when it was done
        self.ended = 0.0
        self.cut = len(self.pages)  # where a page is missing: what comes after it is of no use
        self.cancelled = False

    @property
    def filled(self) -> list[tuple[int, int]]:
        """The pages that are complete, in a row: from which tier how many."""
        filled = []
        for part in self.parts:
            filled.append((part.tier, part.done))
            if part.done < part.count:
                break
        return filled

    @property
    def done(self) -> int:
        """How many are complete, in a row."""
        return sum(count for _, count in self.filled)


class Part:
    """A load's pages `at` .. at + count - 1, from one tier."""

    __slots__ = ("at", "before", "count", "done", "ended", "load", "predicted", "queued", "started", "tier")

    def __init__(self, load: Load, tier: int, at: int, count: int) -> None:
        self.load = load
        self.tier = tier
        self.at = at
        self.count = count
        self.done = 0
        self.queued = 0  # of those: that still waited to be stored
        self.before = 0  # pages that it had to wait for
        self.predicted = 0.0  # seconds that it should take
        self.started = 0.0  # when its first page's turn came, and when it was done
        self.ended = 0.0


class Lookup:
    """The question which pages a tier has: `done` once it is answered, or need not be, and `told` once nobody waits for
    that any more."""

    __slots__ = ("begun", "digests", "done", "late", "told")

    def __init__(self, digests: Sequence[bytes], begun: float) -> None:
        self.digests = list(digests)
        self.begun = begun
        self.done = self.told = not digests
        self.late = False  # it was waited for in vain


class Copy:
    """A page's bytes that wait to be stored by `users` movers; `Transfers` takes the buffer back from the last one, but
    not where one of them has pushed the page out of its queue: its thread may be reading it."""

    __slots__ = ("data", "key", "users")

    def __init__(self, key: PageKey, data: bytearray | memoryview, users: int) -> None:
        self.key = key
        self.data = data
        self.users = users


class Mover:
    """The thread of one tier. `ended` and `answered` are called on it with a part, and a lookup; `give_back` with a
    copy that it needs no more. Without `thread` whoever calls `work` is the thread."""

    def __init__(
        self,
        tier: Tier,
        backend: Backend,
        room: int,
        *,
        cost: LoadCost,
        clock: Callable[[], float],
        ended: Callable[[Part], None],
        answered: Callable[[Lookup], None],
        give_back: Callable[[Copy], None],
        thread: bool,
    ) -> None:
        self.tier = tier
        self._cost = cost
        self.room = room  # most pages that wait to be stored
        self.dropped = 0
        self.declined = 0  # loads that were not made
        self.loads = 0  # parts that have ended
        self.load_seconds = self.predicted_seconds = self.computing_seconds = 0.0
        self.requeued = 0  # pages that were loaded while they still waited to be stored
        self.lookups = self.late_lookups = 0
        self.lookup_seconds = 0.0
        self._backend = backend
        self._clock = clock
        self._ended = ended
        self._answered = answered
        self._give_back = give_back
        self._lookups: deque[Lookup] = deque()
        self._parts: deque[Part] = deque()
        self._stores: OrderedDict[bytes, Copy] = OrderedDict()  # by digest; oldest first
        self._urgent: OrderedDict[bytes, Copy] = OrderedDict()  # likewise, of preempted requests
        self._waiting: set[bytes] = set()  # digests of pages that are queued or being stored
        self._busy = False
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kv-{tier.name}", daemon=True) if thread else None

    def start(self) -> None:
        """Begins to work."""
        if self._thread is not None:
            self._thread.start()

    # --- the engine's thread

    @property
    def queued(self) -> int:
        """Pages that wait to be stored."""
        return len(self._stores) + len(self._urgent)

    @property
    def unsaved(self) -> int:
        """The same, and those that are being stored."""
        return len(self._waiting)

    @property
    def overdue(self) -> bool:
        """Whether a question waits that nobody waits for any more: the tier is slow, and no other is to be asked."""
        with self._wake:
            return any(lookup.late for lookup in self._lookups)

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
        """Pages that a load that began now would have to wait for."""
        with self._wake:
            return sum(part.count - part.done for part in self._parts if not part.load.cancelled)

    def ask(self, lookup: Lookup) -> None:
        """Begins to find out what the tier has."""
        with self._wake:
            self._lookups.append(lookup)
            self._wake.notify()

    def begin(self, part: Part, page_bytes: int) -> None:
        """Begins to fill a part's pages."""
        part.before = self.before()
        keys = part.load.keys[part.at : part.at + part.count]
        stored = sum(key.digest not in self._waiting for key in keys)
        part.predicted = self._cost.load_seconds(self.tier.name, stored, page_bytes, part.before)
        with self._wake:
            self._parts.append(part)
            self._wake.notify()

    def busy(self, on: bool) -> None:
        """Whether steps run."""
        if on != self._busy:
            with self._wake:
                self._busy = on
                self._wake.notify()

    def wants(self, digest: bytes, *, urgent: bool = False) -> bool:
        """Whether that page should be stored, and has not been queued yet. One for which there is no room counts as
        dropped, but an urgent one pushes out the latest of those that are not: that is dropped then."""
        if digest in self._waiting:
            if urgent:
                with self._wake:
                    if digest in self._stores:
                        self._urgent[digest] = self._stores.pop(digest)
            return False
        if not self.tier.up or self.tier.holds(digest):
            return False
        if self.queued >= self.room:
            self.dropped += 1
            with self._wake:
                if not urgent or not self._stores:
                    return False
                self._waiting.discard(self._stores.popitem()[0])
        return True

    def store(self, copy: Copy, *, urgent: bool = False) -> None:
        """Queues a page that it `wants`."""
        with self._wake:
            self._waiting.add(copy.key.digest)
            (self._urgent if urgent else self._stores)[copy.key.digest] = copy
            if self._may_store():
                self._wake.notify()

    def measure(self, part: Part, page_bytes: int, used: int) -> None:
        """A part has ended, and `used` of its pages are of use: what that says of the tier."""
        load = part.load
        self.loads += 1
        self.load_seconds += part.ended - load.begun
        self.predicted_seconds += part.predicted
        self.requeued += part.queued
        if load.computing < float("inf"):
            self.computing_seconds += load.computing * used / max(1, len(load.pages))
        if not part.before and not part.queued:
            seconds, latency = part.ended - part.started, part.started - load.begun
            self._cost.loaded(self.tier.name, part.done, page_bytes, seconds, latency)

    def stop(self) -> None:
        """Ends the thread once what is queued is stored."""
        with self._wake:
            self._closing = True
            for part in self._parts:
                part.load.cancelled = True
            self._wake.notify()

    def join(self, seconds: float) -> None:
        """Waits for the thread's end so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    # --- the thread

    def work(self) -> bool:
        """One question, one page to load, or as many to store as the tier takes at a time; False where there is nothing
        to do."""
        with self._wake:
            lookup = self._lookups[0] if self._lookups else None
            part = self._parts[0] if lookup is None and self._parts else None
            idle = lookup is None and part is None
            queue = self._urgent or self._stores
            count = min(self.tier.batch, len(queue)) if idle and self._may_store() else 0
            copies = [queue.popitem(last=False)[1] for _ in range(count)]
        if lookup is not None:
            with contextlib.suppress(Exception):  # no answer is an answer
                self.tier.ask(lookup.digests)
            with self._wake:
                self._lookups.popleft()
            self.lookups += 1
            self.lookup_seconds += self._clock() - lookup.begun
            lookup.done = True
            self._answered(lookup)
        elif part is not None:
            if not self._fill(part):
                with self._wake:
                    self._parts.popleft()
                part.ended = self._clock()
                self._ended(part)
        elif copies:
            with contextlib.suppress(Exception):  # a page that is not stored is only a miss
                self.tier.store_all([(copy.key, copy.data) for copy in copies])
            for copy in copies:
                self._waiting.discard(copy.key.digest)
                self._give_back(copy)
        return lookup is not None or part is not None or bool(copies)

    def tend(self) -> float | None:
        """`Tier.tend`."""
        try:
            return self.tier.tend()
        except Exception:  # noqa: BLE001 - the thread has to go on
            _log.exception("tailrace: KV pages (%s)", self.tier.name)
            return CLOSE_SECONDS

    def _may_store(self) -> bool:
        count = self.queued
        return count > 0 and (self._closing or not self._busy or 2 * count > self.room)

    def _fill(self, part: Part) -> bool:
        """Loads the next page; False where the part has ended."""
        load, at = part.load, part.at + part.done
        first = not part.started
        part.started = part.started or self._clock()
        if load.cancelled or at >= load.cut:
            return False
        try:
            if first:
                keys = load.keys[at : part.at + part.count]
                self.tier.prepare([key for key in keys if key.digest not in self._waiting])
            waiting = self._waiting_page(load.keys[at])
            data = waiting if waiting is not None else self.tier.load(load.keys[at])
            if data is not None:
                self._backend.write_page(load.pages[at], data)
                part.queued += waiting is not None
        except Exception:  # noqa: BLE001 - whatever it was, the request computes instead
            _log.exception("tailrace: a KV page could not be loaded")
            data = None
        if data is None:
            load.cut = min(load.cut, at)
            return False
        part.done += 1
        return part.done < part.count

    def _waiting_page(self, key: PageKey) -> bytearray | memoryview | None:
        """The page, where it still waits to be stored. Token ids and parent are compared, as a tier does."""
        with self._wake:
            found = self._urgent.get(key.digest) or self._stores.get(key.digest)
        return found.data if found is not None and found.key == key else None

    def _run(self) -> None:
        while True:
            if self.work():
                continue
            again = self.tend()
            with self._wake:
                if self._lookups or self._parts or self._may_store():
                    continue
                if self._closing:
                    break
                self._wake.wait(again)
        self.tier.close()
