"""A server that does what it is told: for each request a script of bytes and when they are written.

Every metric of what it sends follows by arithmetic. `python -m tests.measure.mock` runs it alone, for `bench/load.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import uvloop

Body = dict[str, Any]
Step = tuple[float, bytes]
"""Seconds after the request came, and bytes of the body that are then written."""

HANG_UP = b""
"""As the bytes of a step: the connection is closed there."""


@dataclass
class Script:
    """What a request is answered. `status` other than 200 answers with `error` at once. `until_close`: the body has no
    length, and ends with the connection."""

    steps: Sequence[Step] = ()
    status: int = 200
    error: Any = None
    until_close: bool = False


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def piece(text: str, *, chat: bool = True, **delta: Any) -> bytes:
    """A chunk that carries text, or what else a delta has."""
    choice = {"delta": {"content": text, **delta}} if chat else {"text": text}
    return event({"choices": [{"index": 0, "finish_reason": None, **choice}]})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counted = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return event({"choices": [], "usage": {**counted, **details}})


def prompt_tokens(body: Body) -> int:
    """This server's tokenizer: a word is a token, a token id is one, and a chat has three more."""
    if "messages" in body:
        return 3 + sum(len(str(message["content"]).split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


def steady(first: float = 0.0, gap: float = 0.0, *, per_chunk: int = 1) -> Callable[[Body], Script]:
    """`max_tokens` tokens: the first chunk after `first` seconds, then one each `gap` seconds."""
    pieces = {chat: piece("x" * per_chunk, chat=chat) for chat in (True, False)}

    def script(body: Body) -> Script:
        count = body["max_tokens"]
        said = pieces["messages" in body]
        steps = [(first + gap * place, said) for place in range(-(-count // per_chunk))]
        last, end = steps.pop()
        tail = end + FINISH + usage(prompt_tokens(body), count) + DONE
        role = [(0.0, ROLE)] if "messages" in body else []
        return Script([*role, *steps, (last, tail)])

    return script


def refuse(status: int = 503, message: str = "no room") -> Callable[[Body], Script]:
    return lambda _: Script(status=status, error={"error": {"message": message}})


@dataclass
class Mock:
    """What was asked, and how it is answered."""

    answer: Callable[[Body], Script] = field(default_factory=steady)
    requests: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    keep: bool = True
    connections: int = 0
    hung_up: int = 0
    url: str = ""


class _Connection(asyncio.Protocol):
    def __init__(self, mock: Mock) -> None:
        self._mock = mock
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._parser = httptools.HttpRequestParser(self)
        self._mock.connections += 1
        self._timer: asyncio.TimerHandle | None = None
        self._clear()

    def _clear(self) -> None:
        self._body, self._url, self._headers = b"", b"", {}

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._mock.hung_up += 1

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        url, content, headers = self._url, self._body, self._headers
        self._clear()
        if url.endswith(b"/models"):
            self._whole(200, {"data": [{"id": "mock"}]})
            return
        body = json.loads(content)
        if self._mock.keep:
            self._mock.requests.append(body)
            self._mock.headers.append(headers)
        script = self._mock.answer(body)
        if script.status != 200:
            self._whole(script.status, script.error)
            return
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        self._transport.write(head + (b"\r\n" if script.until_close else b"Transfer-Encoding: chunked\r\n\r\n"))
        self._begun, self._script, self._step = self._loop.time(), script, 0
        self._next()

    def _next(self) -> None:
        """Waits for the next step's time; what is due is written at once."""
        steps = self._script.steps
        while self._step < len(steps):
            at, data = steps[self._step]
            if (due := self._begun + at) > self._loop.time():
                self._timer = self._loop.call_at(due, self._next)
                return
            self._step += 1
            self._write(data, self._step == len(steps))
        self._timer = None

    def _write(self, data: bytes, last: bool) -> None:
        raw = self._script.until_close
        if data == HANG_UP:
            self._transport.close()
            return
        self._transport.write(data if raw else b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if last else b""))
        if raw and last:
            self._transport.close()

    def _whole(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode() if not isinstance(answer, bytes) else answer
        self._transport.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content))


async def _listen(mock: Mock, port: int = 0) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(mock), "127.0.0.1", port, backlog=4096)
    mock.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return server


@contextmanager
def running(answer: Callable[[Body], Script] | None = None) -> Iterator[Mock]:
    """A mock server in a thread of its own."""
    mock = Mock(answer or steady())
    loop = uvloop.new_event_loop()
    ready = threading.Event()

    async def main() -> None:
        server = await _listen(mock)
        ready.set()
        await stop.wait()
        server.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield mock
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _alone(first: float, gap: float) -> None:
    mock = Mock(steady(first, gap), keep=False)
    server = await _listen(mock)
    print(mock.url, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_alone(float(sys.argv[1]), float(sys.argv[2])))
