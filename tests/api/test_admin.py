"""What an operator can do, and nobody else."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.conftest import DEADLINE, Running, serving, until

CHAT = {"model": "stand", "messages": [{"role": "user", "content": "hello there"}]}
LONG = {**CHAT, "max_tokens": 1500, "ignore_eos": True}
USER = {"authorization": "Bearer user"}
OPERATOR = {"authorization": "Bearer operator"}
PATHS = {
    "state": "GET",
    "requests": "GET",
    "requests/x": "GET",
    "abort": "POST",
    "pause": "POST",
    "resume": "POST",
    "drain": "POST",
    "reset_prefix_cache": "POST",
    "log_level": "POST",
    "sleep": "POST",
    "wake": "POST",
    "is_sleeping": "GET",
    "profile": "POST",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(loader="tests.api.stand:load_slow", api_keys=["user"], admin_keys=["operator"]) as running:
        yield running


def do(server: Running, verb: str, body: Any = None, status: int = 200) -> Any:
    with server.http(headers=OPERATOR) as client:
        answer = client.post(f"/admin/{verb}", json=body) if body is not None else client.post(f"/admin/{verb}")
    assert answer.status_code == status, answer.text
    return answer.json()


def see(server: Running, path: str) -> Any:
    answer = server.get(f"/admin/{path}", headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Running1:
    """A long request in a thread, whose answer has begun."""

    def __init__(self, server: Running, name: str, **body: Any) -> None:
        self.answer: Any = None
        self._server, self._name, self._body = server, name, {**LONG, **body}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(self._begun, "it to run")

    def _begun(self) -> bool:
        rows = see(self._server, "requests")["data"]
        return any(one["http_request"] == self._name and one["output_tokens"] > 1 for one in rows)

    def _run(self) -> None:
        headers = {**USER, "x-request-id": self._name}
        self.answer = self._server.post("/v1/chat/completions", self._body, headers=headers)

    def wait(self) -> Any:
        self._thread.join(DEADLINE)
        return self.answer


@pytest.mark.parametrize("path", PATHS)
def test_no_admin_endpoint_is_reached_with_another_key(server: Running, path: str) -> None:
    with server.http() as client:
        for headers, status in ((USER, 403), ({}, 401), ({"authorization": "Bearer x"}, 401)):
            answer = client.request(PATHS[path], f"/admin/{path}", headers=headers)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        wrong = "POST" if PATHS[path] == "GET" else "GET"
        assert client.request(wrong, f"/admin/{path}", headers=OPERATOR).status_code == 405
    assert see(server, "state")["draining"] is False


def test_where_there_are_no_admin_keys_there_is_no_administration(quick: Running) -> None:
    for path, method in PATHS.items():
        with quick.http() as client:
            answer = client.request(method, f"/admin/{path}", headers=OPERATOR)
        assert answer.status_code == 403
        assert "--admin-key-file" in answer.json()["error"]["message"]
    assert quick.get("/admin/nothing").status_code == 404


def test_an_admin_key_is_for_nothing_else(server: Running) -> None:
    answer = server.post("/v1/chat/completions", CHAT, headers=OPERATOR)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "insufficient_scope"
    assert server.get("/metrics", headers=OPERATOR).status_code == 200


@pytest.mark.parametrize(
    ("verb", "body", "param"),
    [
        ("abort", {}, "request"),
        ("abort", {"request": 5}, "request"),
        ("abort", {"request": "a", "more": 1}, "more"),
        ("abort", {"request": "a", "all": True}, "all"),
        ("sleep", {"level": 2}, "level"),
        ("sleep", {"running": "kill"}, "running"),
        ("profile", {}, "seconds"),
        ("profile", {"seconds": 0}, "seconds"),
        ("profile", {"seconds": 1e9}, "seconds"),
        ("profile", {"steps": 0}, "steps"),
        ("log_level", {}, "level"),
        ("log_level", {"engine": "loud"}, "engine"),
        ("pause", {"running": "kill"}, "running"),
        ("log_level", {"level": "all"}, "level"),
        ("resume", {"x": 1}, "x"),
        ("reset_prefix_cache", [], None),
    ],
)
def test_wrong_bodies_are_refused_by_name(server: Running, verb: str, body: Any, param: str | None) -> None:
    error = do(server, verb, body, 400)["error"]
    assert error["param"] == param
    assert see(server, "state")["paused"] is False


def test_a_request_is_aborted_by_either_of_its_ids(server: Running) -> None:
    for by in ("request", "http_request"):
        running = Running1(server, f"abort-me-{by}")
        (row,) = see(server, "requests")["data"]
        assert row["prompt_tokens"] == 14
        (timeline,) = see(server, f"requests/{row['http_request']}")["data"]
        assert timeline["request"] == row["request"]
        assert timeline["finish"] is None
        assert do(server, "abort", {"request": row[by]})["aborted"] == [row["request"]]
        answer = running.wait()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "aborted"
        assert answer.headers["x-should-retry"] == "false"
        until(lambda: server.metric_of(OPERATOR, "tailrace_kv_pages_used") == 0, "its pages to be free")
        ended = see(server, f"requests/{row['request']}")["data"]
        assert {line["event"] for line in ended} >= {"request"}
    assert do(server, "abort", {"request": "nobody"}, 404)["error"]["code"] == "request_not_found"


def test_all_of_a_key_and_all_of_everybody_are_aborted_at_once(server: Running) -> None:
    for by in ("key", "all"):
        running = [Running1(server, f"{by}-{number}") for number in range(3)]
        rows = see(server, "requests")["data"]
        assert do(server, "abort", {"key": "nobody"})["aborted"] == []
        value = rows[0]["key"] if by == "key" else True
        assert len(do(server, "abort", {by: value})["aborted"]) == 3
        assert {one.wait().json()["error"]["code"] for one in running} == {"aborted"}
    assert do(server, "abort", {"tenant": "none"})["aborted"] == []


def test_the_engines_own_log_can_be_turned_up(server: Running) -> None:
    assert do(server, "log_level", {"engine": "debug"})["engine"] == "debug"
    try:
        server.post("/v1/chat/completions", CHAT, headers=USER)
        until(lambda: any(line.startswith("tailrace: step ") for line in server.log), "a line of a step")
    finally:
        do(server, "log_level", {"engine": "warning"})
    assert see(server, "state")["engine_log_level"] == "warning"


def test_a_stream_that_is_aborted_ends_with_an_error(server: Running) -> None:
    running = Running1(server, "stream", stream=True)
    do(server, "abort", {"request": "stream"})
    answer = running.wait()
    assert answer.status_code == 200
    assert '"code":"aborted"' in answer.text
    assert "[DONE]" not in answer.text


def test_an_ended_request_and_a_refused_one_are_found_by_their_ids(server: Running) -> None:
    done = server.post("/v1/chat/completions", CHAT, headers=USER)
    wrong = server.post("/v1/chat/completions", {**CHAT, "n": 0}, headers=USER)
    for name in (done.json()["id"], done.headers["x-request-id"]):
        (line,) = until(lambda name=name: see(server, f"requests/{name}")["data"], "the line")
        assert line["covered"] >= 0.99
    (line,) = see(server, f"requests/{wrong.headers['x-request-id']}")["data"]
    assert (line["status"], line["param"]) == (400, "n")
    assert server.get("/admin/requests/never", headers=OPERATOR).status_code == 404


def test_every_error_has_an_id_that_finds_it(server: Running) -> None:
    wrong = {"authorization": "Bearer wrong"}
    answers = [
        server.post("/v1/chat/completions", CHAT, headers=wrong),
        server.get("/v1/models"),
        server.get("/admin/state", headers=wrong),
        server.get("/admin/state", headers=USER),
        server.get("/admin/requests/nobody-ever", headers=OPERATOR),
        server.post("/admin/abort", {"request": "nobody-ever"}, headers=OPERATOR),
        server.get("/nowhere", headers=USER),
        server.get("/v1/chat/completions/extra/parts", headers=USER),
        server.get("/v1/embeddings", headers=USER),
        server.post("/v1/messages", {"model": "stand"}),
        server.post("/v1/messages", {"model": "stand"}, headers=USER),
        server.post("/v1/files", {"model": "stand"}, headers=USER),
    ]
    for answer in answers:
        (line,) = see(server, f"requests/{answer.headers['x-request-id']}")["data"]
        assert (line["event"], line["status"]) == ("refused", answer.status_code)
        assert line["e2e_ms"] >= 0
    assert {answer.status_code for answer in answers} == {400, 401, 403, 404, 405}


def test_what_is_no_http_has_an_id_that_finds_it_too(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        peer.sendall(b"rubbish\r\n\r\n")
        said = b"".join(iter(lambda: peer.recv(4096), b""))
    name = re.search(rb"x-request-id: (\S+)", said)
    assert name is not None
    (line,) = see(server, f"requests/{name[1].decode()}")["data"]
    assert (line["status"], line["code"]) == (400, "invalid_http")


def test_strangers_push_out_none_but_strangers(server: Running) -> None:
    done = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}, headers=USER)
    with server.http() as client:
        first, *_ = [client.get(f"/nowhere/{at}") for at in range(1100)]
    assert until(lambda: see(server, f"requests/{done.json()['id']}")["data"], "the line")
    gone = server.get(f"/admin/requests/{first.headers['x-request-id']}", headers=OPERATOR)
    assert gone.status_code == 404


def test_a_pause_refuses_what_is_new_and_lets_the_rest_end(server: Running) -> None:
    running = Running1(server, "goes-on", max_tokens=100)
    assert do(server, "pause")["requests"] == 1
    try:
        refused = server.post("/v1/chat/completions", CHAT, headers=USER)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "paused"
        assert refused.headers["retry-after"]
        assert server.get("/health").status_code == 200
        assert server.get("/health/ready").status_code == 503
        assert running.wait().status_code == 200
    finally:
        do(server, "resume", {})
    assert server.post("/v1/chat/completions", CHAT, headers=USER).status_code == 200
    cut = Running1(server, "is-cut")
    do(server, "pause", {"running": "abort"})
    do(server, "resume")
    assert cut.wait().json()["error"]["code"] == "aborted"


def test_a_reset_forgets_cached_prefixes(server: Running) -> None:
    def cached() -> int:
        body = {**CHAT, "messages": [{"role": "user", "content": "to be forgotten " * 20}], "max_tokens": 1}
        usage = server.post("/v1/chat/completions", body, headers=USER).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() > 0
    do(server, "reset_prefix_cache")
    assert cached() == 0


def test_prompts_are_in_the_log_only_while_they_are_asked_for(server: Running) -> None:
    def said(word: str) -> bool:
        body = {**CHAT, "messages": [{"role": "user", "content": f"the word is {word}"}]}
        name = server.post("/v1/chat/completions", body, headers=USER).json()["id"]
        until(lambda: see(server, f"requests/{name}")["data"], "its end")
        assert word not in str(see(server, f"requests/{name}"))
        return any(word in line for line in server.log)

    assert not said("swordfish")
    do(server, "log_level", {"level": "prompts"})
    try:
        until(lambda: said("perch"), "the prompt")
    finally:
        do(server, "log_level", {"level": "requests"})
    assert not said("sturgeon")
    assert see(server, "state")["log_level"] == "requests"
    assert any('"verb":"log_level"' in line for line in server.log)


def test_a_drain_finishes_what_runs_and_ends_the_server() -> None:
    with serving(loader="tests.api.stand:load_slow", api_keys=["user"], admin_keys=["operator"]) as server:
        running = Running1(server, "last", max_tokens=100)
        do(server, "drain")
        assert running.wait().json()["usage"]["completion_tokens"] == 100
        assert server.wait() == 0
