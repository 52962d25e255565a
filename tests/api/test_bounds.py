"""No request stops the others, whatever is long in it; and no client makes the server hold what has no bound."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.api.generation import Choice, Generation
from tailrace.api.params import too_long
from tailrace.api.prompts import read_prompts
from tailrace.api.schema import CHAT, MAX_STRINGS, decode, refuse_crowded
from tailrace.api.service import compose
from tailrace.engine.protocol import SamplingParams
from tailrace.terms import InvalidInput
from tailrace.text import Detokenizer
from tests.api.conftest import Running, serving
from tests.api.stand import table

PATIENCE = 0.6
"""Longest that a busy machine may make /health wait, in seconds."""
USER = {"role": "user", "content": "a"}


@contextmanager
def waits(server: Running) -> Iterator[Callable[[], float]]:
    """Asks for /health all along; tells the longest wait."""
    longest = [0.0]
    done = threading.Event()

    def ask() -> None:
        with server.http() as client:
            while not done.is_set():
                start = time.perf_counter()
                assert client.get("/health").status_code == 200
                longest[0] = max(longest[0], time.perf_counter() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield lambda: longest[0]
    finally:
        done.set()
        thread.join()


def chat(message: dict[str, Any], **extra: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "stand", "messages": [message, USER], "max_tokens": 1, **extra}


def calls(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}}]}


MEGA = 1 << 20
LONG: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "content": lambda: chat({"role": "user", "content": "a b " * 2 * MEGA}),
    "one word": lambda: chat({"role": "user", "content": "a" * 8 * MEGA}),
    "content parts": lambda: chat({"role": "user", "content": [{"type": "text", "text": ""}] * 400_000}),
    "reasoning": lambda: chat({"role": "assistant", "content": "a", "reasoning_content": "ab " * 2 * MEGA}),
    "name": lambda: chat({**USER, "name": "x" * 8 * MEGA}),
    "annotations": lambda: chat({"role": "assistant", "content": "a", "annotations": [1] * 4 * MEGA}),
    "template switches": lambda: chat(USER, chat_template_kwargs={"x": ["ab"] * 1_500_000}),
    "one template switch": lambda: chat(USER, chat_template_kwargs={"x": "ab" * 4 * MEGA}),
    "arguments": lambda: chat(calls(json.dumps({"x": "ab " * 2 * MEGA}))),
    "keys of arguments": lambda: chat(calls(json.dumps({str(key): 1 for key in range(300_000)}))),
    "arguments as an object": lambda: chat(calls({"x": [1] * 4 * MEGA})),
    "keys of arguments as an object": lambda: chat(calls({str(key): 1 for key in range(300_000)})),
    "calls": lambda: chat({**calls("{}"), "tool_calls": calls("{}")["tool_calls"] * 100_000}),
    "tools": lambda: chat(USER, tools=[1] * 4 * MEGA),
    "tokenize": lambda: ("/tokenize", {"prompt": "ab " * 3 * MEGA}),
    "tokenize messages": lambda: ("/tokenize", {"messages": [{"role": "user", "content": "ab " * 3 * MEGA}]}),
    "detokenize": lambda: ("/detokenize", {"tokens": [9] * 5_000_000}),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", LONG)
def test_what_cannot_fit_is_refused_and_nobody_else_waits_for_it(quick: Running, name: str) -> None:
    path, body = LONG[name]()
    data = json.dumps(body, separators=(",", ":")).encode()
    assert len(data) < 16 << 20
    with waits(quick) as longest, quick.http() as client:
        answer = client.post(path, content=data, headers={"content-type": "application/json"})
    if name != "annotations":  # they are never looked at
        assert answer.status_code == 400, answer.text[:300]
        assert answer.json()["error"]["param"] or "strings" in answer.text
    assert longest() < PATIENCE


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Running]:
    with serving(model=str(smollm2), loader="", served_names=["stand"], kv_tokens=8192) as running:
        yield running


JUST: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "one word": lambda: chat({"role": "user", "content": "é" * 300_000}),
    "reasoning": lambda: chat({"role": "assistant", "content": "a", "reasoning_content": "ab " * 300_000}),
    "keys of arguments": lambda: chat(calls(json.dumps({str(key): 1 for key in range(60_000)}))),
    "arguments": lambda: chat(calls("<|im_end|>" * 100_000)),
    "template switches": lambda: chat(USER, chat_template_kwargs={"x": ["<|im_end|>"] * 4_000}),
    "tokenize": lambda: ("/tokenize", {"prompt": "ab é" * 250_000, "return_token_strs": True}),
    "tokenize messages": lambda: ("/tokenize", {"messages": [{"role": "user", "content": "é" * 300_000}]}),
    "detokenize": lambda: ("/detokenize", {"tokens": list(range(40_000))}),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", JUST)
def test_what_is_looked_at_is_looked_at_beside_the_others(real: Running, name: str) -> None:
    path, body = JUST[name]()
    with waits(real) as longest:
        answer = real.post(path, body)
    assert answer.status_code in (200, 400), answer.text[:300]
    assert longest() < PATIENCE


def test_long_texts_get_the_same_ids_as_short_ones(real: Running) -> None:
    def ids(words: int) -> list[int]:
        return list(real.post("/tokenize", {"prompt": "ab " * words}).json()["tokens"])

    short, long = ids(1000), ids(2000)  # these are tokenized by different calls
    assert len(short) > 1000
    assert long == short[:500] + short[500:501] * (len(long) - len(short)) + short[500:]


@pytest.mark.parametrize(("tokens", "logprobs", "aside"), [(10, 20, False), (2000, -1, False), (2000, 20, True)])
def test_a_long_answer_is_composed_beside_the_others(tokens: int, logprobs: int, aside: bool) -> None:
    threads: list[int] = []

    class Shape:
        def whole(self, *parts: Any) -> bytes:
            threads.append(threading.get_ident())
            return b"{}"

    params, table_ = SamplingParams(max_tokens=tokens), table()
    choice = Choice(Generation(False), 0, "r", [9] * 5, params, Detokenizer(table_), None, output_tokens=tokens)
    shape: Any = Shape()
    assert asyncio.run(compose(shape, [choice], [], {}, logprobs)) == b"{}"
    assert (threads != [threading.get_ident()]) is aside


def test_strings_are_counted_whatever_they_hold() -> None:
    tricky = r'{"a": "\\", "b": "\"", "c": "\\\"", "d": "[,\\\\"}'
    body = {"messages": [json.loads(tricky)] * (MAX_STRINGS // 8)}
    refuse_crowded(("[" + ",".join([tricky] * (MAX_STRINGS // 8)) + "]").encode())
    with pytest.raises(InvalidInput, match="strings"):
        decode(CHAT, json.dumps([body, tricky]).encode())


@pytest.mark.parametrize(
    "prompts",
    [
        ["[" * 240 + " x\\"],
        ['"' * 300, "a\\"],
        ["\\" * 3, '\\"' * 5, '",' * 200],
        ["," * 5000] * 128,
        [list(range(50))] * 128,
        [1] * 64,
        ['[1,2],["' * 100],
    ],
)
def test_valid_prompts_are_not_taken_for_absurd_ones(prompts: list[Any]) -> None:
    from msgspec import Raw

    expected = [prompts] if isinstance(prompts[0], int) else prompts
    for data in (json.dumps(prompts), json.dumps(prompts, indent=1)):
        assert read_prompts(Raw(data.encode()), 128, 64) == expected


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" + b",".join([b'"\\\\"'] * 129) + b"]", "129 prompts"),
        (b"[" + b",".join([b"[]"] * 129) + b"]", "129 prompts"),
        (b'["a",' + b",".join([b"[]"] * 200) + b"]", "200 prompts"),
        (b"[" + b",".join([b"1"] * 66) + b"]", "65"),
        (b"[[" + b",".join([b"1"] * 150) + b"],[2]]", "65"),
    ],
)
def test_absurd_prompts_are_counted_without_being_decoded(data: bytes, said: str) -> None:
    from tailrace.api.prompts import refuse_absurd

    with pytest.raises(InvalidInput, match=said):
        refuse_absurd(data, 128, 64)
    assert "65" in str(too_long(65, None, 64, "prompt", exact=False))


def ask_raw(server: Running, pieces: Iterator[bytes] | list[bytes]) -> tuple[int, dict[str, str], bytes]:
    """Sends everything, and only then reads: status, headers, body."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        for piece in pieces:
            line.sendall(piece)
        answer = b""
        while more := line.recv(65536):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rows = head.decode().split("\r\n")
    return int(first.split()[1]), dict(row.split(": ", 1) for row in rows), body


HEADS: dict[str, list[bytes]] = {
    "one header": [b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", *[b"y" * MEGA] * 60, b"\r\n\r\n"],
    "many headers": [b"GET /health HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n" * 300_000, b"\r\n"],
    "a little too much": [b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 65_536 + b"\r\n\r\n"],
    "the path": [b"GET /", *[b"y" * MEGA] * 10, b" HTTP/1.1\r\nhost: x\r\n\r\n"],
}


@pytest.mark.parametrize("name", HEADS)
def test_headers_are_bounded(quick: Running, name: str) -> None:
    before = quick.metric("tailrace_http_requests_total", endpoint="other", status="431")
    status, headers, body = ask_raw(quick, HEADS[name])
    assert status == 431
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert quick.metric("tailrace_http_requests_total", endpoint="other", status="431") == before + 1


def test_headers_below_the_bound_are_read(quick: Running) -> None:
    assert quick.get("/health", headers={"x": "y" * 60_000}).status_code == 200
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 60_000 + b"\r\n"
    status, _, body = ask_raw(quick, [head + b"\r\n" + head + b"connection: close\r\n\r\n"])  # two at once
    assert status == 200
    assert body.count(b"HTTP/1.1 200 OK") == 1


def test_trailers_and_chunk_extensions_are_bounded_too(quick: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for rest in ([b"1;", *[b"x" * MEGA] * 4], [b"1\r\n{\r\n0\r\nx: ", *[b"y" * MEGA] * 4]):
        status, headers, body = ask_raw(quick, [head, *rest])
        assert (status, headers["connection"]) == (431, "close")
        assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert quick.get("/health").status_code == 200


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02", b"BREW / HTTP/1.1\r\n\r\n", b"GET / HTTP/9\r\n\r\n"])
def test_what_is_no_http_gets_an_error_in_the_same_shape(quick: Running, data: bytes) -> None:
    status, headers, body = ask_raw(quick, [data])
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_gets_its_413(quick: Running, chunked: bool) -> None:
    size = 40 * MEGA
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + length + b"\r\n\r\n"
    piece = b" " * MEGA
    piece = b"%x\r\n" % len(piece) + piece + b"\r\n" if chunked else piece
    status, headers, body = ask_raw(quick, [head, *[piece] * 40, *([b"0\r\n\r\n"] if chunked else [])])
    assert status == 413
    assert headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "request_too_large"


def test_a_client_that_waits_for_its_413_gets_it_at_once_and_is_not_held(quick: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
    start = time.monotonic()
    status, _, _ = ask_raw(quick, [head])
    assert status == 413
    assert time.monotonic() - start < 10
