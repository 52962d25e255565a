"""A server that was started here: waited for until it is ready, watched, suspended, and ended with all its processes.

Nothing of it is left, whatever happens to who started it: a `with` block ends it on any error and on Ctrl-C; should
this process be killed, a shell that waits for that kills the server's process group.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.deploy import ports, processes
from tailrace.deploy.engines.driver import Command, Driver, Options
from tailrace.deploy.interrupts import deferred
from tailrace.terms import InvalidInput, TailraceError

START_LIMIT = 600.0
"""Seconds that a server may take to get ready: a large model may have to be read from a slow disk."""
PATIENCE = 15.0
"""Seconds between SIGTERM and SIGKILL."""
ATTEMPTS = 3
"""Ports that are tried, where another program takes the one that was free a moment ago."""
LAST = 10.0
"""Seconds that SIGKILL may take to take effect."""
PROBE = 2.0
"""Seconds that one question for its health may take."""
TAIL = 15
"""Lines of the log that an error quotes."""

MOST_LOG = 1_000_000
"""Characters of a log that are searched for its first error."""
_ERROR = re.compile(r"\b\w*(?:Error|Exception): \S.*")

_GUARD = 'read -r _ || kill -s KILL -- "-$1"'
"""Ends with the first line that it reads, or, where its input ends before, kills the group."""


class StartFailed(TailraceError):
    """A server ended, or did not get ready in time; the message has the last lines of its log."""


class _PortTaken(Exception):
    pass


class Replica:
    """A running server. `ready_after`: seconds from its start until it was ready. Use as a context manager, or call
    `stop`."""

    def __init__(self, command: Command, log: Path | None = None) -> None:
        """Starts the process and waits for nothing. `log` gets what it prints; by default a new file for temporary
        ones. Raises InvalidInput where that cannot be written, StartFailed where the command cannot be run."""
        self.command = command
        self.model = command.served
        self.url = f"http://127.0.0.1:{command.port}"
        self.log = log if log is not None else _temporary(command.name)
        self.ready_after: float | None = None
        self.suspended = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._ended = True
        try:
            with deferred():
                self._begin()
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        output = _open_log(self.log, self.command)
        try:
            self.started_at = time.monotonic()
            self._process = _spawn(self.command, output)
            self._root = processes.member(self.pid)
            self._ended = False
            self._guard = _guard(self.pid)
        finally:
            os.close(output)

    @classmethod
    def start(
        cls, command: Callable[[int], Command], *, log: Path | None = None, limit: float = START_LIMIT
    ) -> Replica:
        """Starts a server on a free port and returns once it is ready; `command` makes the command line for a port.
        Raises StartFailed, and what `Replica` raises."""
        for attempt in range(ATTEMPTS):
            replica = cls(command(ports.free()), log)
            try:
                replica.wait_ready(limit)
            except _PortTaken:
                replica.stop()
                if attempt == ATTEMPTS - 1:
                    raise StartFailed(replica._told("found its port taken by others, again and again")) from None
            except BaseException:
                replica.stop()
                raise
            else:
                return replica
        raise AssertionError

    @property
    def pid(self) -> int:
        """Of its first process, which leads a session and process group of its own."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def wait_ready(self, limit: float) -> None:
        """Returns once its health is good, at most `limit` seconds after its start. Raises StartFailed."""
        said = "nothing answers"
        while True:
            took = time.monotonic() - self.started_at
            if not self.alive:
                if self._port_taken():
                    raise _PortTaken
                raise StartFailed(self._told(f"ended with {_status(self._process.returncode)} before it was ready"))
            said = self._health() or ""
            if not said:
                self.ready_after = time.monotonic() - self.started_at
                return
            if took > limit:
                raise StartFailed(self._told(f"was not ready within {limit:g} s ({said})"))
            time.sleep(max(0.005, min(0.5, took / 100)))  # so that the time is known to a hundredth of it

    def rss(self) -> int | None:
        """Bytes of memory that its processes hold (`processes.rss`); None where the system does not tell."""
        return processes.rss(self._root)

    def cpu_seconds(self) -> float | None:
        """Processor time of its processes so far; None where the system does not tell."""
        return processes.cpu_seconds(self._root)

    def suspend(self) -> None:
        """Stops its processes where they are (SIGSTOP): they keep their memory and take no time."""
        self.suspended = True
        for _ in range(2):  # again, for what one of them started meanwhile
            processes.send(processes.tree(self._root), signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        processes.send(processes.tree(self._root), signal.SIGCONT)
        self.suspended = False

    def stop(self, patience: float = PATIENCE) -> None:
        """Ends it: SIGTERM to its first process, and after `patience` seconds, or at a second Ctrl-C, SIGKILL to all
        that is left. Ctrl-C takes effect when this is over. May be called again."""
        with deferred() as interrupts:
            if self._ended:
                return
            members = processes.tree(self._root)
            if self.alive:
                self._process.terminate()
                processes.send(members, signal.SIGCONT)
                end = time.monotonic() + patience
                while self.alive and time.monotonic() < end and len(interrupts) < 2:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(0.05)
            self._kill(members)
            self._ended = True
            if self._guard is not None:
                _dismiss(self._guard)

    def _kill(self, members: Sequence[processes.Member]) -> None:
        """Those, and whatever else is left of the tree."""
        end = time.monotonic() + LAST
        while time.monotonic() < end:
            if self.alive:
                self._process.kill()
            left = processes.alive({*members, *processes.tree(self._root)})
            processes.send(left, signal.SIGKILL)
            if not left and not self.alive:
                return
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def last_lines(self) -> str:
        """The end of its log."""
        return self._tail(TAIL)

    def _port_taken(self) -> bool:
        port = self.command.port
        others = ports.taken(port) and not processes.listens(self._root, port)
        return others or "address already in use" in self._tail(50).lower()

    def _health(self) -> str | None:
        """Why it is not ready; None where it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.command.port, timeout=PROBE)
        try:
            connection.request("GET", self.command.health)
            status = connection.getresponse().status
        except ConnectionRefusedError:
            return "nothing answers"
        except (OSError, http.client.HTTPException) as error:
            return f"{self.command.health} gives no answer: {error or type(error).__name__}"
        finally:
            connection.close()
        if status != 200:
            return f"{self.command.health} answers {status}"
        if not processes.listens(self._root, self.command.port):
            return "another program answers at its port"
        return None

    def _told(self, what: str) -> str:
        lines = self.last_lines()
        cause = self._first_error()
        if cause and cause not in lines:
            what = f"{what} ({cause})"
        words = f"The last lines of its log ({self.log}):\n{lines}" if lines else f"Its log ({self.log}) is empty."
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.log)
            if not disk.f_bavail:
                words = f"The disk of its log is full. {words}"
        return f"{self.command.name} {what}. {words}"

    def _first_error(self) -> str:
        """The first line of its log that names an error: what comes after it is often only its consequence."""
        with contextlib.suppress(OSError), self.log.open(errors="replace") as file:
            file.readline()
            for line in file.read(MOST_LOG).splitlines():
                if found := _ERROR.search(line):
                    return found[0][:500]
        return ""

    def _tail(self, lines: int) -> str:
        """What it has said after the line with its command."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.readline()
            begin = file.tell()
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - 500 * lines))
            said = file.read().decode(errors="replace").strip().splitlines()
            return "\n".join(f"  {line[:500]}" for line in said[-lines:])
        return ""


def serve(
    driver: Driver, options: Options, *, given: str | None = None, log: Path | None = None, limit: float = START_LIMIT
) -> Replica:
    """Starts an engine's server and returns once it is ready. `given` is where the engine is, if that is not to be
    looked for. Raises NotFound, StartFailed, and InvalidInput for what the engine cannot do."""
    unfit = driver.unfit(options.model)
    if unfit is not None:
        raise InvalidInput(f"{driver.name} cannot serve that model: {unfit}", param="model")
    return Replica.start(partial(driver.command, driver.find(given), options), log=log, limit=limit)


def _spawn(command: Command, output: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **command.env}
    try:
        return subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={name: value for name, value in environment.items() if value is not None},
        )  # fmt: skip
    except OSError as error:
        raise StartFailed(f"{command.name} cannot be run: {command.argv[0]}: {error.strerror}") from error


def _guard(group: int) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C at the terminal is not for it."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(group)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    """What it guards has ended."""
    assert guard.stdin is not None
    with contextlib.suppress(OSError):
        guard.stdin.write(b"done\n")
        guard.stdin.close()
    try:
        guard.wait(LAST)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _temporary(name: str) -> Path:
    handle, path = tempfile.mkstemp(f".{name}.log", "tailrace-")
    os.close(handle)
    return Path(path)


def _open_log(path: Path, command: Command) -> int:
    """The log, whose first line is the command: a disk that is full is noticed before a server is."""
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    try:
        try:
            handle = os.open(path, how, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            handle = os.open(path, how, 0o600)
        try:
            os.write(handle, f"$ {shlex.join(command.argv)}\n".encode())
        except BaseException:
            os.close(handle)
            raise
    except OSError as error:
        raise InvalidInput(f"the log {path} cannot be written: {error.strerror}", param="logs") from error
    return handle


def _status(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
