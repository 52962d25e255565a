"""Which test may run beside which, where the suite runs in several processes (`make unit`, pytest-xdist).

Most tests run beside any other. One that is marked `alone` measures time, CPU time or memory, or gives a server little
time for much work: it begins when the tests that run in the other processes have ended, and they wait for its end.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
DOOR, ROOM = HERE / "turns.py", HERE / "conftest.py"
"""What is locked: files that are there anyway. Whoever waits for the room to be empty keeps the door shut meanwhile, or
a stream of others could keep it out for ever."""


@contextmanager
def _locked(place: Path, kind: int) -> Iterator[None]:
    with place.open("rb") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile may still have it open


@contextmanager
def turn(*, alone: bool, door: Path = DOOR, room: Path = ROOM) -> Iterator[None]:
    """Waits for its turn, and holds it."""
    with ExitStack() as held:
        with _locked(door, fcntl.LOCK_EX):
            held.enter_context(_locked(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
