"""A connection without a socket: an exchange goes in, an answer comes out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from tailrace.api.exchange import Exchange

Application = Callable[[Exchange], Awaitable[None]]


class Wire:
    """Stands for a `Line`, its transport and its clock."""

    address = "127.0.0.1"
    date = b""

    def __init__(self) -> None:
        self.blocked_since = 0.0
        self.data = bytearray()
        self.cut = False

    @property
    def transport(self) -> Wire:
        return self

    @property
    def shared(self) -> Wire:
        return self

    def write(self, data: bytes) -> None:
        self.data += data

    def writelines(self, data: Iterable[bytes]) -> None:
        self.data += b"".join(data)

    async def drained(self) -> None:
        await asyncio.Event().wait()

    def relieve(self) -> None: ...

    def ended(self, exchange: Exchange) -> None: ...

    def abort(self) -> None:
        self.cut = True

    def events(self) -> list[tuple[str, Any]]:
        """What a stream has told: (event, data) each."""
        told = []
        for block in self.data.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n") if line.startswith(("event: ", "data: ")))
            if "event" in lines:
                told.append((lines["event"], json.loads(lines["data"])))
        return told


class Answer(NamedTuple):
    """Status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def exchange(target: str, method: str = "GET", host: str = "127.0.0.1:8000", **headers: str) -> Exchange:
    """A request for a target, without a body. Underscores of headers' names stand for dashes."""
    path, _, query = target.partition("?")
    rows = [(b"host", host.encode())]
    rows += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Exchange(Wire(), method, path, query.encode(), rows, chunks=True, keep_alive=True, whole=True)


def parsed(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return Answer(int(first.split()[1]), dict(line.split(": ", 1) for line in lines if ": " in line), body)


def ask(application: Application, target: str, method: str = "GET", **headers: str) -> Answer:
    """The answer to one request."""
    one = exchange(target, method, **headers)
    asyncio.run(application(one))
    assert isinstance(one.line, Wire)
    return parsed(bytes(one.line.data))
