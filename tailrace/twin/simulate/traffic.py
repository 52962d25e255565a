"""When which turn of which session is asked: open and closed loops, and turns that wait for those before them.

As the load generator (`measure.load`) does it, without its client: what is due is sent at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tailrace.workload import arrivals as arriving
from tailrace.workload.arrivals import Arrivals, Closed, Recorded
from tailrace.workload.session import Session, Turn


class Gate(Protocol):
    """Says how much load there is to be. Times are seconds since the beginning."""

    @property
    def over(self) -> bool:
        """Nothing that is still to come is of interest."""
        ...

    def more(self) -> bool:
        """Whether another session is to begin."""
        ...

    def begins(self, at: float) -> bool:
        """A session begins at that time; whether it counts."""
        ...

    def ended(self) -> None:
        """A session that counts has ended, all its turns."""
        ...

    def falls(self, at: float) -> None:
        """From now on there are fewer sessions than there were meant to be."""
        ...


class Everything:
    """A gate that lets all sessions through and counts them all."""

    over = False

    def more(self) -> bool:
        """Always."""
        return True

    def begins(self, at: float) -> bool:
        """It counts."""
        return True

    def ended(self) -> None:
        """Nothing depends on it."""

    def falls(self, at: float) -> None:
        """Likewise."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request. `at`: when it is sent. `due`: when it should have been, the same, in an open loop; None in a closed
    one, whose first turns come when there is room for them."""

    id: str
    session: Session
    number: int
    at: float
    due: float | None
    counts: bool

    @property
    def turn(self) -> Turn:
        """What is asked."""
        return self.session.turns[self.number]


@dataclass(slots=True)
class _Live:
    """A session that has begun. `ends` has when each turn that is over ended; None where it failed."""

    session: Session
    counts: bool
    open_loop: bool
    ends: dict[int, float | None]


class Traffic:
    """The caller's loop: `begin` gives the first requests, `arrived` and `ended` those that follow from what has
    happened; each is to be sent at its time. `abandoned` is told of those that never are, because one that they build
    on has failed."""

    def __init__(
        self,
        sessions: Iterator[Session],
        arrivals: Arrivals,
        *,
        seed: int = 0,
        gate: Gate | None = None,
        abandoned: Callable[[Asked], object] = lambda _asked: None,
    ) -> None:
        self._sessions = sessions
        self._arrivals = arrivals
        self._gate: Gate = gate or Everything()
        self._abandoned = abandoned
        self._times = None if isinstance(arrivals, Closed | Recorded) else arriving.times(arrivals, seed)
        self._live: dict[int, _Live] = {}

    @property
    def over(self) -> bool:
        """As `Gate.over`."""
        return self._gate.over

    @property
    def open_loop(self) -> bool:
        """Whether sessions are due whatever becomes of those before them."""
        return not isinstance(self._arrivals, Closed)

    def begin(self) -> list[Asked]:
        """At the beginning. Raises InvalidInput where the sessions are a trace that cannot be read, as may `arrived`
        and `ended`."""
        if not isinstance(self._arrivals, Closed):
            return self._next(0.0)
        asked: list[Asked] = []
        for _ in range(self._arrivals.concurrency):
            asked += self._next(0.0)
        return asked

    def arrived(self, asked: Asked) -> list[Asked]:
        """It has been sent."""
        first = not asked.turn.after and asked.number == 0
        return self._next(asked.at) if first and not isinstance(self._arrivals, Closed) else []

    def ended(self, asked: Asked, at: float, *, ok: bool) -> list[Asked]:
        """It has been answered, or has failed."""
        live = self._live[asked.session.number]
        live.ends[asked.number] = at if ok else None
        following = self._following(live)
        if len(live.ends) == len(live.session.turns):
            del self._live[asked.session.number]
            if live.counts:
                self._gate.ended()
            if isinstance(self._arrivals, Closed):
                following += self._next(at)
        return following

    def _next(self, now: float) -> list[Asked]:
        """The turns with which the next session begins; none where there is none."""
        session = next(self._sessions, None) if self._gate.more() else None
        if session is None:
            self._gate.falls(now)
            return []
        due = self._due(session)
        at = now if due is None else due
        live = _Live(session, self._gate.begins(at), due is not None, {})
        self._live[session.number] = live
        return [self._ask(live, number, at) for number, turn in enumerate(session.turns) if not turn.after]

    def _due(self, session: Session) -> float | None:
        match self._arrivals:
            case Closed():
                return None
            case Recorded(speed):
                return (session.at or 0.0) / speed
            case _:
                assert self._times is not None
                return next(self._times)

    def _ask(self, live: _Live, number: int, at: float) -> Asked:
        name = f"{live.session.number}.{number}"
        return Asked(name, live.session, number, at, at if live.open_loop else None, live.counts)

    def _following(self, live: _Live) -> list[Asked]:
        """Turns that the latest end makes due, those that can never be sent left out."""
        following: list[Asked] = []
        latest = next(reversed(live.ends))
        for number, turn in enumerate(live.session.turns):
            if latest not in turn.after or number in live.ends or any(place not in live.ends for place in turn.after):
                continue
            ends = [end for end in (live.ends[place] for place in turn.after) if end is not None]
            if len(ends) == len(turn.after):
                following.append(self._ask(live, number, max(ends) + turn.pause))
                continue
            self._abandoned(self._ask(live, number, 0.0))
            live.ends[number] = None
            following += self._following(live)
        return following
