"""A crowd of clients at once, most of them bad ones, and what each of them must get.

Whoever behaves gets the answer that it would get alone, whatever the others do: those that hang up, that send half of a
request and hang, that send no HTTP at all, that neither read nor leave, that have no key, that break off what they
upload. `crowd` plays all of them on one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tailrace.api.server import more_files
from tailrace.api.settings import Limits

TOPICS = ("rivers", "mills", "a very long weir", "the tail", "ponds and sluices", "Zürich", "水車", "gates")
BITE = 2048
"""Bytes that a slow reader takes at a time."""
BROKEN = (ConnectionError, ssl.SSLError)
"""What a connection raises that somebody has ended."""
FORM = b"multipart/form-data; boundary=weir"


@dataclass(frozen=True)
class Place:
    """A server. `body_bytes`: its largest request body; `patience`: seconds after which a client that should have been
    answered or closed gives up; `known`: what it answered to each ordinary request while it had nothing else to do.
    `key`: what it asks for, `tls`: what trusts its certificate, `file_bytes`: the largest file that it takes; without
    them those clients are not played that it takes them for."""

    port: int
    model: str
    body_bytes: int = Limits.body_bytes
    patience: float = 60.0
    known: dict[bytes, str] = field(default_factory=dict)
    key: str = ""
    tls: ssl.SSLContext | None = None
    file_bytes: int = 0

    def asking(self, number: int, **extra: Any) -> bytes:
        """The body of an ordinary request: a chat of a few tokens."""
        messages = [{"role": "user", "content": f"Tell me of {TOPICS[number % len(TOPICS)]}."}]
        body = {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0, **extra}
        return json.dumps(body, ensure_ascii=False).encode()

    def request(
        self,
        body: bytes = b"",
        *,
        line: bytes = b"POST /v1/chat/completions",
        kind: bytes = b"application/json",
        close: bool = False,
        key: str | None = None,
    ) -> bytes:
        """A whole request, with the key that is asked for, or another."""
        rows = [b"host: x", b"content-type: " + kind, b"content-length: %d" % len(body)]
        key = self.key if key is None else key
        rows += [b"authorization: Bearer " + key.encode()] if key else []
        rows += [b"connection: close"] if close else []
        return b"\r\n".join([line + b" HTTP/1.1", *rows, b"", body])


class Client:
    """One raw connection. With `small`, the system holds next to nothing for it on the way."""

    def __init__(self, line: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.line = line
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, place: Place, *, small: bool = False, plain: bool = False) -> Client:
        """Raises OSError where the server does not take it. `plain`: without TLS, though it is spoken there."""
        line = socket.socket()
        line.setblocking(False)
        if small:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", place.port))
        secure: dict[str, Any] = {}
        if place.tls is not None and not plain:
            secure = {"ssl": place.tls, "server_hostname": "127.0.0.1", "ssl_handshake_timeout": place.patience}
        return cls(line, *await asyncio.open_connection(sock=line, limit=BITE if small else 1 << 20, **secure))

    async def status(self) -> int:
        """Reads a head; its status, or 0 where the server closed instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, *BROKEN):
            return 0
        return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0

    async def rest(self, *, pause: float = 0.0) -> bytes:
        """All until the server closes, in bites where there is a pause; what came before it broke off."""
        taken = b""
        try:
            while data := await self.reader.read(BITE if pause else 1 << 20):
                taken += data
                if pause:
                    await asyncio.sleep(pause)
        except BROKEN:
            pass
        return taken

    async def ended(self) -> str:
        """What it is told, 0 for nothing, when the server has closed and it has hung up."""
        status = await self.status()
        await self.rest()
        self.leave()
        return str(status)

    @property
    def established(self) -> bool:
        """Whether nobody has ended the connection."""
        try:
            return self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1
        except OSError:
            return False

    def leave(self, *, rudely: bool = False) -> None:
        """Hangs up, with a reset where it is done rudely."""
        if rudely:
            with contextlib.suppress(OSError):  # it is closed already
                self.line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        self.writer.close()


def joined(body: bytes) -> bytes | None:
    """A body that came in chunks; None where it is not complete."""
    pieces, at = [], 0
    while True:
        end = body.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + size + 4


def said(body: bytes) -> str | None:
    """The text of an answer, as a stream in chunks or whole; None where it is none, or not a complete one."""
    if not body.startswith(b"{"):
        whole = joined(body)
        if whole is None:
            return None
        body = whole
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
    client = await Client.connect(place)
    client.writer.write(place.request(body, close=True))
    status = await client.status()
    body = await client.rest()
    client.leave()
    return judged(place, number, status, body)


async def slow_sender(place: Place, number: int, rng: random.Random) -> str:
    """Sends its request in a dozen pieces."""
    data = place.request(place.asking(number), close=True)
    client = await Client.connect(place)
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
    client = await Client.connect(place, small=True)
    client.writer.write(place.request(place.asking(number, stream=True), close=True))
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
    client = await Client.connect(place, small=True)
    much = {"n": 2, "logprobs": True, "top_logprobs": 20, "max_tokens": 400, "ignore_eos": True}
    client.writer.write(place.request(place.asking(number, stream=True, **much)))
    client.writer.transport.pause_reading()
    for _ in range(int(place.patience / 0.1)):
        await asyncio.sleep(0.1)
        if not client.established:
            client.leave()
            return "cut"
    client.leave(rudely=True)
    return "kept"


async def vanishes(place: Place, number: int, rng: random.Random) -> str:
    """Leaves as soon as the first of a stream has come, or while it waits for an answer, politely or not."""
    stream = number % 3 > 0
    client = await Client.connect(place)
    client.writer.write(place.request(place.asking(number, stream=stream, max_tokens=400, ignore_eos=True)))
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
    data = place.request(place.asking(number))
    head = data.index(b"\r\n\r\n")
    cut = rng.randrange(5, head) if number % 2 else rng.randrange(head + 4, len(data))
    client = await Client.connect(place)
    client.writer.write(data[:cut])
    if number % 3 == 0:
        await client.writer.drain()
        client.leave(rudely=number % 2 == 0)
        return "left"
    return await client.ended()


async def silent(place: Place, number: int, rng: random.Random) -> str:
    """Connects and says nothing, before TLS or after."""
    client = await Client.connect(place, plain=number % 2 == 0)
    status = await client.status()
    client.leave()
    return str(status)


async def garbage(place: Place, number: int, rng: random.Random) -> str:
    """Sends what is no HTTP: the beginning of TLS, or anything; where TLS is spoken, within it or instead of it."""
    client = await Client.connect(place, plain=number % 2 == 0)
    client.writer.write(b"\x16\x03\x01" + rng.randbytes(rng.randrange(1, 3000)))
    return await client.ended()


async def wrong(place: Place, number: int, rng: random.Random) -> str:
    """Sends HTTP, and in it what is no request."""
    bodies = [b"{", b"[]", rng.randbytes(200), place.asking(number, temperature=-1), place.asking(number, n=10**9)]
    client = await Client.connect(place)
    client.writer.write(place.request(bodies[number % len(bodies)], close=True))
    return await client.ended()


async def too_large(place: Place, number: int, rng: random.Random) -> str:
    """Sends a body that is larger than the server takes, all of it."""
    client = await Client.connect(place)
    client.writer.write(place.request(b" " * (place.body_bytes + 1)))
    return await client.ended()


async def stranger(place: Place, number: int, rng: random.Random) -> str:
    """Has no key, or a wrong one."""
    keys = ("", "wrong", place.key + "x", place.key[:-1])
    client = await Client.connect(place)
    client.writer.write(place.request(place.asking(number), close=True, key=keys[number % len(keys)]))
    return await client.ended()


def form(content: bytes) -> bytes:
    """A file for a batch, as a form."""
    purpose = b'--weir\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head = b'--weir\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return purpose + head + content + b"\r\n--weir--\r\n"


def lines(place: Place, number: int, rng: random.Random) -> bytes:
    """What is in a file: up to half of what it may have."""
    line = json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": {}}) + "\n"
    return line.encode() * rng.randrange(1, place.file_bytes // 2 // len(line))


async def asked(place: Place, line: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """One request: its status and body."""
    client = await Client.connect(place)
    client.writer.write(place.request(body, line=line, kind=FORM if body else b"application/json", close=True))
    status, answer = await client.status(), await client.rest()
    client.leave()
    return status, answer


async def uploads(place: Place, number: int, rng: random.Random) -> str:
    """Stores a file, reads it, and deletes it."""
    content = lines(place, number, rng)
    status, answer = await asked(place, b"POST /v1/files", form(content))
    if status != 200:
        return str(status)
    name = json.loads(answer)["id"].encode()
    read = await asked(place, b"GET /v1/files/%b/content" % name)
    gone = await asked(place, b"DELETE /v1/files/%b" % name)
    return "right" if (read[0], joined(read[1]), gone[0]) == (200, content, 200) else "wrong"


async def half_upload(place: Place, number: int, rng: random.Random) -> str:
    """Sends a part of a file, waits a moment and leaves."""
    data = place.request(form(lines(place, number, rng)), line=b"POST /v1/files", kind=FORM)
    client = await Client.connect(place)
    client.writer.write(data[: rng.randrange(len(data) // 4, len(data) - 1)])
    await client.writer.drain()
    await asyncio.sleep(rng.uniform(0, 1))
    client.leave(rudely=number % 2 == 0)
    return "left"


async def no_upload(place: Place, number: int, rng: random.Random) -> str:
    """Uploads what is no form, or no file of a batch."""
    content = lines(place, number, rng)
    bodies = [b"--other\r\n\r\n", form(content)[:-20], form(content).replace(b"batch", b"x", 1), rng.randbytes(300)]
    return str((await asked(place, b"POST /v1/files", bodies[number % len(bodies)]))[0])


async def large_upload(place: Place, number: int, rng: random.Random) -> str:
    """Uploads more than the server takes."""
    client = await Client.connect(place)
    body = form(b" " * (place.file_bytes + (1 << 20)))
    client.writer.write(place.request(body, line=b"POST /v1/files", kind=FORM))
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
WITH_KEY: dict[Kind, tuple[int, set[str]]] = {stranger: (15, {"401"})}
WITH_FILES: dict[Kind, tuple[int, set[str]]] = {
    uploads: (12, {"right"}),
    half_upload: (15, {"left"}),
    no_upload: (5, {"400"}),
    large_upload: (2, {"413"}),
}
"""And how many more beside a hundred."""


def kinds_of(place: Place) -> dict[Kind, tuple[int, set[str]]]:
    """Those that come to a place."""
    found = KINDS | (WITH_KEY if place.key else {}) | (WITH_FILES if place.file_bytes else {})
    if place.tls is not None:
        found |= {garbage: (KINDS[garbage][0], {"0", "400"})}  # closed, where it is not even TLS
    return found


async def known(place: Place) -> None:
    """Asks each ordinary request alone."""
    for number in range(len(TOPICS)):
        client = await Client.connect(place)
        client.writer.write(place.request(place.asking(number), close=True))
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
    known_kinds = kinds_of(place)
    kinds = [kind for kind, (share, _) in known_kinds.items() for _ in range(share)]
    ends: dict[str, collections.Counter[str]] = {kind.__name__: collections.Counter() for kind in known_kinds}

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


def amiss(place: Place, ends: dict[str, collections.Counter[str]]) -> dict[str, dict[str, int]]:
    """Ends that should not be, by kind; empty where all is well."""
    found = {}
    for kind, (_, may) in kinds_of(place).items():
        odd = {end: count for end, count in ends[kind.__name__].items() if end not in may}
        if odd:
            found[kind.__name__] = odd
    return found
