"""Which sessions of a load are measured, when there have been enough, and over which time rates are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tailrace.workload.arrivals import Arrivals


@dataclass(frozen=True)
class Plan:
    """How much is measured: `sessions`, or those that begin within `seconds`; both None takes all there are. Before
    that come `warmup` sessions, or those of the first `warmup_seconds`. `timeout` is for a whole request. `sustain`:
    whether the load goes on until the last measured request has ended."""

    arrivals: Arrivals
    sessions: int | None = None
    seconds: float | None = None
    warmup: int = 0
    warmup_seconds: float = 0.0
    timeout: float = 600.0
    sustain: bool = True
    seed: int = 0


class Counting:
    """Counts the sessions of a plan, in the order in which they begin. Times are seconds since the load began."""

    def __init__(self, plan: Plan, on_over: Callable[[], object] = lambda: None) -> None:
        self.over = False
        """Every measured session has ended, and no more will begin."""
        self.begun: float | None = None
        """When the first measured one began."""
        self._plan = plan
        self._on_over = on_over
        self._number = 0
        self._outstanding = 0
        self._complete = False  # no more measured sessions will begin
        self._idle_from: float | None = None

    def more(self) -> bool:
        """Whether another session is needed."""
        return self._plan.sustain or not self._complete

    def begins(self, at: float) -> bool:
        """A session begins at that time. Whether it is measured."""
        plan, number = self._plan, self._number
        self._number += 1
        late = number >= plan.warmup and at >= plan.warmup_seconds
        if late and self.begun is None:
            self.begun = at
        first = self.begun if self.begun is not None else at
        over_time = plan.seconds is not None and at >= first + plan.seconds
        left = math.inf if plan.sessions is None else plan.warmup + plan.sessions - number
        if over_time or left <= 0:
            late = False
            self.enough()
        elif left == 1:
            self._complete = True  # this is the last
        self._outstanding += late
        return late

    def enough(self) -> None:
        """No more measured sessions will begin."""
        self._complete = True
        self._look()

    def ended(self) -> None:
        """A measured session has ended."""
        self._outstanding -= 1
        self._look()

    def falls(self, at: float) -> None:
        """There is no session left: from now on the load is no longer what it was meant to be."""
        self._complete = True
        if self._idle_from is None:
            self._idle_from = at

    def window(self, now: float) -> tuple[float, float]:
        """From the first measured session until the load falls; until the end, `now`, where it fell at once."""
        begin = self.begun if self.begun is not None else 0.0
        end = self._idle_from if self._idle_from is not None else now
        return (begin, end) if end - begin > (now - begin) / 2 else (begin, now)

    def _look(self) -> None:
        if self._complete and not self._outstanding and not self.over:
            self.over = True
            self._on_over()
