"""An engine process that starts before its settings are known: `python -m tailrace.engine.early`.

Interpreter and imports are most of an engine's start, and need no settings. So the command line starts one of these at
once, works out what is to be served meanwhile, and hands it over as the first message on their socket. Where that
closes without one the process ends. Light at import: this is the first thing that `tailrace serve` loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from socket import socket
from typing import TYPE_CHECKING

from tailrace.engine.wire import pair

if TYPE_CHECKING:
    from tailrace.engine.spec import EngineSpec
    from tailrace.engine.supervisor import EngineProcess


@dataclass(frozen=True)
class Waiting:
    """A process that waits for `hand_over`, and our end of the line to it."""

    process: subprocess.Popen[bytes]
    connection: socket


def begin() -> Waiting:
    """Starts a process that waits, in a session of its own (as `supervisor.begin` does, without importing that)."""
    ours, theirs = pair()
    with theirs:
        command = [sys.executable, "-m", "tailrace.engine.early"]
        return Waiting(subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True), ours)


def hand_over(waiting: Waiting, spec: EngineSpec) -> EngineProcess:
    """Tells the process what to serve; from here on it is an engine like any other."""
    from tailrace.engine import supervisor

    return supervisor.hand_over(waiting.process, waiting.connection, spec)


def give_up(waiting: Waiting) -> None:
    """Ends a process that got nothing to serve."""
    waiting.process.kill()
    waiting.process.wait()
    waiting.connection.close()


def _main() -> int:
    """Imports what the usual engine needs, waits to be told, and is the engine."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tailrace.engine import process

    _import_ahead()
    return process.main()


def _import_ahead() -> None:
    """What `engine.loading` will import; a failure is its to report."""
    import contextlib
    import importlib

    for name in ("engine.loading", "engine.assets", "engine.core", "models.load", "models.prepared", "backends.cpu",
                 "native._kernels"):  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(f"tailrace.{name}")


if __name__ == "__main__":
    status = _main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as in `process`
