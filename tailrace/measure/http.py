"""A lean HTTP/1.1 client: one request a connection at a time, bytes handed on in the moment in which they come.

Nothing is awaited between a request and the end of its answer: what comes is read in the event loop's callback, where
its time is taken. (Where a task is woken for every piece, times are those at which the task got to run.)
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from time import perf_counter
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from tailrace.terms import InvalidInput, TailraceError


def more_files() -> None:
    """As many connections as the system lets one process have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Broken(TailraceError):
    """The connection could not be made, or broke before the answer was complete. `early`: before any of it came."""

    def __init__(self, message: str, *, early: bool = False, connected: bool = True) -> None:
        super().__init__(message)
        self.early = early
        self.connected = connected


class Answer(Protocol):
    """What takes an answer as it comes. Times are of `time.perf_counter`."""

    def wrote(self, at: float, connecting: float) -> None:
        """The whole request was written, after so many seconds of waiting for a connection."""

    def head(self, status: int, at: float) -> None:
        """Status line and headers have come."""

    def body(self, data: bytes, at: float) -> None:
        """Some more of the body has come."""


class Pool:
    """Connections to one server. `key` is sent as a bearer token. Raises InvalidInput for what is no address."""

    def __init__(self, url: str, *, key: str | None = None, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000", param="url")
        self._host, secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if secure else 80)
        self._tls = ssl.create_default_context() if secure else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._address: str | None = None
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "Content-Type": "application/json"}
        if key:
            lines["Authorization"] = f"Bearer {key}"
        head = "".join(f"{name}: {value}\r\n" for name, value in (lines | (headers or {})).items())
        if not head.isascii() or head.count("\n") != len(lines | (headers or {})):
            raise InvalidInput("a header has a character that headers cannot have", param="header")
        self._head = head.encode()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        first = f"{method} {self._path}{path} HTTP/1.1\r\n".encode()
        return b"%b%bContent-Length: %d\r\n\r\n%b" % (first, self._head, len(body), body)

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Sends a request; returns when the answer is complete. Raises Broken. A connection that was kept and that the
        server has closed meanwhile is replaced by another. Cancelling hangs up."""
        while True:
            kept = bool(self._idle)
            begun = perf_counter()
            connection = self._idle.pop() if kept else await self._connect()
            try:
                await connection.ask(request, answer, perf_counter() - begun)
            except Broken as error:
                if kept and error.early:
                    continue
                raise
            finally:
                if connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    def close(self) -> None:
        """Closes all connections."""
        for connection in list(self._all):
            connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            if self._address is None:  # once: resolving takes a thread
                found = await loop.getaddrinfo(self._host, self._port, type=1)
                self._address = str(found[0][4][0])
            _, connection = await loop.create_connection(
                lambda: _Connection(self), self._address, self._port, ssl=self._tls,
                server_hostname=self._host if self._tls is not None else None,
            )  # fmt: skip
        except OSError as error:
            raise Broken(f"no connection to {self.url}: {error}", early=True, connected=False) from error
        return connection

    def opened(self, connection: _Connection) -> None:
        self._all.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._at = 0.0
        self._begun = self._bounded = False
        self.reusable = False

    async def ask(self, request: bytes, answer: Answer, connecting: float) -> None:
        assert self._transport is not None
        self._answer, self._ended = answer, asyncio.get_running_loop().create_future()
        self._begun = self._bounded = self.reusable = False
        if self._transport.is_closing():
            raise Broken("the server closed the connection", early=True)
        self._transport.write(request)
        answer.wrote(perf_counter(), connecting)
        try:
            await self._ended
        finally:
            self._answer = self._ended = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        self._at = perf_counter()
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Broken(f"what came is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._pool.lost(self)
        if self._begun and not self._bounded and error is None and self._answer is not None:
            self._end(None)  # a body without a length ends with its connection
        else:
            self._end(Broken(f"the connection broke: {error or 'the server closed it'}", early=not self._begun))

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._bounded = True

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.head(self._parser.get_status_code(), self._at)

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.body(data, self._at)

    def on_message_complete(self) -> None:
        self.reusable = self._bounded and self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Broken | None) -> None:
        ended = self._ended
        if ended is None or ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
