"""One HTTP exchange at the ASGI level: headers in, a bounded body in, one answer out, and who has hung up."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.api.errors import HttpError, unavailable

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
LINGER_SECONDS = 2.0
"""How long a client that is still sending a refused body is listened to, so that it gets the answer."""
LINGER_BYTES = 128 << 20
"""How much of it."""
JSON = (b"content-type", b"application/json")
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGone(Exception):
    """The client hung up before its request was complete."""


@dataclass
class BodyBudget:
    """Bytes of bodies that may be held at once, over all connections."""

    limit: int
    used: int = 0


@dataclass(eq=False)
class Exchange:
    """Owned by one task. `status` is what was answered (0: nothing yet)."""

    scope: Scope
    receive: Receive
    send: Send
    id: str
    tenant: str = ""
    status: int = 0
    received: float = field(default_factory=time.monotonic)
    blocked_since: float = 0.0  # a write is waiting for the client since then; 0: none is
    _taken: int = 0
    _whole: bool = False  # the body has been read to its end

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def body(self, limit: int, timeout: float, budget: BodyBudget) -> bytes:
        """The whole body as JSON bytes. Raises HttpError (413, 415, 408, 503) or ClientGone."""
        kind = self.header(b"content-type")
        if kind is not None and kind.split(b";")[0].strip().lower() != b"application/json":
            shown = kind.decode("latin-1")[:100]
            raise HttpError(415, f"the content type must be application/json, not {shown}", close=True)
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise self._too_large(limit)
        try:
            async with asyncio.timeout(timeout):
                data = await self._read(limit, budget)
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {timeout:g} s", close=True) from None
        self.received = time.monotonic()
        return data

    async def _read(self, limit: int, budget: BodyBudget) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            budget.used += len(part)
            self._taken += len(part)
            if size > limit:
                raise self._too_large(limit)
            if budget.used > budget.limit:
                raise unavailable("too many large requests at once")
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                self._whole = True
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self, budget: BodyBudget) -> None:
        """The body is not needed any more."""
        budget.used -= self._taken
        self._taken = 0

    def _too_large(self, limit: int) -> HttpError:
        return HttpError(413, f"the body is larger than {limit} bytes", code="request_too_large", close=True)

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the status and headers."""
        self.status = status
        headers.append((b"x-request-id", self.id.encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends a piece of the body; waits while the client's buffers are full."""
        self.blocked_since = time.monotonic()
        await self.send({"type": "http.response.body", "body": data, "more_body": more})
        self.blocked_since = 0.0

    @property
    def writable(self) -> bool:
        """Whether `write_now` is possible: nothing waits for the client, and the server under us is the one that we
        know (uvicorn's cycle with a body in chunks)."""
        cycle: Any = getattr(self.send, "__self__", None)
        return (
            self.blocked_since == 0.0
            and getattr(cycle, "chunked_encoding", None) is True
            and not cycle.flow.write_paused
            and not cycle.disconnected
        )

    def write_now(self, data: bytes) -> None:
        """Sends a piece of the body at once, without a task; only where it is `writable`."""
        self.send.__self__.transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # type: ignore[attr-defined]

    async def answer(self, status: int, data: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Sends a whole answer."""
        rows = [JSON] if headers is None else headers
        await self.begin(status, [*rows, (b"content-length", str(len(data)).encode())])
        await self.write(data, more=False)

    async def refuse(self, error: HttpError) -> None:
        """Sends an error. Before the connection is closed, what the client is still sending is read and dropped:
        closed at once, the connection would be reset, and the client would not see the answer."""
        data = error.body()
        if not error.close or self._whole:
            await self.answer(error.status, data, error.headers())
            return
        await self.begin(error.status, [*error.headers(), (b"content-length", str(len(data)).encode())])
        await self.write(data)
        dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while dropped <= LINGER_BYTES:
                    message = await self.receive()
                    dropped += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        await self.write(b"", more=False)

    async def gone(self) -> None:
        """Returns when the client has hung up. Only after the body has been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def hang_up(self) -> None:
        """Cuts the connection without flushing: the client does not read. Servers differ in how they expose the
        transport; without one, returning without an end of body closes it too."""
        transport = getattr(getattr(self.send, "__self__", None), "transport", None)
        if transport is not None:
            with contextlib.suppress(AttributeError):
                transport.abort()


def request_id(given: bytes | None, fresh: Callable[[], str]) -> str:
    """The caller's x-request-id where it is well-formed, else a new one."""
    if given is not None and REQUEST_ID.fullmatch(given):
        return given.decode()
    return fresh()
