"""Starting, watching and ending an engine process: what is pure about it, and the handle of one process.

Light at import: the command line starts the engine before anything else loads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from socket import socket
from typing import TYPE_CHECKING, Protocol

import msgspec

from tailrace.engine.spec import EngineSpec
from tailrace.engine.wire import frame, pair

if TYPE_CHECKING:
    from tailrace.engine.protocol import Heartbeat

LONGEST_BEAT = 1.0
"""Seconds between two heartbeats that count at most: where a process or the machine was stopped in between, that was
not the engine."""
PATIENCE = 4.0
"""How much longer than the longest standstill that has ended by itself another one may take."""
HALF_LIFE = 300.0
"""Seconds after which half of that has been forgotten."""


@dataclass
class Backoff:
    """How soon a dead engine is started again: at once the first time, then `first` seconds, doubling up to `most`.
    An engine that lived for `stable` seconds clears the count; in the long run that is one start in `most` seconds."""

    first: float = 1.0
    most: float = 30.0
    stable: float = 60.0
    deaths: int = 0

    def died(self, lived: float) -> float:
        """Seconds to wait before the next start, for an engine that was ready for `lived` seconds."""
        if lived >= self.stable:
            self.deaths = 0
        self.deaths += 1
        return 0.0 if self.deaths == 1 else min(self.most, self.first * 2.0 ** min(self.deaths - 2, 30))


@dataclass(frozen=True)
class Bounds:
    """What counts as alive, in seconds."""

    heartbeat: float = 3.0  # oldest heartbeat
    stuck: float = 4.0  # longest that a busy engine shows no sign of work
    hang: float = 30.0  # longest standstill while requests are held
    start: float = 300.0  # longest from spawn to ready


@dataclass
class Pulse:
    """What is known of an engine's life; all times monotonic.

    `stood` is for how long no work has been done (since the first held request was handed over), `stuck` for how long
    the engine has also been busy all the time with one thing. Both are counted in heartbeats, each of them for
    `LONGEST_BEAT` at most: an engine that stood still with the whole machine was not stuck. How long it may be stuck
    comes from how long it has been before (`longest`): where a piece of work takes seconds, an engine is given many."""

    spawned_at: float
    ready_at: float | None = None
    beat_at: float = 0.0
    stood: float = 0.0
    stuck: float = 0.0
    longest: float = 0.0
    last: Heartbeat | None = None

    def moved(self, now: float) -> None:
        """Work has been done."""
        self.beat_at, self.stood = now, 0.0
        self._went_on()

    def beat(self, now: float, heartbeat: Heartbeat | None = None) -> None:
        """A sign of life."""
        self.beat_at = now
        if heartbeat is None:
            return
        last, self.last = self.last, heartbeat
        if last is None:
            return
        took = heartbeat.at - last.at
        self.stood += min(took, LONGEST_BEAT)
        if (heartbeat.progress, heartbeat.work) != (last.progress, last.work):
            self.moved(now)
        elif not heartbeat.busy or heartbeat.turns != last.turns:
            self._went_on()
        elif heartbeat.work >= 0:
            self.stuck += min(took, LONGEST_BEAT)
        self.longest *= 0.5 ** (took / HALF_LIFE)

    def _went_on(self) -> None:
        self.longest = max(self.longest, self.stuck)
        self.stuck = 0.0

    def successor(self, spawned_at: float) -> Pulse:
        """Of the engine that comes after this one. If this one was ended in the midst of something, that may only have
        been slow: the next is given longer."""
        return Pulse(spawned_at, longest=max(self.longest, self.stuck))

    def patience(self, bounds: Bounds) -> float:
        """Seconds that a busy engine may show no sign of work."""
        return max(bounds.stuck, min(bounds.hang, PATIENCE * self.longest))

    def verdict(self, now: float, bounds: Bounds, *, held: bool) -> str | None:
        """What is wrong with the engine, in words, or None where nothing is."""
        if self.ready_at is None:
            late = now - self.spawned_at > bounds.start
            return f"the engine was not ready within {bounds.start:g} s" if late else None
        if now - self.beat_at > bounds.heartbeat:
            return f"the engine gave no heartbeat for {now - self.beat_at:.1f} s"
        if self.stuck >= self.patience(bounds):
            return f"the engine made no progress in a step for {self.stuck:.1f} s"
        if held and self.stood > bounds.hang:
            return f"the engine held requests without progress for {self.stood:.1f} s"
        return None


class Child(Protocol):
    """A child process: `subprocess.Popen`, or one that was forked (`early.Forked`)."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class EngineProcess:
    """One engine process and our end of the line to it (see `wire`)."""

    process: Child
    connection: socket
    spawned_at: float

    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self.process.poll()

    def kill(self) -> None:
        """Ends it at once, stopped or not, and reaps it. May be called again."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.connection.close()


def begin(module: str, *, python: Sequence[str] = (sys.executable,)) -> tuple[Child, socket]:
    """Starts an engine process, which waits for `hand_over`. It is in a session of its own: a terminal's Ctrl-C reaches
    the parent alone, which decides."""
    import subprocess

    ours, theirs = pair()
    try:
        process = subprocess.Popen([*python, "-m", module], stdin=theirs.fileno(), start_new_session=True)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def hand_over(process: Child, connection: socket, spec: EngineSpec) -> EngineProcess:
    """Tells a process that has begun what to serve. One that has ended by now is handed over all the same: whoever
    supervises it notices."""
    now = time.monotonic()
    start = {"spec": spec, "parent": os.getpid(), "spawned_at": now}
    with contextlib.suppress(ConnectionError):
        connection.sendall(frame(msgspec.json.encode(start)))
    return EngineProcess(process, connection, now)


def spawn(spec: EngineSpec, *, python: Sequence[str] = (sys.executable,)) -> EngineProcess:
    """Starts an engine process and returns at once."""
    return hand_over(*begin("tailrace.engine.process", python=python), spec)


def death_notice(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "it was still running"
    if code < 0:
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"
    return f"it exited with status {code}"
