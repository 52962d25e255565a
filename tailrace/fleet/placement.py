"""Which replica a request goes to: in turns, to the least loaded, or to where its prefix is cached and there is room.

A policy is asked once a request, with a view of each replica that could take it, and says which: the place in the
sequence. It may remember what it has said; it knows of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.terms import InvalidInput

PLACEMENTS = ("turns", "load", "prefix")
"""The names that `make` knows."""
SLACK = 1.25
"""Requests that a replica may have for its prefixes' sake, over the mean of all (Mirrokni et al., Consistent hashing
with bounded loads, 2018)..."""
ROOM = 2
"""...and so many more, below which there is nothing to be even about."""


@dataclass(frozen=True, slots=True)
class View:
    """One replica, as far as a placement looks. `requests`: that it has been given and that have not ended. `pending`:
    prompt tokens that it has yet to compute. `cached`: tokens of the request to be placed that it need not compute,
    as far as is known."""

    requests: int
    pending: int = 0
    cached: int = 0


class Placement(Protocol):
    """A policy."""

    looks_at_prefixes: bool
    """Whether `View.cached` is looked at, which takes time to find out."""

    def place(self, views: Sequence[View], tokens: int) -> int:
        """The place in `views`, which are at least one, of the replica for a request whose prompt has so many
        tokens."""
        ...


class Turns:
    """Round robin: each in turn, whatever it is doing."""

    looks_at_prefixes = False

    def __init__(self) -> None:
        self._next = 0

    def place(self, views: Sequence[View], tokens: int) -> int:
        """As `Placement`."""
        place = self._next % len(views)
        self._next = place + 1
        return place


class LeastLoad:
    """The one with the fewest requests, of equals the one with the least pending; of equals in turn."""

    looks_at_prefixes = False

    def __init__(self) -> None:
        self._last = -1

    def place(self, views: Sequence[View], tokens: int) -> int:
        """As `Placement`."""
        self._last = min(
            range(len(views)), key=lambda at: (views[at].requests, views[at].pending, _after(at, self._last, views))
        )
        return self._last


class Prefix:
    """The one that has the least to compute before this request's first token: what is pending there, and what of the
    prompt is not cached there.

    Replicas that have more requests than `SLACK` times the mean, and `ROOM` more, are left out: a prefix that all
    requests share does not draw all of them to one replica while the others idle, and those come to have it as well.
    Of equals the one with the fewest requests; of those in turn.
    """

    looks_at_prefixes = True

    def __init__(self) -> None:
        self._last = -1

    def place(self, views: Sequence[View], tokens: int) -> int:
        """As `Placement`."""
        most = SLACK * sum(view.requests for view in views) / len(views) + ROOM
        self._last = min(
            (at for at, view in enumerate(views) if view.requests <= most),  # one at least is not above the mean
            key=lambda at: (
                views[at].pending + max(0, tokens - views[at].cached),
                views[at].requests,
                _after(at, self._last, views),
            ),
        )
        return self._last


def _after(at: int, last: int, views: Sequence[View]) -> int:
    """How far a place is behind that of the last choice, going round."""
    return (at - last - 1) % len(views)


def make(name: str) -> Placement:
    """A new policy of that name. Raises InvalidInput."""
    if name == "turns":
        return Turns()
    if name == "load":
        return LeastLoad()
    if name == "prefix":
        return Prefix()
    raise InvalidInput(f"placement is one of {', '.join(PLACEMENTS)}, not {name!r}", param="place")
