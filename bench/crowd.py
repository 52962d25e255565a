"""A crowd of clients at once, most of them bad ones, and what each of them must get.

Whoever behaves gets the answer that it would get alone, whatever the others do: those that hang up, that send half of a
request and hang, that send no HTTP at all, that neither read nor leave. `crowd` plays all of them on one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tailrace.api.server import more_files
from tailrace.api.settings import Limits

TOPICS = ("rivers", "mills", "a very long weir", "the tail", "ponds and sluices", "Zürich", "水車", "gates")
BITE = 2048
"""Bytes that a slow reader takes at a time."""


@dataclass(frozen=True)
class Place:
    """A server. `body_bytes`: its largest request body; `patience`: seconds after which a client that should have been
    answered or closed gives up; `known`: what it answered to each ordinary request while it had nothing else to do."""

    port: int
    model: str
    body_bytes: int = Limits.body_bytes
    patience: float = 60.0
    known: dict[bytes, str] = field(default_factory=dict)

    def asking(self, number: int, **extra: Any) -> bytes:
        """The body of an ordinary request: a chat of a few tokens."""
        messages = [{"role": "user", "content": f"Tell me of {TOPICS[number % len(TOPICS)]}."}]
        body = {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0, **extra}
        return json.dumps(body, ensure_ascii=False).encode()


def request(body: bytes, *, path: bytes = b"/v1/chat/completions", headers: bytes = b"") -> bytes:
    """A whole POST request."""
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (path, headers, len(body)) + body


class Client:
    """One raw connection. With `small`, the system holds next to nothing for it on the way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, *, small: bool = False) -> Client:
        """Raises OSError where the server does not take it."""
        line = socket.socket()
        line.setblocking(False)
        if small:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=line, limit=BITE if small else 1 << 20))

    async def status(self) -> int:
        """Reads a head; its status, or 0 where the server closed instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        return int(head.split(b" ", 2)[1])

    async def rest(self, *, pause: float = 0.0) -> bytes:
        """All until the server closes, in bites where there is a pause; what came before it broke off."""
        taken = b""
        try:
            while data := await self.reader.read(BITE if pause else 1 << 20):
                taken += data
                if pause:
                    await asyncio.sleep(pause)
        except ConnectionError:
            pass
        return taken

    async def ended(self) -> str:
        """What it is told, 0 for nothing, when the server has closed and it has hung up."""
        status = await self.status()
        await self.rest()
        self.leave()
        return str(status)

    def leave(self, *, rudely: bool = False) -> None:
        """Hangs up, with a reset where it is done rudely."""
        if rudely:
            line = self.writer.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        self.writer.close()


def said(body: bytes) -> str | None:
    """The text of an answer, as a stream in chunks or whole; None where it is none, or not a complete one."""
    if not body.startswith(b"{"):
        pieces, at = [], 0
        while True:
            end = body.find(b"\r\n", at)
            if end < 0:
                return None
            size = int(body[at:end], 16)
            if size == 0:
                break
            pieces.append(body[end + 2 : end + 2 + size])
            at = end + size + 4
        body = b"".join(pieces)
    if body.startswith(b"{"):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return None
    deltas = [json.loads(event)["choices"] for event in events[:-1]]
    return "".join(choice["delta"].get("content") or "" for choices in deltas for choice in choices)


# --- the kinds of clients: each says how it ended


async def ordinary(place: Place, number: int, rng: random.Random) -> str:
    """Asks and reads, streamed or not."""
    body = place.asking(number, **({"stream": True} if number % 2 else {}))
    client = await Client.connect(place.port)
    client.writer.write(request(body, headers=b"connection: close\r\n"))
    status = await client.status()
    body = await client.rest()
    client.leave()
    return judged(place, number, status, body)


async def slow_sender(place: Place, number: int, rng: random.Random) -> str:
    """Sends its request in a dozen pieces."""
    data = request(place.asking(number), headers=b"connection: close\r\n")
    client = await Client.connect(place.port)
    size = len(data) // 12 + 1
    for at in range(0, len(data), size):
        client.writer.write(data[at : at + size])
        await asyncio.sleep(rng.uniform(0.01, 0.08))
    status = await client.status()
    body = await client.rest()
    client.leave()
    return judged(place, number, status, body)


async def slow_reader(place: Place, number: int, rng: random.Random) -> str:
    """Takes a stream in small bites, with pauses between."""
    client = await Client.connect(place.port, small=True)
    client.writer.write(request(place.asking(number, stream=True), headers=b"connection: close\r\n"))
    status = await client.status()
    body = await client.rest(pause=0.02)
    client.leave()
    return judged(place, number, status, body)


def judged(place: Place, number: int, status: int, body: bytes) -> str:
    """How the client of an ordinary request ended."""
    if status != 200:
        return str(status)
    return "right" if said(body) == place.known[place.asking(number)] else "wrong"


async def never_reads(place: Place, number: int, rng: random.Random) -> str:
    """Asks for a large stream, takes nothing of it, and stays until it is cut off."""
    client = await Client.connect(place.port, small=True)
    much = {"n": 2, "logprobs": True, "top_logprobs": 20, "max_tokens": 400, "ignore_eos": True}
    client.writer.write(request(place.asking(number, stream=True, **much)))
    line = client.writer.get_extra_info("socket")
    client.writer.transport.pause_reading()
    for _ in range(int(place.patience / 0.1)):
        await asyncio.sleep(0.1)
        state = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state != 1:  # no longer ESTABLISHED
            client.leave()
            return "cut"
    client.leave(rudely=True)
    return "kept"


async def vanishes(place: Place, number: int, rng: random.Random) -> str:
    """Leaves as soon as the first of a stream has come, or while it waits for an answer, politely or not."""
    stream = number % 3 > 0
    client = await Client.connect(place.port)
    client.writer.write(request(place.asking(number, stream=stream, max_tokens=400, ignore_eos=True)))
    await client.writer.drain()
    if stream:
        await client.status()
        await client.reader.read(100)
    else:
        await asyncio.sleep(rng.uniform(0, 0.05))
    client.leave(rudely=number % 2 == 0)
    return "left"


async def half(place: Place, number: int, rng: random.Random) -> str:
    """Sends a part of a request and hangs, or leaves."""
    data = request(place.asking(number))
    head = data.index(b"\r\n\r\n")
    cut = rng.randrange(5, head) if number % 2 else rng.randrange(head + 4, len(data))
    client = await Client.connect(place.port)
    client.writer.write(data[:cut])
    if number % 3 == 0:
        await client.writer.drain()
        client.leave(rudely=number % 2 == 0)
        return "left"
    return await client.ended()


async def silent(place: Place, number: int, rng: random.Random) -> str:
    """Connects and says nothing."""
    client = await Client.connect(place.port)
    status = await client.status()
    client.leave()
    return str(status)


async def garbage(place: Place, number: int, rng: random.Random) -> str:
    """Sends what is no HTTP: the beginning of TLS, or anything."""
    client = await Client.connect(place.port)
    client.writer.write(b"\x16\x03\x01" + rng.randbytes(rng.randrange(1, 3000)))
    return await client.ended()


async def wrong(place: Place, number: int, rng: random.Random) -> str:
    """Sends HTTP, and in it what is no request."""
    bodies = [b"{", b"[]", rng.randbytes(200), place.asking(number, temperature=-1), place.asking(number, n=10**9)]
    client = await Client.connect(place.port)
    client.writer.write(request(bodies[number % len(bodies)], headers=b"connection: close\r\n"))
    return await client.ended()


async def too_large(place: Place, number: int, rng: random.Random) -> str:
    """Sends a body that is larger than the server takes, all of it."""
    client = await Client.connect(place.port)
    client.writer.write(request(b" " * (place.body_bytes + 1)))
    return await client.ended()


Kind = Callable[[Place, int, random.Random], Awaitable[str]]
KINDS: dict[Kind, tuple[int, set[str]]] = {
    ordinary: (30, {"right"}),
    slow_sender: (10, {"right"}),
    slow_reader: (10, {"right"}),
    never_reads: (2, {"cut"}),
    vanishes: (20, {"left"}),
    half: (12, {"left", "408"}),
    silent: (4, {"0"}),
    garbage: (5, {"400"}),
    wrong: (5, {"400"}),
    too_large: (2, {"413"}),
}
"""How many of a hundred clients are of each kind, and how such a client may end."""


async def known(place: Place) -> None:
    """Asks each ordinary request alone."""
    for number in range(len(TOPICS)):
        client = await Client.connect(place.port)
        client.writer.write(request(place.asking(number), headers=b"connection: close\r\n"))
        status = await client.status()
        text = said(await client.rest())
        client.leave()
        assert status == 200
        assert text
        place.known[place.asking(number)] = text


async def crowd(place: Place, clients: int, seed: int = 0) -> dict[str, collections.Counter[str]]:
    """So many clients at once: how those of each kind ended."""
    more_files()
    if not place.known:
        await known(place)
    rng = random.Random(seed)
    kinds = [kind for kind, (share, _) in KINDS.items() for _ in range(share)]
    ends: dict[str, collections.Counter[str]] = {kind.__name__: collections.Counter() for kind in KINDS}

    async def one(kind: Kind, number: int) -> None:
        try:
            async with asyncio.timeout(2 * place.patience):
                end = await kind(place, number, random.Random(seed * 1_000_003 + number))
        except TimeoutError:
            end = "no end"
        except OSError as error:
            end = type(error).__name__
        ends[kind.__name__][end] += 1

    chosen = [kinds[number % len(kinds)] for number in range(clients)]
    rng.shuffle(chosen)
    async with asyncio.TaskGroup() as group:
        for number, kind in enumerate(chosen):
            group.create_task(one(kind, number))
    return ends


def amiss(ends: dict[str, collections.Counter[str]]) -> dict[str, dict[str, int]]:
    """Ends that should not be, by kind; empty where all is well."""
    found = {}
    for kind, (_, may) in KINDS.items():
        odd = {end: count for end, count in ends[kind.__name__].items() if end not in may}
        if odd:
            found[kind.__name__] = odd
    return found
