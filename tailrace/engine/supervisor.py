"""Starting, watching and ending an engine process: what is pure about it, and the handle of one process.

Light at import (standard library only): the command line spawns the engine before anything else loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tailrace.engine.spec import EngineSpec

SOCKET_PATH_MAX = 100
"""Bytes: Unix socket addresses hold 107."""


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


@dataclass(frozen=True)
class EngineProcess:
    """One engine process and the private directory (0700) of its two sockets."""

    process: subprocess.Popen[bytes]
    directory: str
    spawned_at: float

    @property
    def up(self) -> str:
        """Address of what the engine says."""
        return f"ipc://{self.directory}/up"

    @property
    def down(self) -> str:
        """Address of what the engine is told."""
        return f"ipc://{self.directory}/down"

    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self.process.poll()

    def kill(self) -> None:
        """Ends it at once, stopped or not, reaps it and removes its directory. May be called again."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def private_directory() -> str:
    """A new directory that only this user can enter, with a path short enough for a Unix socket."""
    path = tempfile.mkdtemp(prefix="tailrace-")
    if len(os.fsencode(path)) > SOCKET_PATH_MAX - len("/down"):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="tailrace-", dir="/tmp")
    return path


def spawn(spec: EngineSpec, *, python: Sequence[str] = (sys.executable,)) -> EngineProcess:
    """Starts an engine process and returns at once. It connects to its sockets when it needs them, so they may be
    bound later. It is in a session of its own: a terminal's Ctrl-C reaches the parent alone, which decides."""
    directory = private_directory()
    now = time.monotonic()
    command = [
        *python,
        "-m",
        "tailrace.engine.process",
        json.dumps(asdict(spec)),
        directory,
        str(os.getpid()),
        repr(now),
    ]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return EngineProcess(process, directory, now)


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
