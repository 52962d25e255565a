"""The line between the API process and an engine process: one Unix stream socket, made as a pair before the engine is
started and inherited by it, so it has no name that another process could connect to and nothing to clean up.

A frame is its length (4 bytes, little-endian) and one message. The engine's end blocks (`Line`): when the API process
does not keep up, the engine waits, and the kernel's socket buffer is the bound of what is on its way. The API's end
(`Peer`) never blocks: what the engine does not take yet waits here, bounded by the requests that may be in flight.
Either end sees the other's death as the end of the stream. Light at import: the command line starts engines first.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

LENGTH = struct.Struct("<I")
ROOM = 1 << 16
"""Bytes that are read at once."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Ours and theirs."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def frame(message: bytes) -> bytes:
    """A message with its length before it."""
    return LENGTH.pack(len(message)) + message


class Splitter:
    """Bytes as they come to whole messages."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def split(self, data: memoryview) -> Iterator[memoryview | bytes]:
        """The messages that these bytes complete; views are valid until the buffer behind `data` is written again."""
        size = len(data)
        if not self._rest and size > LENGTH.size and LENGTH.unpack_from(data)[0] == size - LENGTH.size:
            yield data[LENGTH.size :]  # the usual case: one whole message
            return
        self._rest += data
        at, rest = 0, self._rest
        messages = []
        while len(rest) - at >= LENGTH.size:
            end = at + LENGTH.size + LENGTH.unpack_from(rest, at)[0]
            if end > len(rest):
                break
            messages.append(bytes(rest[at + LENGTH.size : end]))
            at = end
        del rest[:at]
        yield from messages


class Line:
    """The engine's end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._splitter = Splitter()
        self._messages: deque[bytes] = deque()
        self._buffer = memoryview(bytearray(ROOM))
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    @staticmethod
    def inherited() -> Line:
        """The end that this process was started with, as its standard input, which is closed for everybody else."""
        connection = socket.socket(fileno=os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return Line(connection)

    def send(self, message: bytes) -> None:
        """Hands a message over; waits while the other side does not read. Raises ConnectionError when it is gone."""
        data = LENGTH.pack(len(message)) + message
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> bytes | None:
        """The next message; blocks until there is one. None when the other side is gone."""
        while not self._messages:
            self._readable.poll()  # recv alone also wakes whenever the other side takes something off the line
            try:
                size = self._socket.recv_into(self._buffer)
            except OSError:  # the other side was killed, or this end is being closed
                size = 0
            if not size:
                return None
            self._messages.extend(map(bytes, self._splitter.split(self._buffer[:size])))
        return self._messages.popleft()

    def close(self) -> None:
        """Ends the stream once all that was sent has been handed to the kernel, which delivers it."""
        self._socket.close()


class Peer:
    """The API's end, on an asyncio loop. `on_message` is called for each message, with a view that it must not keep."""

    def __init__(
        self,
        connection: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[memoryview | bytes], None],
    ) -> None:
        self._socket = connection
        self._loop = loop
        self._on_message = on_message
        self._splitter = Splitter()
        self._waiting: deque[memoryview] = deque()
        self._buffer = memoryview(bytearray(ROOM))
        self._open = True
        connection.setblocking(False)
        self._fd = connection.fileno()
        loop.add_reader(self._fd, self.read)

    def send(self, message: bytes) -> bool:
        """Sends a message now or as soon as the engine takes it. False where there is nobody to take it."""
        if not self._open:
            return False
        data = memoryview(frame(message))
        if not self._waiting:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:  # the engine is gone: `read` and its supervisor will see that
                return False
            if not data:
                return True
            self._loop.add_writer(self._fd, self._flush)
        self._waiting.append(data)
        return True

    def _flush(self) -> None:
        waiting = self._waiting
        try:
            while waiting:
                waiting[0] = waiting[0][self._socket.send(waiting[0]) :]
                if waiting[0]:
                    return
                waiting.popleft()
        except BlockingIOError:
            return
        except OSError:
            waiting.clear()
        self._loop.remove_writer(self._fd)

    def read(self) -> None:
        """Takes in what has arrived."""
        while self._open:
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:
                self._loop.remove_reader(self._fd)  # the end; what it means is for the supervisor to say
                return
            for message in self._splitter.split(self._buffer[:size]):
                self._on_message(message)
            if size < ROOM:
                return

    def close(self) -> None:
        """Closes the socket: the engine sees the end of the stream."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._socket.close()
