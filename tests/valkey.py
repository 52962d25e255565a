"""Servers that speak the Redis protocol: a real one, where there is one, and a stand-in that fails as it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from bench.valkeyserver import Server, program

__all__ = ["Server", "StandIn", "needs_server", "running"]


needs_server = pytest.mark.skipif(program() is None, reason="no Valkey or Redis server is installed")


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
