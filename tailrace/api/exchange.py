"""One HTTP exchange: a request with a bounded body in, one answer out, and who has hung up."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tailrace.api.errors import HttpError, unavailable
from tailrace.api.priority import MOST_URGENT

if TYPE_CHECKING:
    from tailrace.api.access.account import Lease
    from tailrace.api.access.guard import Caller

FREE_BYTES = 64 << 10
"""Bodies of up to so many bytes count for nothing: whoever sends large ones does not keep others from sending these."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
JSON = (b"content-type", b"application/json")
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
PHRASES = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
    507: b"Insufficient Storage",
}


class Output(Protocol):
    """Where the bytes of an answer go."""

    def write(self, data: bytes) -> None:
        """A piece."""

    def writelines(self, data: Iterable[bytes]) -> None:
        """Several at once."""


class Clock(Protocol):
    """The line of a Date header."""

    date: bytes


class Line(Protocol):
    """What an exchange needs of whoever asks: a connection, or something that stands for one."""

    blocked_since: float

    @property
    def address(self) -> str:
        """Where whoever asks is; empty where that is nowhere."""

    @property
    def transport(self) -> Output:
        """Where answers go."""

    @property
    def shared(self) -> Clock:
        """What all have in common."""

    async def drained(self) -> None:
        """Returns when there is room to write."""

    def relieve(self) -> None:
        """The body that had come was read."""

    def ended(self, exchange: Exchange) -> None:
        """Its answer is written."""

    def abort(self) -> None:
        """Cuts the connection."""


class ClientGone(Exception):
    """The client hung up before its request was complete."""


@dataclass
class BodyBudget:
    """Bytes of bodies that may be held at once, over all connections. One caller has at most half of them, or a single
    body."""

    limit: int
    used: int = 0
    shares: dict[str, int] = field(default_factory=dict)

    def take(self, who: str, more: int, whole: int) -> None:
        """`who` holds `more` bytes, and with them `whole` bytes of one body. They are to be given back also where this
        raises HttpError 503."""
        self.used += more
        share = self.shares[who] = self.shares.get(who, 0) + more
        if self.used > self.limit:
            raise unavailable("too many large requests at once")
        if share > self.limit // 2 and share > whole:
            raise unavailable("too many large requests at once from the same key, tenant or address")

    def give(self, who: str, size: int) -> None:
        """It holds them no longer."""
        self.used -= size
        self.shares[who] -= size
        if not self.shares[who]:
            del self.shares[who]


@dataclass(eq=False)
class Exchange:
    """Owned by one task. `status` is what was answered (0: nothing yet); names of headers are in lower case."""

    line: Line
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    chunks: bool  # the client understands an answer in chunks
    keep_alive: bool  # the connection goes on after this
    id: str = ""
    caller: Caller | None = None
    lease: Lease | None = None
    priority: int | None = None  # instead of the one that the request asks for
    extra: list[tuple[bytes, bytes]] = field(default_factory=list)  # more headers of the answer, whatever it is
    error_body: Callable[[HttpError], bytes] = HttpError.body  # an error as this API has it
    anthropic: bool = False  # it is with one of Anthropic's clients
    key: bytes | None = None  # sent in a header of another API's, instead of authorization
    status: int = 0
    received: float = field(default_factory=time.monotonic)
    booked: bool = False  # the engine has got it, and so its events tell all that becomes of it
    waited: float = 0.0  # seconds for which its answer waited until the client read
    whole: bool = False  # all of the body has come
    ended: bool = False  # all of the answer is written
    held: int = 0  # bytes of the body that have come and are not read
    fault: HttpError | None = None  # what comes where the rest of the body should is none
    _body: bytearray = field(default_factory=bytearray)
    _taken: int = 0  # bytes of the body that count in the budget
    _holder: str = ""  # for whom they count
    _continued: bool = False
    _waiter: asyncio.Future[None] | None = None
    _chunked: bool = False
    _blocked: bool = False  # a write waits for the client
    _lost: bool = False

    # For the connection

    def feed(self, data: bytes) -> None:
        """A piece of the body."""
        self._body += data
        self.held += len(data)
        self._wake()

    def finish(self) -> None:
        """The body's end."""
        self.whole = True
        self._wake()

    def spoil(self, fault: HttpError) -> None:
        """The rest of the body cannot be read, and nothing behind it."""
        self.fault = fault
        self.keep_alive = False
        self._wake()

    def lose(self) -> None:
        """The client has hung up."""
        self._lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    # The request

    @property
    def tenant(self) -> str:
        """What salts the prefix cache for whoever asks."""
        return self.caller.tenant if self.caller is not None else ""

    @property
    def least_priority(self) -> int:
        """The lowest priority that whoever asks may ask for."""
        return self.caller.least_priority if self.caller is not None else MOST_URGENT

    @property
    def authorization(self) -> bytes | None:
        """What says who asks."""
        return self.header(b"authorization") if self.key is None else b"Bearer " + self.key

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def body(self, limit: int, timeout: float, budget: BodyBudget, kind: bytes = JSON[1]) -> bytes:
        """The whole body, of the content type `kind`. Raises HttpError (413, 415, 408, 503, or
        what is wrong with it) or ClientGone."""
        given = self.header(b"content-type")
        if given is not None and given.split(b";")[0].strip().lower() != kind:
            shown = given.decode("latin-1")[:100]
            raise HttpError(415, f"the content type must be {kind.decode()}, not {shown}", close=True)
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise self._too_large(limit)
        try:
            if self.whole:
                data = await self._read(limit, budget)
            else:
                async with asyncio.timeout(timeout):
                    data = await self._read(limit, budget)
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {timeout:g} s", close=True) from None
        self.received = time.monotonic()
        return data

    async def _read(self, limit: int, budget: BodyBudget) -> bytes:
        if self._awaited:
            self._continued = True
            self.line.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while True:
            while not (self.held or self.whole or self._lost or self.fault):
                await self._news()
            if self._lost:
                raise ClientGone
            if self.fault is not None:
                raise self.fault
            self.held = 0
            if len(self._body) > limit:
                raise self._too_large(limit)
            self._count(budget)
            self.line.relieve()
            if self.whole and not self.held:
                data, self._body = bytes(self._body), bytearray()
                return data

    def _count(self, budget: BodyBudget) -> None:
        """Counts what has come of the body. Raises HttpError 503."""
        size = len(self._body)
        if size <= FREE_BYTES:
            return
        if not self._taken:
            self._holder = self.tenant or self.line.address
        more, self._taken = size - self._taken, size
        budget.take(self._holder, more, size)

    @property
    def _awaited(self) -> bool:
        """Whether the client waits for our word before it sends its body."""
        if self.whole or self.held or self._continued or self._lost or not self.chunks:
            return False
        return (self.header(b"expect") or b"").lower() == b"100-continue"

    def release(self, budget: BodyBudget) -> None:
        """The body is not needed any more."""
        self._drop()
        if self._taken:
            budget.give(self._holder, self._taken)
            self._taken = 0

    def _drop(self) -> None:
        self._body, self.held = bytearray(), 0

    def _too_large(self, limit: int) -> HttpError:
        return HttpError(413, f"the body is larger than {limit} bytes", code="request_too_large", close=True)

    @property
    def lost(self) -> bool:
        """Whether the client has hung up."""
        return self._lost

    async def gone(self) -> None:
        """Returns when the client has hung up. Only after the body has been read."""
        while not (self._lost or self.ended):
            await self._news()

    # The answer

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the status and headers of an answer that `write` then makes."""
        self._chunked = self.chunks and self.method != "HEAD"
        self.keep_alive = self.keep_alive and self.chunks  # else only the end of the connection tells the end of it
        rows = [*headers, (b"transfer-encoding", b"chunked")] if self._chunked else headers
        data = self._head(status, rows)
        await self._room()
        if not self._lost:
            self.line.transport.write(data)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends a piece of the body; waits while the client's buffers are full."""
        await self._room()
        if self._lost:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = data if more else data + b"0\r\n\r\n"
        if data and self.method != "HEAD":
            self.line.transport.write(data)
        if not more:
            self._end()

    @property
    def writable(self) -> bool:
        """Whether `write_now` is possible: nothing waits for the client."""
        return self._chunked and not (self._blocked or self.line.blocked_since or self._lost)

    def write_now(self, data: bytes) -> None:
        """Sends a piece of the body at once, without a task; only where it is `writable`. No data would end it."""
        self.line.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def answer(self, status: int, data: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Sends a whole answer."""
        rows = [JSON] if headers is None else headers
        top = self._head(status, [*rows, (b"content-length", b"%d" % len(data))])
        await self._room()
        if not self._lost:
            self.line.transport.writelines((top,) if self.method == "HEAD" else (top, data))
            self._end()

    async def refuse(self, error: HttpError) -> None:
        """Sends an error. Where the connection is then closed, it reads on for a moment (`Connection`)."""
        self.keep_alive = self.keep_alive and not error.close
        await self.answer(error.status, self.error_body(error), error.headers())

    def hang_up(self) -> None:
        """Cuts the connection: the client does not read, or has half an answer that cannot be made whole."""
        self.line.abort()

    def _head(self, status: int, rows: list[tuple[bytes, bytes]]) -> bytes:
        self.status = status
        if self._awaited:  # and now it may send its body or not
            self.keep_alive = False
        rows = [*rows, (b"x-request-id", self.id.encode()), *self.extra]
        if self.lease is not None:
            rows += self.lease.headers()
        return head(status, self.line.shared.date, rows, close=not self.keep_alive)

    async def _room(self) -> None:
        """Waits until the client takes more."""
        if self.line.blocked_since:
            self._blocked = True
            since = time.monotonic()
            try:
                await self.line.drained()
            finally:
                self._blocked = False
                self.waited += time.monotonic() - since

    def _end(self) -> None:
        self.ended = True
        self._drop()
        self._wake()
        self.line.ended(self)


def head(status: int, date: bytes, rows: list[tuple[bytes, bytes]], *, close: bool) -> bytes:
    """An answer's status line and headers. `date` is a whole line."""
    lines = b"".join([b"%b: %b\r\n" % row for row in rows])
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"HTTP/1.1 %d %b\r\n%b%b%b" % (status, PHRASES.get(status, b""), date, lines, end)


def request_id(given: bytes | None, fresh: Callable[[], str]) -> str:
    """The caller's x-request-id where it is well-formed, else a new one."""
    if given is not None and REQUEST_ID.fullmatch(given):
        return given.decode()
    return fresh()
