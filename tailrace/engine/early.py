"""An engine process that starts before its settings are known.

Imports are most of an engine's start, and need no settings. So the command line starts one of these at once, works out
what is to be served meanwhile, and hands it over as the first message on their socket. Where that closes without one
the process ends. There are two ways to start it: `fork` is a copy of this process, which has imported already what both
need, and `begin` a new interpreter (`python -m tailrace.engine.early`). Light at import: this is the first thing that
`tailrace serve` loads.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.engine.wire import pair

if TYPE_CHECKING:
    from collections.abc import Iterable
    from socket import socket

    from tailrace.engine.spec import EngineSpec
    from tailrace.engine.supervisor import Child, EngineProcess

SHARED = ("engine.assets", "engine.protocol", "models.entry")
"""What both processes import, and what that imports."""
ENGINE = (
    "engine.process", "engine.loading", "engine.core", "models.load", "models.prepared", "backends.cpu",
    "native._kernels",
)  # fmt: skip
"""What `engine.loading` will import."""


@dataclass(frozen=True)
class Waiting:
    """A process that waits for `hand_over`, and our end of the line to it."""

    process: Child
    connection: socket


class Forked:
    """A child that `os.fork` made: what a supervisor needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Does nothing once it has been reaped: its id may be another process's by then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # SIGCHLD is ignored here, so the system has reaped it; with what code is lost
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def begin() -> Waiting:
    """Starts a new interpreter that waits."""
    from tailrace.engine import supervisor

    return Waiting(*supervisor.begin("tailrace.engine.early"))


def fork(*, blas: bool = False) -> Waiting:
    """Starts a copy of this process that waits, in a session of its own. Only for a process that has a single thread
    and holds nothing that a copy must not have: a command line that has only just begun. `blas`: the engine is going to
    compute with numpy."""
    _import(SHARED)
    ours, theirs = pair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Waiting(Forked(pid), ours)
    status = 1
    try:
        os.setsid()
        ours.close()
        line = theirs.detach()
        if line != 0:  # it is, where standard input was closed
            os.dup2(line, 0)
            os.close(line)
        status = _main(blas=blas)
    except BaseException:  # noqa: BLE001 - what is above on the stack is the parent's
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(status)
    raise AssertionError("unreachable")


def hand_over(waiting: Waiting, spec: EngineSpec) -> EngineProcess:
    """Tells the process what to serve; from here on it is an engine like any other."""
    from tailrace.engine import supervisor

    return supervisor.hand_over(waiting.process, waiting.connection, spec)


def give_up(waiting: Waiting) -> None:
    """Ends a process that got nothing to serve."""
    import signal

    waiting.process.send_signal(signal.SIGKILL)
    waiting.process.wait()
    waiting.connection.close()


def _main(*, blas: bool) -> int:
    """Imports what the usual engine needs, waits to be told, and is the engine."""
    import gc
    import signal

    gc.disable()  # nothing that start-up makes is garbage worth looking for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not blas:  # its threads would only spin, for work that never comes
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _import(ENGINE)
    from tailrace.engine import process

    return process.main()


def _import(names: Iterable[str]) -> None:
    """Imports modules ahead of their use; a failure is for their user to report."""
    import contextlib
    import importlib

    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"tailrace.{name}")


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as in `process`


if __name__ == "__main__":
    _leave(_main(blas=True))  # it may be
