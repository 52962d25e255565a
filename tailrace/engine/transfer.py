"""Pages on their way between the pool and the tiers below it (`kv.tiers`), nearest first; each tier has a thread of its
own (`mover`).

The engine's thread hands over and takes back; it never waits. It asks what tiers have that are known only by asking,
loads from the nearest tier that has a page, or is about to get it, where that is expected to be quicker than computing
it, and stores in all of them: a page is copied out of the pool once, beside a running step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tailrace.backends import PAGE_SIZE
from tailrace.engine.mover import CLOSE_SECONDS, Copy, Load, Lookup, Mover, Part
from tailrace.kv.cost import LoadCost, MeasuredCost
from tailrace.kv.prefix import PageChain
from tailrace.kv.tiers import PageKey, Tier, TierStats, memory

if TYPE_CHECKING:
    from tailrace.backends import Backend, Pages

__all__ = ["Load", "Lookup", "Offered", "Transfers"]

QUEUE_BYTES = 64 << 20
"""Most bytes of pages that wait to be stored in a tier."""
SAVE_LOOK = 0.002
"""Seconds between two looks at whether there is room, where pages are stored before the engine goes to sleep."""
LOOKUP_LIMIT = 0.05
"""Longest that a request waits for a tier to say what it has, in seconds."""
LOAD_LIMIT = 5.0
"""Seconds after which a request no longer waits for its load, and none is begun from the tiers that it waits for until
it has ended after all."""


class Offered(NamedTuple):
    """What tiers have of a chain beyond what the pool has, and whether it is to be loaded: how many `pages` in a row
    are better loaded than computed, how they are split over the tiers (`Load`), the names of those, and the seconds
    that loading them and computing their tokens are expected to take (computing: infinite where it is not known).
    Without pages, `why` there are none: "absent", "slower" (computing should be quicker; tiers and seconds are those of
    the `declined` pages) or "late" (an earlier load is overdue, or a tier has not said in time what it has)."""

    pages: int = 0
    tiers: str = ""
    loading: float = 0.0
    computing: float = 0.0
    why: str = "absent"
    declined: int = 0
    split: tuple[tuple[int, int], ...] = ()


NOTHING = Offered()


@dataclass(frozen=True)
class TransferStats:
    """Of one tier since the start, but for `queued`, the pages that wait to be stored now. `requeued` pages were loaded
    while they still waited there. Seconds are of loads and lookups that have ended: what they took, what loads should
    have taken, and what computing the pages that they gave should have taken, where that was known."""

    tier: TierStats
    up: bool
    queued: int
    dropped: int
    declined: int
    loads: int
    load_seconds: float
    predicted_seconds: float
    computing_seconds: float
    requeued: int
    lookups: int
    lookup_seconds: float
    late_lookups: int


class Transfers:
    """All that goes on between the pool and `tiers`; `cost` says what is quicker, what was measured unless another is
    given. `notify` is called on another thread whenever a load has ended or a question is answered. Without `thread`
    whoever calls `work` does it all."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        backend: Backend,
        *,
        cost: LoadCost | None = None,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ) -> None:
        self.page_bytes = backend.page_bytes
        self.cost: LoadCost = cost or MeasuredCost()
        self.notify: Callable[[], None] = lambda: None
        self._backend = backend
        self._clock = clock
        self._lock = threading.Lock()  # of what several threads count down
        self._buffers: list[bytearray | memoryview] = []  # spare ones: their memory has been touched already
        self._ended: deque[Load] = deque()
        self._late: set[Load] = set()  # that have not ended in time
        self._answers: deque[Lookup] = deque()  # that the engine has not heard of
        room = max(1, queue_bytes // self.page_bytes)
        self.movers = [
            Mover(
                tier,
                backend,
                room,
                cost=self.cost,
                clock=clock,
                ended=self._part_ended,
                answered=self._answered,
                give_back=self._give_back,
                thread=thread,
            )
            for tier in tiers
        ]
        for mover in self.movers:
            mover.start()

    # --- the engine's thread

    @property
    def stats(self) -> dict[str, TransferStats]:
        """What has happened so far, by the tiers' names."""
        return {
            mover.tier.name: TransferStats(
                mover.tier.stats(),
                mover.tier.up,
                mover.queued,
                mover.dropped,
                mover.declined,
                mover.loads,
                mover.load_seconds,
                mover.predicted_seconds,
                mover.computing_seconds,
                mover.requeued,
                mover.lookups,
                mover.lookup_seconds,
                mover.late_lookups,
            )
            for mover in self.movers
        }

    def name_of(self, tier: int) -> str:
        """The name of the tier with that number."""
        return self.movers[tier].tier.name

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts."""
        self.cost.computed(tokens, seconds)

    def used(self, chain: PageChain, count: int) -> None:
        """A chain's first pages are in use."""
        for mover in self.movers:
            mover.tier.lookup(chain, 0, count)

    def ask(self, chain: PageChain, first: int, limit: int) -> Lookup:
        """Begins to find out what tiers have of a chain's pages first .. limit-1, as far as that is not known. Pages
        that the tiers before have, and a tier that is down, slow, or expected to be slower than computing, are not
        asked for."""
        now = self._clock()
        for mover in self.movers:
            tier = mover.tier
            if self._stuck(mover):
                continue
            first += mover.lookup(chain, first, limit)[0]
            count = limit - first
            if not count:
                break
            if not tier.asked or not tier.up or mover.overdue:
                continue
            if self._quicker(mover, count, count, first, mover.before()):
                lookup = Lookup(chain.digests[first:limit], now)
                mover.ask(lookup)
                return lookup
            self.cost.declined(tier.name)
        return Lookup((), now)

    def awaited(self, lookup: Lookup) -> bool:
        """Whether it is worth waiting for that answer."""
        if lookup.done or lookup.late:
            return False
        if self._clock() - lookup.begun < LOOKUP_LIMIT:
            return True
        lookup.late = True
        for mover in self.movers:
            mover.late_lookups += mover.overdue
        return False

    def offer(self, chain: PageChain, first: int, limit: int) -> Offered:
        """Which of a chain's pages first .. limit-1 are better loaded than computed, from which tiers."""
        at, split = first, []
        sizes = [0] * len(self.movers)  # pages that each is to load
        before = [mover.before() for mover in self.movers]
        used: set[int] = set()
        declined, slower, late = 0, 0.0, False
        names: list[str] = []  # of the tiers whose pages are declined
        while at < limit:
            for number, mover in enumerate(self.movers):
                if self._stuck(mover):
                    late = True
                    continue
                count, queued = mover.lookup(chain, at, limit)
                if not count:
                    continue
                size, ahead = count - queued, before[number] + sizes[number]
                if self._quicker(mover, size, count, at, ahead):
                    break
                self.cost.declined(mover.tier.name)
                mover.declined += 1
                declined = max(declined, count)
                slower = max(slower, self._load_seconds(mover, size, ahead))
                names.append(mover.tier.name)
            else:
                break
            split.append((number, count))
            used.add(number)
            sizes[number] += size
            at += count
        computing = self.cost.compute_seconds((at - first if split else declined) * PAGE_SIZE, first * PAGE_SIZE)
        if split:
            loading = max(self._load_seconds(self.movers[n], sizes[n], before[n]) for n in used)
            tiers = "+".join(self.movers[number].tier.name for number in sorted(used))
            return Offered(at - first, tiers, loading, computing, "", split=tuple(split))
        if declined:
            return Offered(0, "+".join(names), slower, computing, "slower", declined)
        return Offered(why="late") if late else NOTHING

    def _load_seconds(self, mover: Mover, pages: int, before: int) -> float:
        return self.cost.load_seconds(mover.tier.name, pages, self.page_bytes, before)

    def _quicker(self, mover: Mover, pages: int, count: int, at: int, before: int) -> bool:
        """Whether `count` pages after `at` others of a chain, of which `pages` are in the tier and the rest in its
        queue, should be loaded sooner than computed."""
        computing = self.cost.compute_seconds(count * PAGE_SIZE, at * PAGE_SIZE)
        return self._load_seconds(mover, pages, before) < computing

    def begin(self, load: Load) -> None:
        """Begins to fill the load's pages. No step that runs may touch them, nor any that is launched before the load
        is `finished`."""
        load.begun = self._clock()
        for part in load.parts:
            self.movers[part.tier].begin(part, self.page_bytes)

    def late(self, load: Load) -> bool:
        """Whether nobody should wait for that load any longer."""
        return load.begun > 0.0 and self._clock() - load.begun > LOAD_LIMIT

    def gave_up(self, load: Load) -> None:
        """Nobody waits for it any longer."""
        self._late.add(load)

    @property
    def has_finished(self) -> bool:
        """Whether there is something that a plan does not know of: `finished` has something to give, or a question is
        answered."""
        return bool(self._ended or self._answers)

    def heard(self) -> bool:
        """Whether questions have been answered since the last call."""
        news = bool(self._answers)
        while self._answers:
            self._answers.popleft()
        return news

    def finished(self) -> list[Load]:
        """The loads that have ended since the last call, each once. Their pages are the caller's again."""
        ended = []
        while self._ended:
            load = self._ended.popleft()
            ended.append(load)
            self._late.discard(load)
            done = load.done
            for part in load.parts:
                used = min(max(done - part.at, 0), part.count)
                self.movers[part.tier].measure(part, self.page_bytes, used)
        return ended

    def busy(self, on: bool) -> None:
        """Whether steps run."""
        for mover in self.movers:
            mover.busy(on)

    def store(self, key: PageKey, page: Pages, *, urgent: bool = False) -> None:
        """Copies a complete page out of the pool and queues it, for the tiers that do not have it and are not about
        to. Where a queue is full it is dropped; an urgent one pushes out the latest of those that are not."""
        movers = [mover for mover in self.movers if mover.wants(key.digest, urgent=urgent)]
        if movers:
            buffer = self._buffers.pop() if self._buffers else memory(self.page_bytes)
            copy = Copy(key, self._backend.read_page(page, buffer), len(movers))
            for mover in movers:
                mover.store(copy, urgent=urgent)

    def save(self, pages: Iterable[tuple[PageKey, Pages]], seconds: float) -> None:
        """Stores pages in the tiers that do not have them, and what is queued, waiting for room: at most so long. No
        step runs."""
        end = self._clock() + seconds
        self.busy(False)
        for key, page in pages:
            while self._pending(full=True) and self._clock() < end:
                time.sleep(SAVE_LOOK)
            if self._clock() >= end:
                return
            self.store(key, page)
        while self._pending() and self._clock() < end:
            time.sleep(SAVE_LOOK)

    def _pending(self, *, full: bool = False) -> bool:
        """Whether a tier that answers has pages to store; `full`: as many as there is room for."""
        return any(mover.tier.up and mover.unsaved >= (mover.room if full else 1) for mover in self.movers)

    def close(self) -> None:
        """Stores what is queued, as far as that goes in half a second, and ends the threads."""
        for mover in self.movers:
            mover.stop()
        end = time.monotonic() + CLOSE_SECONDS
        for mover in self.movers:
            mover.join(max(0.0, end - time.monotonic()))

    def _stuck(self, mover: Mover) -> bool:
        """Whether a load that nobody waits for any more still keeps that tier busy."""
        return any(self.movers[part.tier] is mover and not part.ended for load in self._late for part in load.parts)

    # --- the movers' threads

    def work(self) -> bool:
        """A page of each tier; False where there was nothing to do."""
        worked = False
        for mover in self.movers:
            if mover.work():
                worked = True
            else:
                mover.tend()
        return worked

    def _part_ended(self, part: Part) -> None:
        load = part.load
        with self._lock:
            load.left -= 1
            last = not load.left
        if last:
            load.ended = part.ended
            self._ended.append(load)
            self.notify()

    def _answered(self, lookup: Lookup) -> None:
        self._answers.append(lookup)
        self.notify()

    def _give_back(self, copy: Copy) -> None:
        with self._lock:
            copy.users -= 1
            if not copy.users:
                self._buffers.append(copy.data)
