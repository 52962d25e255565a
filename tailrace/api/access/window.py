"""What was used over the last minute.

A sliding window rather than a token bucket: a full bucket lets twice its limit through in a minute in which it is
emptied and fills up again, and what a bucket holds means something else once the limit is changed. Here no 60 seconds
ever see more than the limit, and what was used does not depend on what the limit was then.
"""

from __future__ import annotations

import math
from collections import deque

SECONDS = 60
"""The minute that limits are for."""


class Window:
    """Amounts (requests, or tokens) in slots of a second each; at most `SECONDS` + 1 of them. Times are of one
    monotonic clock, in seconds, and never go back. What is used at a moment counts for 60 to 61 seconds from it."""

    __slots__ = ("_slots", "_total")

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()  # [second, amount], in order
        self._total = 0

    def used(self, now: float) -> int:
        """What counts at this moment."""
        oldest = math.floor(now) - SECONDS
        slots = self._slots
        while slots and slots[0][0] < oldest:
            self._total -= slots.popleft()[1]
        return self._total

    def add(self, amount: int, now: float) -> int:
        """Uses an amount; returns its slot, for `give_back`."""
        self.used(now)
        slot = math.floor(now)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append([slot, 0])
        self._slots[-1][1] += amount
        self._total += amount
        return slot

    def give_back(self, slot: int, amount: int) -> None:
        """An amount that was used in a slot was not needed. Does nothing where that has passed."""
        for entry in reversed(self._slots):
            if entry[0] == slot:
                entry[1] -= amount
                self._total -= amount
                return

    def wait(self, amount: int, limit: int, now: float) -> float:
        """Seconds until so much more is within the limit if nothing else is used; 0 for now, infinity for never."""
        if amount > limit:
            return math.inf
        over = self.used(now) + amount - limit
        if over <= 0:
            return 0.0
        for slot, used in self._slots:
            over -= used
            if over <= 0:
                return slot + SECONDS + 1 - now
        return math.inf  # there is no such case: without all the slots, nothing is used

    def reset(self, now: float) -> float:
        """Seconds until nothing counts any more."""
        self.used(now)
        return max(0.0, self._slots[-1][0] + SECONDS + 1 - now) if self._total else 0.0
