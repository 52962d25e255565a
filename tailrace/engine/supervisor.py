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
from typing import Protocol

import msgspec

from tailrace.engine.spec import EngineSpec
from tailrace.engine.wire import frame, pair


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
    hang: float = 30.0  # longest standstill while requests are held
    start: float = 300.0  # longest from spawn to ready


@dataclass
class Pulse:
    """What is known of an engine's life; all times monotonic. `moved_at` is when progress last grew, or when the first
    held request was handed over, whichever is later."""

    spawned_at: float
    ready_at: float | None = None
    beat_at: float = 0.0
    progress: int = -1
    moved_at: float = 0.0

    def beat(self, now: float, progress: int | None = None) -> None:
        """A sign of life; `progress` where it came with one."""
        self.beat_at = now
        if progress is not None and progress != self.progress:
            self.progress, self.moved_at = progress, now

    def verdict(self, now: float, bounds: Bounds, *, held: bool) -> str | None:
        """What is wrong with the engine, in words, or None where nothing is."""
        if self.ready_at is None:
            late = now - self.spawned_at > bounds.start
            return f"the engine was not ready within {bounds.start:g} s" if late else None
        if now - self.beat_at > bounds.heartbeat:
            return f"the engine gave no heartbeat for {now - self.beat_at:.1f} s"
        if held and now - self.moved_at > bounds.hang:
            return f"the engine held requests without progress for {now - self.moved_at:.1f} s"
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
