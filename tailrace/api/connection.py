"""HTTP/1.1 on a socket: one client's connection, and all of a server's.

A `Connection` turns bytes into exchanges and hands them to the application one at a time, in their order. What it
holds is bounded: heads, what is read ahead, what nobody reads, and the time in which a head must come, an idle
connection may stay and an answer may wait for its client. Bodies are the exchange's to bound.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

import httptools

from tailrace.api.errors import HttpError, unavailable
from tailrace.api.exchange import Exchange, head
from tailrace.api.settings import Timeouts

HEAD_BYTES = 64 << 10
"""Most bytes of a request's line and headers, and of anything else that lies between two pieces of bodies."""
SLICE = 16 << 10
"""Bytes that are parsed before it is looked at whether they are too many."""
READ_AHEAD = 64 << 10
"""Bytes of a body that nobody has read, or behind a request that is not answered, from which on the client waits."""
LINGER_SECONDS = 2.0
"""How long a client that is still sending what was refused is listened to: closed at once, the connection would be
reset, and the client would not see the answer."""
LINGER_BYTES = 128 << 20
"""How much that nobody wants is read and dropped."""
LINGER_NOT = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket that is reset when it is closed."""
REFUSED = 32
"""Connections too many that are told so; further ones are cut at once."""
PROGRESS = 16 << 10
"""Bytes that a client must take of what waits for it, each time in a send timeout."""
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Connections:
    """Every connection of one server, and what they share. `answered` hears of the statuses of refusals that never
    become an exchange, `refused` of them and of the id that the client is told. `most`: connections that are
    served at once."""

    def __init__(
        self,
        application: Callable[[Exchange], Awaitable[None]],
        timeouts: Timeouts,
        answered: Callable[[str, int], None],
        refused: Callable[[str, HttpError], object] = lambda _id, _error: None,
        *,
        most: int = 8192,
    ) -> None:
        self.application = application
        self.timeouts = timeouts
        self.answered = answered
        self.refused = refused
        self.most = most
        self.date = b""
        self.open: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.tick()

    def accept(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self)

    def tick(self) -> None:
        """Every second: renews the Date header, cuts off clients that do not read."""
        self.date = b"date: " + http_date(time.time()) + b"\r\n"
        now = time.monotonic()
        for connection in list(self.open):
            connection.sweep(now)

    def close(self) -> None:
        """Closes them: idle ones now, busy ones after their answer."""
        for connection in list(self.open):
            connection.shutdown()


class Connection(asyncio.Protocol):
    """One client. Everything happens on the loop's thread."""

    def __init__(self, shared: Connections) -> None:
        self.shared = shared
        self.lost = False
        self.blocked_since = 0.0  # the client takes too little of what is written since then; 0: it takes it
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        self._unsent = 0
        # The request that is being parsed.
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = False
        self._incoming: Exchange | None = None  # its body has not ended
        # The requests that are being served.
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._refusal: HttpError | None = None  # what is to be said after their answers
        # Bytes.
        self._backlog = b""
        self._reading = True
        self._idle_bytes = 0  # parsed since a head ended or a piece of a body came
        self._moved = False
        self._deaf = False  # nothing that still comes is a request
        self._dropped = 0

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here; its first head is due."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are, by what they do
        self.shared.open.add(self)
        excess = len(self.shared.open) - self.shared.most
        if excess > REFUSED:
            self.abort()
        elif excess > 0:
            self._refuse(unavailable(f"more than {self.shared.most} connections are open"))
        else:
            self._arm(self.shared.timeouts.header, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has hung up, or was."""
        self.lost = True
        self.shared.open.discard(self)
        self._disarm()
        for exchange in (self._current, self._incoming):
            if exchange is not None:
                exchange.lose()
        self._wake()
        self._current = self._incoming = None
        self._queue.clear()
        self._backlog = b""
        self._deaf = True
        self._parser = None  # which refers to this

    def eof_received(self) -> None:
        """It sends nothing more, which is how a client hangs up; what is written already is watched over."""
        for exchange in (self._current, self._incoming):
            if exchange is not None:
                exchange.lose()
        self._close()

    def data_received(self, data: bytes) -> None:
        """Parses it, or keeps it until what came before is dealt with."""
        if self._deaf:
            self._drop(len(data))
            return
        self._backlog = self._backlog + data if self._backlog else data
        self._parse()

    def pause_writing(self) -> None:
        """More is written than the client takes."""
        self._unsent = self.transport.get_write_buffer_size()
        self.blocked_since = time.monotonic()

    def resume_writing(self) -> None:
        """It has taken it."""
        self.blocked_since = 0.0
        self._wake()

    # For the exchange

    @property
    def address(self) -> str:
        """The client's, without its port."""
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    async def drained(self) -> None:
        """Returns when there is room to write, or nobody to write to."""
        while self.blocked_since and not self.lost:
            self._drained = self._loop.create_future()
            await self._drained

    def relieve(self) -> None:
        """The body that had come was read."""
        if self._backlog or not self._reading:
            self._parse()

    def ended(self, exchange: Exchange) -> None:
        """Its answer is written."""
        self._current = None
        if self.lost or self.transport.is_closing():
            return
        if exchange.keep_alive:
            self._advance()
        elif exchange.whole:
            self._close()
        else:
            self._linger()

    def abort(self) -> None:
        """Cuts the connection; what is written and not sent is lost."""
        self.transport.abort()

    # For the server

    def sweep(self, now: float) -> None:
        """Cuts off a client that takes next to nothing of what waits for it."""
        if not self.blocked_since:
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent + PROGRESS <= self._unsent:
            self._unsent, self.blocked_since = unsent, now
        elif now - self.blocked_since > self.shared.timeouts.send:
            self._reset()

    def _reset(self) -> None:
        """Cuts the connection so that the system, too, forgets what it still has for the client: a connection that is
        only closed stays there for as long as the client takes nothing."""
        line = self.transport.get_extra_info("socket")
        if line is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        self.abort()

    def shutdown(self) -> None:
        """Closes the connection after the answer that is under way."""
        if self._current is None:
            self._close()
        else:
            self._current.keep_alive = False

    # Parsing

    def _parse(self) -> None:
        """Parses the backlog, as far as it may be looked at now."""
        data, self._backlog = self._backlog, b""
        at = 0
        while at < len(data) and not self._deaf and not self._full():
            piece = data if len(data) <= SLICE else data[at : at + SLICE]
            at += len(piece)
            self._moved = False
            rest = piece
            while rest:
                rest = self._feed(rest)
            self._idle_bytes = 0 if self._moved else self._idle_bytes + len(piece)
            if self._idle_bytes > HEAD_BYTES:
                self._refuse_head()
        if self._deaf:
            self._drop(len(data) - at)
        elif at < len(data):
            self._backlog = data[at:]
        if self._in_head and self._timer is None:
            self._arm(self.shared.timeouts.header, self._head_is_late)
        self._read(len(self._backlog) <= READ_AHEAD)

    def _full(self) -> bool:
        """Whether the client is ahead of us: a request waits for its turn, or a body for its reader."""
        return bool(self._queue) or (self._incoming is not None and self._incoming.held > READ_AHEAD)

    def _read(self, wanted: bool) -> None:
        if wanted != self._reading and not self.transport.is_closing():
            self._reading = wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _feed(self, piece: bytes) -> bytes:
        """Parses a slice; returns what has to be parsed again."""
        if self._parser is None:
            return b""
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._deaf:
                return self._stay() + piece[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            traceback.print_exception(error, file=sys.stderr)  # a fault of ours
            self.abort()
        except httptools.HttpParserError as error:
            self._refuse(HttpError(400, f"this is not a valid HTTP request: {error}", code="invalid_http"))
        return b""

    def _stay(self) -> bytes:
        """The head of a request that asks for another protocol, as it reads without that. Whoever offers one (Java's
        client does, of HTTP/2) takes an answer without it, but the parser skips the body of such a request."""
        assert self._parser is not None
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(HttpError(400, "this is not a proxy", code="invalid_http"))
            return b""
        self._parser = httptools.HttpRequestParser(self)
        rows = [b"%b: %b\r\n" % row for row in self._headers if row[0] != b"upgrade"]
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self._url, b"".join(rows))

    # From the parser. What follows a refusal in the same slice still comes here.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if not self._deaf:
            self._url = b""
            self._headers = []
            self._in_head = True
            self._disarm()

    def on_url(self, url: bytes) -> None:
        """A piece of its target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer of a body in chunks; nobody asks for these."""
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._moved = True
        if self._deaf:
            return
        self._in_head = False
        self._disarm()
        assert self._parser is not None
        if len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers) > HEAD_BYTES:
            self._refuse_head()
        elif not self._parser.should_upgrade():  # else the parser stops here, see `_stay`
            self._begin(self._parser)

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._moved = True
        exchange = self._incoming
        if exchange is None:
            return
        if exchange.ended:
            self._drop(len(body))
        else:
            exchange.feed(body)

    def on_message_complete(self) -> None:
        """The end of a body."""
        exchange, self._incoming = self._incoming, None
        if exchange is None:
            return
        exchange.finish()
        if not exchange.keep_alive:
            self._deaf = True
        elif self._current is None:  # it was answered before
            self._arm(self.shared.timeouts.keep_alive, self._close)

    # Exchanges

    def _begin(self, parser: httptools.HttpRequestParser) -> None:
        try:
            target = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            self._refuse(HttpError(400, "the request's target is not a valid URL", code="invalid_http"))
            return
        path = (target.path or b"/").decode("utf-8", "replace")
        if "%" in path:
            from urllib.parse import unquote

            path = unquote(path)
        version = parser.get_http_version()
        exchange = Exchange(
            line=self,
            method=parser.get_method().decode("ascii"),
            path=path,
            query=target.query or b"",
            headers=self._headers,
            chunks=version == "1.1",
            keep_alive=version == "1.1" and parser.should_keep_alive(),
        )
        self._incoming = exchange
        if self._current is None:
            self._start(exchange)
        else:
            self._queue.append(exchange)

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        task = self._loop.create_task(self._serve(exchange))
        self.shared.tasks.add(task)
        task.add_done_callback(self.shared.tasks.discard)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self.shared.application(exchange)
        finally:
            if not exchange.ended and not self.lost:
                self.abort()  # half an answer must not be taken for a whole one

    def _advance(self) -> None:
        """An answer is written, and the connection goes on."""
        if self._queue:
            self._start(self._queue.popleft())
        elif self._refusal is not None:
            self._say(self._refusal)
        elif not self._in_head:
            self._arm(self.shared.timeouts.keep_alive, self._close)
        if self._backlog or not self._reading:
            self._parse()

    # Refusals

    def _head_is_late(self) -> None:
        self._timer = None
        limit = self.shared.timeouts.header
        if self._current is not None:
            self._arm(limit, self._head_is_late)  # the client is waiting for us rather than we for it
        elif not self._in_head:
            self._close()  # it has said nothing at all
        else:
            message = f"the request line and headers did not arrive within {limit:g} s"
            self._refuse(HttpError(408, message, code="headers_timeout"))

    def _refuse_head(self) -> None:
        message = f"the request line and headers are larger than {HEAD_BYTES} bytes"
        self._refuse(HttpError(431, message, code="headers_too_large"))

    def _refuse(self, error: HttpError) -> None:
        """Answers what is no request, or not the rest of one, after the requests before it."""
        if self._deaf or self.transport.is_closing():
            return
        self._deaf = True
        self._in_head = False
        if self._incoming is not None:
            self._spoil(self._incoming, error)
        elif self._current is not None:
            self._refusal = error
        else:
            self._say(error)

    def _spoil(self, exchange: Exchange, error: HttpError) -> None:
        """What should be the rest of its body is none: that is its answer, unless it has one."""
        if exchange.ended:
            self._linger()
        elif exchange.status:
            self.abort()  # half an answer must not be taken for a whole one
        else:
            exchange.spoil(error)

    def _say(self, error: HttpError) -> None:
        self.shared.answered("other", error.status)
        body = error.body()
        name = f"req-{os.urandom(12).hex()}"
        self.shared.refused(name, error)
        rows = [*error.headers(), (b"x-request-id", name.encode())]
        rows.append((b"content-length", b"%d" % len(body)))
        self.transport.write(head(error.status, self.shared.date, rows, close=True) + body)
        self._linger()

    # Ends

    def _linger(self) -> None:
        """Says that nothing more comes from here, and goes on reading for a moment."""
        self._deaf = True
        self._drop(len(self._backlog))
        self._backlog = b""
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():  # TLS cannot say it for one side only
            self.transport.write_eof()
        self._read(True)
        self._arm(LINGER_SECONDS, self._close)

    def _drop(self, size: int) -> None:
        """Counts what nobody wants."""
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self._close()

    def _close(self) -> None:
        """Closes the connection once the client has taken what is written."""
        self._disarm()
        if not self.transport.is_closing():
            self._deaf = True
            self.transport.close()
            if not self.blocked_since and self.transport.get_write_buffer_size():
                self.pause_writing()  # so that `sweep` watches over it

    def _arm(self, seconds: float, then: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)


def http_date(seconds: float) -> bytes:
    """A time since the epoch as RFC 9110 (section 5.6.7) writes it, whatever the locale."""
    at = time.gmtime(seconds)
    day, month = DAYS[at.tm_wday], MONTHS[at.tm_mon - 1]
    clock = f"{at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02}"
    return f"{day}, {at.tm_mday:02} {month} {at.tm_year} {clock} GMT".encode()
