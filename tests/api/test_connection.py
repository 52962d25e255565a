"""HTTP as it arrives: in pieces, in a row, slowly, wrongly, and from clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tailrace.api.connection import READ_AHEAD, Connections, http_date
from tailrace.api.errors import HttpError
from tailrace.api.exchange import FREE_BYTES, BodyBudget, ClientGone, Exchange
from tailrace.api.settings import Timeouts
from tests.api.conftest import Running, serving, until

BODY = json.dumps({"model": "stand", "prompt": "hi", "max_tokens": 2}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


def post(body: bytes = BODY, headers: bytes = b"", path: bytes = b"/v1/completions") -> bytes:
    kind = b"content-type: application/json\r\n"
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%b%bcontent-length: %d\r\n\r\n%b" % (path, kind, headers, len(body), body)


def in_chunks(body: bytes, size: int, trailers: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n" + trailers + b"\r\n"


class Line:
    """A raw connection."""

    def __init__(self, server: Running) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, *, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        while b"\r\n\r\n" not in self._held:
            self._more()
        top, _, self._held = self._held.partition(b"\r\n\r\n")
        first, *rows = top.decode().split("\r\n")
        headers = dict(row.split(": ", 1) for row in rows)
        if head_only:
            return int(first.split()[1]), headers, b""
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self._line(), 16):
                body += self._take(size)
                assert self._line() == b""
            assert self._line() == b""
        elif "content-length" in headers:
            body = self._take(int(headers["content-length"]))
        else:
            body = self.rest()
        return int(first.split()[1]), headers, body

    def rest(self) -> bytes:
        """All until the server closes the connection."""
        while data := self.socket.recv(65536):
            self._held += data
        return self._take(len(self._held))

    def _more(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"closed after {self._held!r}"
        self._held += data

    def _line(self) -> bytes:
        while b"\r\n" not in self._held:
            self._more()
        line, _, self._held = self._held.partition(b"\r\n")
        return line

    def _take(self, size: int) -> bytes:
        while len(self._held) < size:
            self._more()
        data, self._held = self._held[:size], self._held[size:]
        return data


@contextmanager
def line(server: Running) -> Iterator[Line]:
    connection = Line(server)
    try:
        yield connection
    finally:
        connection.socket.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server that does not wait for long."""
    with serving(timeouts={"header": 0.4, "keep_alive": 1, "body": 0.4}) as server:
        yield server


REQUEST = in_chunks(BODY, 7, b"x-request-id: trailer\r\n")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, len(REQUEST)])
def test_a_request_may_be_cut_anywhere(size: int) -> None:
    """Every position is one for some of the sizes; a trailer is a header of neither this request nor the next."""
    seen: list[tuple[str, str, bytes, list[tuple[bytes, bytes]]]] = []

    async def application(exchange: Exchange) -> None:
        body = await exchange.body(1000, 1.0, BodyBudget(1000)) if exchange.method == "POST" else b""
        seen.append((exchange.method, exchange.path, body, exchange.headers))
        await exchange.answer(200, b"{}")

    async def talk() -> None:
        data = REQUEST + VERSION
        protocol, transport = connected(application)
        for at in range(0, len(data), size):
            protocol.data_received(data[at : at + size])
            await asyncio.sleep(0)
        await settled(lambda: len(seen) == 2)
        assert transport.written.count(b"HTTP/1.1 200 OK\r\n") == 2

    asyncio.run(talk())
    assert [one[:3] for one in seen] == [("POST", "/v1/completions", BODY), ("GET", "/version", b"")]
    assert [name for name, _ in seen[0][3]] == [b"host", b"transfer-encoding"]
    assert [name for name, _ in seen[1][3]] == [b"host"]


class Transport(asyncio.Transport):
    """Takes everything until told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.unsent = 0
        self.reading = True
        self.closed = ""

    def write(self, data: Any) -> None:
        self.written += bytes(data)
        self.writes += 1

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = self.closed or "half"

    def close(self) -> None:
        self.closed = "closed"

    def abort(self) -> None:
        self.closed = "aborted"

    def is_closing(self) -> bool:
        return self.closed in ("closed", "aborted")

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unsent


def connected(application: Any, **timeouts: Any) -> tuple[Any, Transport]:
    """A connection to an application, and the transport below it."""
    protocol = Connections(application, Timeouts(**timeouts), lambda _name, _status: None).accept()
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport


async def settled(holds: Any) -> None:
    for _ in range(200):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


def test_a_body_that_nobody_reads_stops_the_client() -> None:
    async def talk() -> None:
        read = asyncio.Event()

        async def application(exchange: Exchange) -> None:
            await read.wait()
            await exchange.answer(200, b"%d" % len(await exchange.body(1 << 20, 1.0, BodyBudget(1 << 20))))

        protocol, transport = connected(application)
        data = post(b" " * (READ_AHEAD * 4)) + VERSION
        protocol.data_received(data)
        await asyncio.sleep(0)
        assert not transport.reading
        read.set()
        await settled(lambda: transport.written.endswith(b"\r\n\r\n%d" % (READ_AHEAD * 4)))
        assert transport.reading

    asyncio.run(talk())


def test_a_body_in_tiny_pieces_takes_no_more_memory_than_its_bytes() -> None:
    size = 60_000

    async def talk() -> None:
        async def application(exchange: Exchange) -> None:
            await exchange.answer(200, b"%d" % len(await exchange.body(size, 60.0, BodyBudget(size))))

        data = in_chunks(b" " * size, 2)
        protocol, transport = connected(application)
        tracemalloc.start()
        try:
            for at in range(0, len(data) - 5, 4096):
                protocol.data_received(data[at : min(at + 4096, len(data) - 5)])
                await asyncio.sleep(0)
            assert tracemalloc.get_traced_memory()[0] < 2 * size
        finally:
            tracemalloc.stop()
        protocol.data_received(data[-5:])
        await settled(lambda: transport.written.endswith(b"\r\n\r\n%d" % size))

    asyncio.run(talk())


def test_a_caller_has_half_of_the_budget_or_one_body() -> None:
    budget = BodyBudget(100)
    budget.take("one", 50, 50)
    with pytest.raises(HttpError, match="from the same") as refused:
        budget.take("one", 1, 1)
    assert refused.value.status == 503
    budget.give("one", 51)
    budget.take("one", 40, 40)
    budget.take("one", 50, 90)  # all in one body
    budget.take("two", 10, 10)
    with pytest.raises(HttpError, match=r"at once$"):
        budget.take("three", 1, 1)
    for who, size in (("one", 90), ("two", 10), ("three", 1)):
        budget.give(who, size)
    assert (budget.used, budget.shares) == (0, {})


def test_whoever_holds_large_bodies_back_keeps_nobody_else_from_sending_theirs() -> None:
    def large(key: bytes) -> bytes:
        body = json.dumps({"prompt": "hi"}).encode().ljust(1 << 20)
        return post(body, b"authorization: Bearer %b\r\n" % key, b"/tokenize")

    def status(key: bytes, size: int) -> int:
        body = json.dumps({"prompt": "hi"}).encode().ljust(size)
        with line(server) as client:
            client.send(post(body, b"authorization: Bearer %b\r\n" % key, b"/tokenize"))
            return client.answer()[0]

    with serving(api_keys=["one", "two"], limits={"bodies_bytes": 4 << 20}) as server:
        with line(server) as first, line(server) as second, line(server) as third:
            lines = {client.socket: client for client in (first, second, third)}
            for client in lines.values():
                client.send(large(b"one")[:-1])
            answered = select.select(list(lines), [], [], 20)[0]  # two bodies are its share, whichever came first
            assert [lines[found].answer()[0] for found in answered] == [503]
            assert status(b"two", 1 << 20) == 200
            assert status(b"one", FREE_BYTES) == 200
        until(lambda: status(b"one", 2 << 20) == 200, "the bodies to be given up")


def test_a_piece_is_one_write_and_waits_for_a_client_that_does_not_read() -> None:
    async def talk() -> None:
        exchanges: list[Exchange] = []

        async def application(exchange: Exchange) -> None:
            exchanges.append(exchange)
            await exchange.begin(200, [])
            for _ in range(3):
                await exchange.write(b"x" * 10)
            await exchange.write(b"end", more=False)

        protocol, transport = connected(application, send=5.0)
        transport.unsent = 1 << 20
        protocol.pause_writing()
        protocol.data_received(VERSION)
        await asyncio.sleep(0)
        assert exchanges
        assert not exchanges[0].writable
        assert transport.writes == 0
        protocol.resume_writing()
        await settled(lambda: exchanges[0].ended)
        assert transport.writes == 5  # a head, three pieces, and the last with the end
        assert transport.written.endswith(b"\r\n\r\n" + b"a\r\nxxxxxxxxxx\r\n" * 3 + b"3\r\nend\r\n0\r\n\r\n")
        # What is left over once all is written must be taken too, at some pace.
        transport.unsent = 1 << 20
        protocol.pause_writing()
        now = protocol.blocked_since
        transport.unsent -= 1 << 17
        protocol.sweep(now + 6)
        assert not transport.closed
        protocol.sweep(now + 12)
        assert transport.closed == "aborted"

    asyncio.run(talk())


def test_a_client_that_sends_nothing_more_and_takes_nothing_is_cut_off() -> None:
    """Also below the mark from which writing is paused: nobody else would ever look at the connection again."""

    async def talk() -> None:
        async def application(exchange: Exchange) -> None:
            await exchange.answer(200, b"x" * 40_000)

        protocol, transport = connected(application, send=5.0)
        protocol.data_received(VERSION)
        await settled(lambda: len(transport.written) > 40_000)
        transport.unsent = 33_000
        assert not protocol.eof_received()
        assert transport.closed == "closed"
        assert protocol.blocked_since
        protocol.sweep(protocol.blocked_since + 6)
        assert transport.closed == "aborted"

    asyncio.run(talk())


def test_an_application_that_fails_half_way_cuts_the_answer_rather_than_ending_it() -> None:
    async def talk() -> None:
        async def application(exchange: Exchange) -> None:
            await exchange.begin(200, [])
            await exchange.write(b"half")

        protocol, transport = connected(application)
        protocol.data_received(VERSION)
        await settled(lambda: transport.closed == "aborted")
        assert not transport.written.endswith(b"0\r\n\r\n")

    asyncio.run(talk())


def test_whoever_waits_for_a_client_hears_that_it_has_left() -> None:
    async def talk(data: bytes) -> str:
        heard: list[str] = []

        async def application(exchange: Exchange) -> None:
            try:
                await exchange.body(1000, 5.0, BodyBudget(1000))
                await exchange.gone()
                await exchange.answer(200, b"")  # to nobody
                heard.append("gone")
            except ClientGone:
                heard.append("cut")

        protocol, transport = connected(application)
        protocol.data_received(data)
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        await settled(lambda: heard)
        assert transport.written == b""
        return heard[0]

    assert asyncio.run(talk(post())) == "gone"
    assert asyncio.run(talk(post()[:-1])) == "cut"


def test_dates_are_those_of_the_rfc() -> None:
    assert http_date(784111777) == b"Sun, 06 Nov 1994 08:49:37 GMT"


def test_requests_in_a_row_are_answered_in_their_order(slow: Running) -> None:
    requests = [post(), HEALTH, post(json.dumps({"model": "no", "prompt": ""}).encode()), VERSION, post(), HEALTH]
    with line(slow) as client:
        client.send(b"".join(requests))
        answers = [client.answer() for _ in requests]
        assert [status for status, _, _ in answers] == [200, 200, 404, 200, 200, 200]
        assert "version" in json.loads(answers[3][2])
        client.send(HEALTH * 5000)  # more than is held at once
        assert {client.answer()[0] for _ in range(5000)} == {200}


def test_the_answers_before_what_is_no_request_are_given(slow: Running) -> None:
    with line(slow) as client:
        client.send(post() + b"\x16\x03\x01\r\n\r\n")
        assert client.answer()[0] == 200
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert client.rest() == b""


TO_CHUNKS = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
NO_BODIES = {
    "negative": TO_CHUNKS + b"-1\r\n",
    "huge": TO_CHUNKS + b"ffffffffffffffffff\r\n",
    "after a good chunk": TO_CHUNKS + b"1\r\n{\r\nx\r\n",
    "longer than it says": TO_CHUNKS + b"1\r\n{}}\r\n",
    "unknown coding": TO_CHUNKS.replace(b"chunked", b"xchunked") + b"1\r\n{\r\n",
    "unknown coding of what needs no body": TO_CHUNKS.replace(b"chunked", b"xchunked").replace(b"POST", b"GET"),
}


@pytest.mark.parametrize("name", NO_BODIES)
def test_a_body_that_cannot_be_read_gets_an_answer_after_those_before_it(slow: Running, name: str) -> None:
    with line(slow) as client:
        client.send(post() + NO_BODIES[name])
        assert client.answer()[0] == 200
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert client.rest() == b""
        until(lambda: any(headers["x-request-id"] in entry for entry in slow.log), "its line in the log")


def test_a_body_that_turns_out_to_be_none_is_refused_by_whoever_reads_it() -> None:
    async def talk() -> None:
        faults: list[HttpError] = []

        async def application(exchange: Exchange) -> None:
            try:
                await exchange.body(1000, 60.0, BodyBudget(1000))
            except HttpError as error:
                faults.append(error)
                await exchange.refuse(error)

        protocol, transport = connected(application)
        protocol.data_received(TO_CHUNKS + b"1\r\n{\r\n")
        await asyncio.sleep(0)
        protocol.data_received(b"-1\r\n" + VERSION)
        await settled(lambda: transport.closed == "half")
        assert [error.status for error in faults] == [400]
        assert transport.written.count(b"HTTP/1.1 ") == 1

    asyncio.run(talk())


def test_what_was_answered_before_its_body_went_wrong_keeps_its_answer(quick: Running) -> None:
    with line(quick) as client:
        client.send(TO_CHUNKS.replace(b"/v1/completions", b"/nowhere"))
        assert client.answer()[0] == 404
        client.send(b"-1\r\n")
        assert client.rest() == b""


def test_a_connection_is_kept_closed_and_dated_as_http_says(quick: Running) -> None:
    with line(quick) as client:
        for _ in range(3):
            client.send(HEALTH)
            status, headers, _ = client.answer()
            assert status == 200
            assert "connection" not in headers
            assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", headers["date"])
        client.send(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers, _ = client.answer(head_only=True)
        assert int(headers["content-length"]) > 0
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + HEALTH)
        status, headers, _ = client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert client.rest() == b""  # and the second was not served


def test_http_1_0_gets_a_stream_without_chunks(quick: Running) -> None:
    data = json.dumps({"model": "stand", "prompt": "hi", "max_tokens": 3, "stream": True}).encode()
    with line(quick) as client:
        client.send(post(data, b"connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")


def test_another_protocol_is_not_taken_up_and_the_body_is_read(quick: Running) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    with line(quick) as client:
        client.send(post(headers=offer))
        assert client.answer()[0] == 200
        client.send(HEALTH)
        assert client.answer()[0] == 200
        client.send(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.answer()[0] == 400


def test_who_asks_before_sending_a_body_is_told_to_go_on(quick: Running) -> None:
    request = post(headers=b"expect: 100-continue\r\n")
    with line(quick) as client:
        client.send(request[: -len(BODY)])
        assert client.answer(head_only=True)[0] == 100
        client.send(BODY)
        status, headers, _ = client.answer()
        assert (status, "connection" in headers) == (200, False)
        client.send(request[: -len(BODY)].replace(b"/v1/completions", b"/nowhere"))
        status, headers, _ = client.answer()  # the client need not send what it has announced
        assert (status, headers["connection"]) == (404, "close")


def test_a_body_that_was_not_wanted_does_not_harm_the_next_request(quick: Running) -> None:
    with line(quick) as client:
        client.send(post(b" " * (1 << 20), path=b"/nowhere") + HEALTH)
        assert client.answer()[0] == 404
        assert client.answer()[0] == 200


def test_slow_heads_are_refused_and_silence_is_closed(hasty: Running) -> None:
    with line(hasty) as silent, line(hasty) as slow, line(hasty) as later, line(hasty) as kept:
        start = time.monotonic()
        slow.send(HEALTH[:-2])
        later.send(HEALTH)
        assert later.answer()[0] == 200
        later.send(b"GET")
        kept.send(HEALTH)
        assert kept.answer()[0] == 200
        assert silent.rest() == b""
        for client in (slow, later):
            status, headers, body = client.answer()
            assert (status, headers["connection"]) == (408, "close")
            assert json.loads(body)["error"]["code"] == "headers_timeout"
            assert client.rest() == b""
        assert kept.rest() == b""
        assert 0.4 <= time.monotonic() - start < 10
    refused = {"endpoint": "other", "status": "408"}
    assert hasty.metric("tailrace_http_requests_total", **refused) == 2


def test_a_head_that_drips_is_late_all_the_same(hasty: Running) -> None:
    start = time.monotonic()  # before the server can know of the connection
    with line(hasty) as client:
        client.socket.settimeout(0.05)
        data = b"GET /health HTTP/1.1\r\nx: "
        while time.monotonic() - start < 10:
            try:
                client.send(data)
                data = b"y"
                assert b" 408 " in client.socket.recv(65536)
                break
            except TimeoutError:
                continue
        assert 0.4 <= time.monotonic() - start < 10


def test_a_slow_body_is_refused_and_the_connection_closed(hasty: Running) -> None:
    with line(hasty) as client:
        client.send(post()[:-1])
        status, headers, _ = client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert client.rest() == b""


def test_clients_that_leave_early_leave_nothing_behind(quick: Running) -> None:
    gone = {"endpoint": "completions", "status": "499"}
    before = quick.metric("tailrace_http_requests_total", **gone)
    for at in (0, 10, len(post()) - len(BODY), len(post()) - 1):
        with line(quick) as client:
            client.send(post()[:at])
    until(lambda: quick.metric("tailrace_http_requests_total", **gone) == before + 2, "two to be counted")
    assert quick.get("/health").status_code == 200
