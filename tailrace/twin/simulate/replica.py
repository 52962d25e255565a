"""One engine under a clock that moves only when it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from tailrace.engine.config import EngineConfig
from tailrace.engine.core import EngineCore
from tailrace.engine.protocol import Submit
from tailrace.kv.prefix import PageChain
from tailrace.ledger.book import Book
from tailrace.ledger.timeline import Timeline
from tailrace.terms import Event, EventKind, InvalidInput
from tailrace.twin.simulate.cost import StepCost
from tailrace.twin.simulate.device import Device
from tailrace.twin.simulate.prompts import IDS

AT_ONCE = 256
"""Most steps that are gone through at once."""


def digest(parent: bytes, tokens: bytes) -> bytes:
    """Stands in for the SHA-256 that identifies a page, at a fraction of its time: the index compares what it finds, so
    that a collision, one in 10^19 pairs, would be a miss."""
    return hash((parent, tokens)).to_bytes(8, "little", signed=True)


class Replica:
    """Requests in, timelines out, at simulated seconds. The caller's loop: `give` what arrives, in the order of time,
    and `proceed` when the time is `due`; nothing that arrives may be later than that.

    `closed` gets the timeline of each request that has ended. `parity`: see `ledger.steps`. `at_once` False goes
    through every step by itself, which gives the same timelines more slowly.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        cost: StepCost,
        closed: Callable[[Timeline], None],
        *,
        parity: float = 0.0,
        at_once: bool = True,
    ) -> None:
        if config.draft_tokens:
            raise InvalidInput("drafts are not simulated: draft_tokens must be 0", param="draft_tokens")
        self.number = number
        self.device = Device(cost)
        self.core = EngineCore(
            self.device, config, eos_ids=(), vocab_size=IDS, clock=self.device.clock, digest=digest, builder=self.device
        )
        self.book = Book(closed)
        self.book.parity = parity
        self.due = inf
        """When it has to be looked at next: a step ends then. Infinite where nothing is to be done."""
        self.busy = 0.0
        """Seconds of the steps that have ended."""
        self._at_once = at_once
        self._arrived: deque[tuple[Submit, PageChain | None]] = deque()
        self._ends: list[float] = []  # of the step that runs, and of those after it that are like it

    def give(self, request: Submit, at: float, answer: int, chain: PageChain | None = None) -> None:
        """A request arrives, whose answer consists of this token. It is taken in when the step that runs has ended.
        `chain`: see `Scheduler.take`."""
        self.advance(at)
        self.device.answers[request.request] = answer
        self.book.open(request.request, at, keep_times=True)
        self.book.add([Event(request.request, EventKind.SUBMITTED, at)])
        self._arrived.append((request, chain))
        if self._ends:
            del self._ends[1:]
            self.due = self._ends[0]
        else:
            self.device.now = at
            self._step()

    def proceed(self) -> None:
        """It is `due`: goes through all steps that have ended by then."""
        self.advance(self.due)
        self._step()

    def advance(self, to: float) -> None:
        """Goes through the steps that end before a time, which is not after `due`; whatever is asked of it then is as
        it is at that time."""
        passed = 0
        while passed < len(self._ends) - 1 and self._ends[passed] < to:
            passed += 1
        if passed:
            ends, self._ends = self._ends[:passed], self._ends[passed:]
            self.busy += ends[-1] - self.device.now
            self.book.add(self.core.repeat(ends, self.device.draw))
            self.device.now, self.device.ends = ends[-1], self._ends[0]

    @property
    def held(self) -> int:
        """Requests that it has and that have not ended."""
        return len(self.book)

    @property
    def pending(self) -> int:
        """Prompt tokens that it has yet to compute, as far as is known: none of those that wait may be cached."""
        scheduler = self.core.scheduler
        waiting = sum(r.expected for r in scheduler.waiting.values()) + sum(len(r.prompt) for r, _ in self._arrived)
        return waiting + sum(r.todo for r in scheduler.running if not r.decoding)

    def _take_in(self) -> None:
        while self._arrived:
            self.core.submit(*self._arrived.popleft())

    def _step(self) -> None:
        """The running step ends, where there is one, and the next begins, where there is anything to do."""
        if self._ends:
            self.busy += self._ends[0] - self.device.now
        news = self.core.step(self._take_in)
        if news is not None:
            ended = [output.request for output in news.outputs if output.finish is not None]
            for request in ended:
                del self.device.answers[request]
            now = self.device.now
            self.book.add([*news.events, *(Event(request, EventKind.DELIVERED, now) for request in ended)])
        if not self.core.running_step:
            assert self.core.idle, "requests are held, and nothing can be done for them"
            self._ends, self.due = [], inf
            return
        alike = self.core.steady if self._at_once else 0
        self._ends = self.device.run_on(min(alike, AT_ONCE)) if alike else [self.device.ends]
        self.due = self._ends[-1]
