"""Replicas, a placement and traffic, run through in the order of time."""

from __future__ import annotations

import gc
import heapq
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import cast

from tailrace.backends import PAGE_SIZE
from tailrace.engine.config import EngineConfig
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.fleet.placement import Placement, View
from tailrace.kv.prefix import PageChain
from tailrace.ledger.timeline import Timeline
from tailrace.terms import InvalidInput
from tailrace.twin.simulate.cost import StepCost
from tailrace.twin.simulate.prompts import Prompts
from tailrace.twin.simulate.replica import Replica
from tailrace.twin.simulate.traffic import Asked, Traffic

MOST_REPLICAS = 4096


@dataclass(frozen=True)
class Answered:
    """One request, where it went, and what became of it: its timeline, as the ledger folds it. `ended` False: it was
    still running when the rest was of no interest any more."""

    asked: Asked
    replica: int
    timeline: Timeline
    ended: bool = True


class Fleet:
    """`count` equal replicas. `run` once. `parity`, `at_once`: see `Replica`."""

    def __init__(
        self,
        count: int,
        config: EngineConfig,
        cost: StepCost,
        placement: Placement,
        *,
        parity: float = 0.0,
        at_once: bool = True,
    ) -> None:
        if not 1 <= count <= MOST_REPLICAS:
            raise InvalidInput(f"a fleet has 1 to {MOST_REPLICAS} replicas, not {count}", param="replicas")
        self.now = 0.0
        self._placement = placement
        self._prompts = Prompts()
        self._open: dict[str, tuple[Asked, Replica]] = {}
        self._closed: list[Timeline] = []
        self.replicas = [
            Replica(number, config, cost, self._closed.append, parity=parity, at_once=at_once)
            for number in range(count)
        ]
        self._events: list[tuple[float, bool, int, Asked | Replica]] = []  # time, a replica's, number
        self._number = 0

    def run(self, traffic: Traffic, observe: Callable[[Answered], object]) -> None:
        """Until there is nothing more to come, or traffic says that it is over; `observe` is told of each request as it
        ends, in the end of those that have not. Where something arrives when a step ends, it has arrived before."""
        with _few_collections():
            for asked in traffic.begin():
                self._push(asked.at, asked)
            while self._events and not traffic.over:
                at, _, _, what = heapq.heappop(self._events)
                if isinstance(what, Asked):
                    self.now = at
                    self._place(what)
                    following = traffic.arrived(what)
                elif what.due != at:
                    continue
                else:
                    self.now = at
                    what.proceed()
                    self._push(what.due, what)
                    following = []
                for timeline in self._taken():
                    asked, replica = self._open.pop(timeline.request)
                    observe(Answered(asked, replica.number, timeline))
                    following += traffic.ended(asked, self.now, ok=timeline.finish == "length")
                for asked in following:
                    self._push(asked.at, asked)
        for asked, replica in self._open.values():
            replica.advance(self.now)
            fold = replica.book.fold(asked.id)
            assert fold is not None
            observe(Answered(asked, replica.number, fold.timeline(self.now), ended=False))

    def _push(self, at: float, what: Asked | Replica) -> None:
        if at < inf:
            self._number += 1
            heapq.heappush(self._events, (at, isinstance(what, Replica), self._number, what))

    def _taken(self) -> list[Timeline]:
        closed = self._closed[:]
        self._closed.clear()
        return closed

    def _place(self, asked: Asked) -> None:
        prompt = self._prompts.prompt(asked.session, asked.number)
        ids = cast("list[int]", prompt)  # a sequence of the same numbers, at an eighth of the memory
        request = Submit(asked.id, ids, SamplingParams(max_tokens=asked.turn.output, ignore_eos=True))
        chain = self._chain(request, prompt) if self._placement.looks_at_prefixes else None
        views = [self._view(replica, chain, len(prompt)) for replica in self.replicas]
        replica = self.replicas[self._placement.place(views, len(prompt))]
        self._open[asked.id] = (asked, replica)
        replica.give(request, self.now, self._prompts.answer(asked.session, asked.number), chain)
        self._push(replica.due, replica)

    def _chain(self, request: Submit, prompt: array[int]) -> PageChain | None:
        """The identities of a prompt's pages, which are the same on all replicas; None where nothing is cached."""
        chain = self.replicas[0].core.scheduler.chain(request)
        if chain is not None:
            chain.extend(prompt.tobytes())
        return chain

    def _view(self, replica: Replica, chain: PageChain | None, tokens: int) -> View:
        if chain is None:
            return View(replica.held, replica.pending)
        replica.advance(self.now)
        found = replica.core.scheduler.index.match(chain, (tokens - 1) // PAGE_SIZE)
        return View(replica.held, replica.pending, PAGE_SIZE * len(found))


@contextmanager
def _few_collections() -> Iterator[None]:
    """Much is made and little of it in circles: fewer garbage collections, over what is made now alone."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
