"""Clients that leave, queues that fill, engines that die, servers that are told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.api.conftest import Running, launch, until
from tests.api.stand import CRASH, FIRST_BYTE, HANG, RAISE, SAY

LONG = {"model": "stand", "prompt": "go on", "max_tokens": 1500, "ignore_eos": True}
SHORT = {"model": "stand", "prompt": "hi", "max_tokens": 2}


def busy(server: Running) -> tuple[float, float, float]:
    """Requests running and waiting, and pages held."""
    return (
        server.metric("tailrace_num_requests_running"),
        server.metric("tailrace_num_requests_waiting"),
        server.metric("tailrace_kv_pages_used"),
    )


def send(server: Running, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request on a raw socket, sent and not waited for."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


class Background:
    """A request in a thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.value: Any = None
        self.took = 0.0
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self.value = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks
            self.error = error
        self.took = time.monotonic() - start

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(30)
        assert self.ended, "the request never ended"
        return self.value


def long_stream(server: Running, seen: list[str]) -> str:
    """Streams with the official client into `seen`."""
    options: dict[str, Any] = {key: value for key, value in LONG.items() if key != "ignore_eos"}
    for chunk in server.client().completions.create(**options, stream=True, extra_body={"ignore_eos": True}):
        seen.append(chunk.choices[0].text)
    return "".join(seen)


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_what_it_held_within_a_second(slow: Running, stream: bool) -> None:
    aborted = slow.metric("tailrace_request_success_total", finished_reason="abort")
    stopped = slow.metric("tailrace_request_success_total", finished_reason="stop")
    connections = [send(slow, {**LONG, "stream": stream}) for _ in range(2)]
    until(lambda: busy(slow)[:2] == (2, 0), "two running")
    connections += [send(slow, {**LONG, "stream": stream}) for _ in range(2)]
    until(lambda: busy(slow)[:2] == (2, 2), "two waiting")
    for connection in connections:
        connection.close()
    start = time.monotonic()
    until(lambda: busy(slow) == (0, 0, 0), "nothing held")
    assert time.monotonic() - start < 1.5
    assert slow.metric("tailrace_request_success_total", finished_reason="abort") == aborted + 4
    assert slow.metric("tailrace_request_success_total", finished_reason="stop") == stopped


def test_a_full_queue_is_refused_with_retry_after_and_the_rest_is_served(slow: Running) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: slow.post("/v1/completions", {**SHORT, "max_tokens": 20}), range(12)))
    statuses = [answer.status_code for answer in answers]
    assert 200 in statuses
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
    assert slow.post("/v1/completions", SHORT).status_code == 200


def test_a_request_that_can_never_fit_does_not_block_the_others(fresh: Any) -> None:
    with fresh(kv_tokens=512, max_context=4096) as server:
        big = {"model": "stand", "prompt": "x" * 1000, "max_tokens": 5}
        with ThreadPoolExecutor(11) as pool:
            first = pool.submit(server.post, "/v1/completions", big)
            rest = [pool.submit(server.post, "/v1/completions", SHORT) for _ in range(10)]
            assert first.result().status_code == 400
            assert first.result().json()["error"]["code"] == "context_length_exceeded"
            assert "512" in first.result().json()["error"]["message"]
            assert {one.result().status_code for one in rest} == {200}


def test_a_slow_reader_holds_no_unbounded_buffer_and_is_dropped(fresh: Any) -> None:
    with fresh(timeouts={"send": 1.0}, max_context=2048) as server:
        body = {"model": "stand", "prompt": "a", "n": 8, "max_tokens": 1900, "logprobs": 20, "ignore_eos": True}
        connection = send(server, {**body, "stream": True})
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert server.post("/v1/completions", SHORT).status_code == 200
        dropped = {"endpoint": "completions", "status": "499"}
        until(lambda: server.metric("tailrace_http_requests_total", **dropped) == 1, "the client to be dropped")
        until(lambda: busy(server) == (0, 0, 0), "nothing held")
        connection.close()


def test_a_failed_step_fails_its_requests_and_no_others(quick: Running) -> None:
    answer = quick.post("/v1/completions", {"model": "stand", "prompt": [RAISE, FIRST_BYTE]})
    assert answer.status_code == 500
    assert "told to raise" in answer.json()["error"]["message"]
    assert quick.post("/v1/completions", SHORT).status_code == 200


def engine_changed(server: Running, before: int) -> Callable[[], bool]:
    return lambda: server.engine not in (0, before) and server.get("/health/ready").status_code == 200


@pytest.mark.alone
def test_a_killed_engine_fails_what_it_ran_at_once_and_the_queue_survives(fresh: Any) -> None:
    with fresh(loader="tests.api.stand:load_slow", max_running=1) as server:
        engine = server.engine
        seen: list[str] = []
        running = Background(lambda: long_stream(server, seen))
        until(lambda: seen, "the stream to run")
        waiting = Background(lambda: server.post("/v1/completions", SHORT))
        until(lambda: busy(server)[1] == 1, "one to wait")
        killed = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        running.result()
        assert time.monotonic() - killed < 5
        assert isinstance(running.error, openai.APIError)
        assert "SIGKILL" in str(running.error)
        assert waiting.result().status_code == 200
        until(engine_changed(server, engine), "a new engine")
        assert server.post("/v1/completions", SHORT).status_code == 200
        assert server.metric("tailrace_engine_restarts_total") == 1
        said = [line for line in server.log if line.startswith("tailrace: ")]
        assert len(said) == 2, said
        assert "SIGKILL" in said[0]
        assert "1 requests were lost, 1 kept" in said[0]
        assert "ready again" in said[1]
        finishes = until(lambda: len(server.requests()) >= 3 and server.requests(), "the log")
        assert sorted(line["finish"] for line in finishes) == ["error", "length", "length"]


def test_a_request_that_kills_the_engine_gets_503_and_no_third_engine(fresh: Any) -> None:
    with fresh() as server:
        engine = server.engine
        answer = server.post("/v1/completions", {"model": "stand", "prompt": [CRASH, FIRST_BYTE]})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert answer.headers["retry-after"]
        until(engine_changed(server, engine), "a new engine")
        assert server.post("/v1/completions", SHORT).status_code == 200
        assert server.metric("tailrace_engine_restarts_total") <= 2


@pytest.mark.alone
def test_a_stopped_engine_is_not_healthy_and_is_replaced(fresh: Any) -> None:
    with fresh(loader="tests.api.stand:load_slow", timeouts={"heartbeat": 1.5}) as server:
        engine = server.engine
        seen: list[str] = []
        running = Background(lambda: long_stream(server, seen))
        until(lambda: seen, "the stream to run")
        stopped = time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        until(lambda: server.get("/health").status_code == 503, "the health to say so")
        running.result()
        assert time.monotonic() - stopped < 5
        assert "heartbeat" in str(running.error)
        until(engine_changed(server, engine), "a new engine")
        assert server.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.alone
def test_an_engine_that_makes_no_progress_is_replaced_though_it_beats(fresh: Any) -> None:
    with fresh(timeouts={"hang": 1.5}) as server:
        engine = server.engine
        answer = server.post("/v1/completions", {"model": "stand", "prompt": [HANG, FIRST_BYTE]})
        assert answer.status_code == 503
        assert "progress" in answer.json()["error"]["message"]
        until(engine_changed(server, engine), "a new engine")
        assert server.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.alone
def test_a_step_that_does_not_end_is_noticed_in_five_seconds(fresh: Any) -> None:
    with fresh() as server:
        engine = server.engine
        until(lambda: server.get("/health").status_code == 200, "health")
        begun = time.monotonic()
        answer = server.post("/v1/completions", {"model": "stand", "prompt": [HANG, FIRST_BYTE]})
        assert time.monotonic() - begun < 7  # five, on a machine that does nothing else
        assert answer.status_code == 503
        assert "no progress in a step" in answer.json()["error"]["message"]
        until(engine_changed(server, engine), "a new engine")
        assert server.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.alone
def test_a_machine_that_stood_still_for_a_while_has_lost_nothing(fresh: Any) -> None:
    with fresh(loader="tests.api.stand:load_slow", timeouts={"heartbeat": 1.5, "stuck": 1.5, "hang": 1.5}) as server:
        engine = server.engine
        seen: list[str] = []
        Background(lambda: long_stream(server, seen))
        until(lambda: seen, "the stream to run")
        stopped = (server.process.pid, engine)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + 4.0
        until(lambda: time.monotonic() > end, "some time")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        count = len(seen)
        until(lambda: len(seen) > count + 50, "the stream to go on")
        assert server.engine == engine
        assert server.metric("tailrace_engine_restarts_total") == 0


def test_an_idle_engine_may_rest_longer_than_the_hang_timeout(fresh: Any) -> None:
    with fresh(timeouts={"hang": 0.3}) as server:
        engine = server.engine
        end = time.monotonic() + 1.5
        until(lambda: time.monotonic() > end, "some idle time")
        assert server.engine == engine
        assert server.get("/health").status_code == 200
        assert server.post("/v1/completions", SHORT).status_code == 200


def test_the_engine_ends_with_its_parent(fresh: Any) -> None:
    with fresh() as server:
        engine = server.engine
        server.process.kill()

        def ended() -> bool:
            try:
                os.kill(engine, 0)
            except ProcessLookupError:
                return True
            with open(f"/proc/{engine}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] == "Z"

        until(ended, "the engine to end")


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(fresh: Any) -> None:
    with fresh(loader="tests.api.stand:load_slow") as server:
        text = [FIRST_BYTE + 97] * 60
        running = Background(
            lambda: server.post("/v1/completions", {"model": "stand", "prompt": [*text, SAY], "max_tokens": 60})
        )
        until(lambda: busy(server)[0] == 1, "one to run")
        with server.http() as kept:
            assert kept.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            refused = until(
                lambda: (a := kept.post("/v1/completions", json=SHORT)).status_code == 503 and a, "a refusal"
            )
            assert refused.headers["retry-after"]
        assert running.result().json()["choices"][0]["text"] == "a" * 60
        assert server.wait() == 0


@pytest.mark.alone
def test_a_drain_is_bounded(fresh: Any) -> None:
    with fresh(loader="tests.api.stand:load_slow", timeouts={"drain": 0.5}) as server:
        seen: list[str] = []
        running = Background(lambda: long_stream(server, seen))
        until(lambda: seen, "the stream to run")
        start = time.monotonic()
        assert server.finish() == 0
        assert time.monotonic() - start < 5
        running.result()
        assert running.error is not None


def test_a_second_signal_ends_at_once(fresh: Any) -> None:
    with fresh(loader="tests.api.stand:load_slow") as server:
        seen: list[str] = []
        Background(lambda: long_stream(server, seen))
        until(lambda: seen, "the stream to run")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("finishing" in line for line in server.lines), "the drain")
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 130


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(
    ("loader", "status", "why"),
    [
        ("load_nothing", 1, "this model is not a model"),
        ("load_wrongly", 2, "nobody can do that"),
        ("load_and_die", 1, "the engine process ended: it exited with status 3"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_server_with_its_reason(
    loader: str, status: int, why: str, quiet: bool
) -> None:
    server = launch(loader=f"tests.api.stand:{loader}", quiet=quiet)
    assert server.wait() == status
    assert server.lines == [f"tailrace: cannot serve stand: {why}\n"]
    assert server.log == []


def test_nothing_is_ready_before_the_engine_is(fresh: Any) -> None:
    server = launch(loader="tests.api.stand:load_late", port=0)
    try:
        port = until(lambda: listening(server.process.pid), "the socket")
        server.url = f"http://127.0.0.1:{port}"
        for path in ("/health", "/health/ready", "/v1/models"):
            answer = until(lambda path=path: answered(server, path), "an answer")
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
        assert server.get("/health/live").status_code == 200
        server.wait_ready()
        for path in ("/health", "/health?ready", "/health/ready", "/health/live", "/v1/models"):
            assert server.get(path).status_code == 200
    finally:
        server.process.kill()
        server.wait()


def test_a_template_that_turns_out_broken_is_said_and_the_rest_is_served(fresh: Any) -> None:
    with fresh(model="broken template", served_names=["stand"]) as server:
        until(lambda: "chat requests cannot be served: chat template, line 1" in "".join(server.lines), "the line")
        assert server.get("/health").status_code == 200
        assert server.post("/v1/completions", SHORT).status_code == 200


def listening(pid: int) -> int | None:
    """The port that a process listens on."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except OSError:
            continue
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                return int(fields[1].rsplit(":", 1)[1], 16)
    return None


def answered(server: Running, path: str) -> Any:
    from httpx2 import TransportError

    try:
        return server.get(path)
    except TransportError:
        return None
