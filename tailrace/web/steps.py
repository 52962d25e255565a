"""The engine's last steps: who was in each, with how many tokens.

What a step tells of itself is kept as it came, a reference each; it is only looked into when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

import msgspec

from tailrace.terms import Event, EventKind

KEPT = 512
"""Steps that are remembered."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one request had of a step: `prefill` tokens of its prompt, `decode` tokens of its answer (or both, at its
    prompt's end); none where it was `stalled`, which says why. `who` is a place in the list of names beside."""

    who: int
    prefill: int
    decode: int
    stalled: str = ""


class Step(msgspec.Struct, frozen=True):
    """`number` rises by one or more from each step to the next. `begin` in seconds since 1970; `seconds` it took."""

    number: int
    begin: float
    seconds: float
    parts: list[Part]


class Steps(msgspec.Struct, frozen=True):
    """Steps in order, and the names that their parts mean. `last`: the number to go on from."""

    steps: list[Step]
    names: list[str]
    last: int


class Recent:
    """The last steps. `add` is a listener of the engine's client."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept: deque[tuple[int, Sequence[Event]]] = deque(maxlen=kept)
        self._number = 0

    def add(self, events: Sequence[Event]) -> None:
        """The events of one message, and so of at most one step."""
        self._number += 1
        self._kept.append((self._number, events))

    def snapshot(self) -> Recent:
        """The same, which nothing is added to: for another thread to look into."""
        made = Recent(self._kept.maxlen or KEPT)
        made._kept.extend(self._kept)
        made._number = self._number
        return made

    def after(self, number: int, clock: float) -> Steps:
        """Those that came after this one. `clock`: what the wall clock says at monotonic time 0."""
        names: dict[str, int] = {}
        found: list[Step] = []
        for own, events in self._kept:
            if own > number:
                for begin, at, parts in _divided(events, names):
                    found.append(Step(own, round(clock + begin, 6), round(at - begin, 6), parts))
        return Steps(found, list(names), self._number)

    def knows(self, name: str) -> bool:
        """Whether an answer with this id, or a choice of it, was in one of them."""
        return any(
            event.request.startswith(name) and name in (event.request, event.request.partition(".")[0])
            for _, events in self._kept
            for event in events
        )

    def of(self, request: str, received: float) -> list[tuple[float, float, Part]]:
        """One request's share of each step: begin and end in seconds since it was received."""
        made = []
        for _, events in self._kept:
            own = [event for event in events if event.request == request]
            for begin, at, parts in _divided(own, {}):
                made.append((round(begin - received, 6), round(at - received, 6), parts[0]))
        return made


def _divided(events: Sequence[Event], names: dict[str, int]) -> list[tuple[float, float, list[Part]]]:
    """(begin, end, parts) of each step among the events. Requests that have no number in `names` yet get one."""
    of_steps = [event for event in events if event.kind in (EventKind.CHUNK, EventKind.TOKEN, EventKind.STALLED)]
    made = []
    for (begin, at), same in groupby(of_steps, key=lambda event: (event.begin, event.at)):
        shares: dict[str, tuple[int, int, str]] = {}
        for event in same:
            prefill, decode, stalled = shares.get(event.request, (0, 0, ""))
            if event.kind is EventKind.STALLED:
                stalled = event.cause or "stalled"
            elif event.kind is EventKind.CHUNK:
                prefill, decode = prefill + event.computed, decode + (0 if event.computed else event.rows)
            else:
                decode += event.computed
            shares[event.request] = (prefill, decode, stalled)
        made.append((begin, at, [Part(names.setdefault(who, len(names)), *share) for who, share in shares.items()]))
    return made
