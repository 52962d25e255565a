"""What is wrong is refused quickly, by name, and without harm."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tailrace.api.generation import REFUSALS, refusal
from tailrace.engine import constrain, core, encoder
from tailrace.engine.protocol import Output
from tests.api.conftest import Running

CHAT = {"model": "stand", "messages": [{"role": "user", "content": "a"}]}


def raw(server: Running, body: bytes | str, path: str = "/v1/chat/completions", kind: str = "application/json") -> Any:
    data = body.encode() if isinstance(body, str) else body
    with server.http() as client:
        return client.post(path, content=data, headers={"content-type": kind})


def resident(pid: int) -> float:
    """MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def cpu_seconds(pid: int) -> float:
    """That a process has used so far; what else the machine does takes none of it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def refused(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:300]
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


UNSUPPORTED: list[tuple[str, Any]] = [
    ("functions", []),
    ("function_call", "auto"),
    ("store", True),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("reasoning_effort", "low"),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("chat_template", "{% for a in range(10**9) %}{% endfor %}"),
    ("use_beam_search", True),
    ("service_tier", "scale"),
    ("echo", True),
    ("cache_salt", "x"),
    ("prompt_cache_key", "x"),
    ("safety_identifier", "x"),
    ("skip_special_tokens", False),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_a_parameter_that_is_not_served_is_refused_by_name(quick: Running, name: str, value: Any) -> None:
    error = refused(quick.post("/v1/chat/completions", {**CHAT, name: value}))
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert name in error["message"]


WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", -1e308),
    ("top_p", 1.1),
    ("top_p", -0.5),
    ("min_p", 1.5),
    ("min_p", -1e308),
    ("top_k", -2),
    ("top_k", 1.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("seed", 1 << 70),
    ("seed", "x"),
    ("n", 0),
    ("n", 5_000_000),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1 << 31),
    ("max_tokens", 10**400),
    ("max_tokens", 3.5),
    ("max_completion_tokens", "5"),
    ("min_tokens", -1),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"8": 101}),
    ("logit_bias", {"8": "x"}),
    ("logit_bias", [1]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stop", "x" * 5000),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [8] * 17),
    ("top_logprobs", 3),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("user", 5),
    ("user", "x" * 600),
    ("metadata", {"a": 1}),
    ("metadata", {str(i): "" for i in range(17)}),
    ("priority", 10**6),
    ("tailrace", {"timeline": 1}),
    ("messages", []),
    ("messages", "hello"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}-{str(value)[:12]}" for name, value in WRONG])
def test_a_wrong_value_is_refused_and_its_parameter_named(quick: Running, name: str, value: Any) -> None:
    error = refused(quick.post("/v1/chat/completions", {**CHAT, name: value}))
    assert str(error["param"]).startswith(name)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "nan"])
def test_numbers_that_are_none_are_refused(quick: Running, name: str, value: str) -> None:
    refused(raw(quick, json.dumps(CHAT)[:-1] + f', "{name}": {value}}}'))
    assert quick.get("/health").status_code == 200


@pytest.mark.parametrize("value", [1.0000001, 1.00000000000001, 1e300, -1e-12])
def test_a_refusal_shows_the_value_that_was_sent(quick: Running, value: float) -> None:
    assert refused(quick.post("/v1/chat/completions", {**CHAT, "top_p": value}))["message"].endswith(f"not {value!r}")


def test_top_logprobs_are_bounded(quick: Running) -> None:
    for value in (21, 10**9, -1):
        body = {**CHAT, "logprobs": True, "top_logprobs": value}
        assert refused(quick.post("/v1/chat/completions", body))["param"] == "top_logprobs"
    assert (
        refused(quick.post("/v1/completions", {"model": "stand", "prompt": "a", "logprobs": 21}))["param"] == "logprobs"
    )


@pytest.mark.parametrize(
    "body",
    [
        {"foo": 1},
        {"messages": [{"role": "user", "content": "a", "foo": 1}]},
        {"stream_options": {"foo": 1}, "stream": True},
        {"tailrace": {"foo": 1}},
    ],
)
def test_unknown_parameters_are_refused_by_name(quick: Running, body: dict[str, Any]) -> None:
    error = refused(quick.post("/v1/chat/completions", {**CHAT, **body}))
    assert error["code"] == "unknown_parameter"
    assert str(error["param"]).endswith("foo")


def test_missing_parameters_are_named(quick: Running) -> None:
    assert refused(quick.post("/v1/chat/completions", {"model": "stand"}))["param"] == "messages"
    assert refused(quick.post("/v1/chat/completions", {"messages": CHAT["messages"]}))["param"] == "model"
    assert refused(quick.post("/v1/completions", {"model": "stand"}))["param"] == "prompt"
    assert refused(quick.post("/detokenize", {}))["param"] == "tokens"


MESSAGES: list[Any] = [
    {"role": "robot", "content": "a"},
    {"role": "user"},
    {"role": "user", "content": None},
    {"role": "system", "content": None},
    {"role": "user", "content": 5},
    {"role": "user", "content": [{"type": "text"}]},
    {"role": "user", "content": [{"text": "x"}]},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
    {"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]},
    {"role": "user", "content": "a", "tool_calls": [{"id": "x", "function": {"name": "f"}}]},
    {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
    {"content": "a"},
    "hello",
]


@pytest.mark.parametrize("message", MESSAGES, ids=[str(m)[:50] for m in MESSAGES])
def test_messages_that_are_wrong_are_refused(quick: Running, message: Any) -> None:
    error = refused(quick.post("/v1/chat/completions", {"model": "stand", "messages": [message]}))
    assert str(error["param"]).startswith("messages")


def test_images_are_refused_and_never_fetched(quick: Running) -> None:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(0.2)
        port = trap.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/x.png",
            f"http://2130706433:{port}/",
            f"http://[::1]:{port}/",
            "http://169.254.169.254/latest/meta-data",
            "file:///etc/passwd",
        ):
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"model": "stand", "messages": [{"role": "user", "content": [part]}]}
            assert "image_url" in refused(quick.post("/v1/chat/completions", body))["message"]
        with pytest.raises(TimeoutError):
            trap.accept()


BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'"x"', 400),
    (b"null", 400),
    (b"\xff\xfe", 400),
    (b'{"model": "stand", "messages": [{"role": "user", "content": "\xff"}]}', 400),
    (b'{"model": "stand", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400),
    (b'{"model":"stand","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"model":"stand","messages":[],"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"model":"stand","messages":[],"metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5001, 400),
]


@pytest.mark.parametrize(("body", "status"), BODIES, ids=[str(b[:30]) for b, _ in BODIES])
def test_bodies_that_are_no_request_are_refused(quick: Running, body: bytes, status: int) -> None:
    refused(raw(quick, body), status)


def test_other_content_types_are_refused(quick: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        refused(raw(quick, json.dumps(CHAT), kind=kind), 415)
    assert raw(quick, json.dumps(CHAT), kind="application/json; charset=utf-8").status_code == 200


def test_a_body_past_the_limit_is_refused_unread(quick: Running) -> None:
    refused(raw(quick, b" " * (17 << 20)), 413)

    def endless() -> Any:
        for _ in range(40):
            yield b" " * (1 << 20)

    from httpx2 import TransportError

    with quick.http() as client:
        try:
            answer = client.post(
                "/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
            )
            refused(answer, 413)
        except TransportError:
            pass  # the server has hung up while the rest was being sent
    assert quick.get("/health").status_code == 200


HUGE: dict[str, tuple[str, bytes]] = {
    "stop strings": ("chat", b'"stop":[' + b",".join([b'"ab"'] * 1_000_000) + b"]"),
    "choices": ("chat", b'"n":5000000'),
    "top_logprobs": ("chat", b'"logprobs":true,"top_logprobs":1000000000'),
    "logit_bias": ("chat", b'"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}"),
    "max_tokens": ("chat", b'"max_tokens":2147483648'),
    "many prompts": ("completions", b'"prompt":[' + b",".join([b'"a"'] * 500_000) + b"]"),
    "n times prompts": ("completions", b'"n":128,"prompt":[' + b",".join([b'"a"'] * 100) + b"]"),
    "many ids": ("completions", b'"prompt":[' + b",".join([b"9"] * 2_000_000) + b"]"),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", HUGE)
def test_absurd_requests_are_refused_at_once_in_flat_memory(quick: Running, name: str) -> None:
    kind, extra = HUGE[name]
    if kind == "chat":
        path, body = "/v1/chat/completions", json.dumps(CHAT).encode()[:-1] + b"," + extra + b"}"
    else:
        path, body = "/v1/completions", b'{"model":"stand",' + extra + b"}"
    raw(quick, body, path)
    before = resident(quick.process.pid)
    times = []
    for _ in range(3):
        start = cpu_seconds(quick.process.pid)
        refused(raw(quick, body, path))
        times.append(cpu_seconds(quick.process.pid) - start)
    assert min(times) < 0.1 + len(body) / 40e6  # what taking the body itself may cost
    assert resident(quick.process.pid) - before < 16


def test_a_prompt_past_the_context_is_refused_with_true_numbers(quick: Running) -> None:
    exact = {"model": "stand", "prompt": [9] * 2047, "max_tokens": 1}
    assert quick.post("/v1/completions", exact).status_code == 200
    for body, numbers, param in (
        ({**exact, "prompt": [9] * 2049}, ("2048", "2049"), "prompt"),
        ({**exact, "prompt": [9] * 2048}, ("2048",), "prompt"),
        ({**exact, "max_tokens": 100}, ("2048", "2047", "100", "2147"), "max_tokens"),
        ({**exact, "prompt": "a" * 2050}, ("2048", "2051"), "prompt"),
    ):
        error = refused(quick.post("/v1/completions", body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert all(number in error["message"] for number in numbers), error["message"]
        assert "-" not in error["message"]


@pytest.mark.alone
def test_megabytes_of_text_are_refused_without_tokenizing(quick: Running) -> None:
    body = {"model": "stand", "messages": [{"role": "user", "content": "word " * 2_000_000}]}
    start = time.perf_counter()
    error = refused(quick.post("/v1/chat/completions", body))
    assert time.perf_counter() - start < 2
    assert error["code"] == "context_length_exceeded"
    assert "10000000" in error["message"]
    body = {"model": "stand", "messages": [{"role": "user", "content": "word " * 20_000}]}
    error = refused(quick.post("/v1/chat/completions", body))
    assert "at least 20000" in error["message"]
    assert error["param"] == "messages"


def test_paths_and_methods_that_are_not_there(quick: Running) -> None:
    assert refused(quick.get("/nowhere"), 404)["code"] == "not_found"
    assert refused(quick.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert quick.get("/v1/completions").headers["allow"] == "POST"
    assert refused(quick.post("/v1/models", {}), 405)


def test_a_request_id_is_echoed_where_it_is_harmless(quick: Running) -> None:
    assert quick.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert quick.get("/version", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")
    assert quick.get("/version", headers={"x-request-id": "x" * 500}).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("said", "param", "status", "code"),
    [
        ("context_length_exceeded: the prompt has 9 tokens", "messages", 400, "context_length_exceeded"),
        ("output_too_long: 9 prompt tokens and max_tokens 3", "max_tokens", 400, "context_length_exceeded"),
        ("invalid_prompt: the prompt has no tokens", "messages", 400, "invalid_prompt"),
        ("invalid_max_tokens: max_tokens must be at least 1", "max_tokens", 400, "invalid_value"),
        ("invalid_stop: stop strings need the tokenizer", "stop", 400, "invalid_value"),
        ("unsupported_grammar: this engine was not given", "response_format", 400, "invalid_value"),
        ("invalid_grammar: it is wrong", "response_format", 400, "invalid_grammar"),
        ("grammar_failed: no token is left", "response_format", 400, "grammar_failed"),
        ("adapter_not_loaded: the adapter was unloaded", "model", 404, "model_not_found"),
        ("wrong_task: the model embeds no texts", "model", 400, "unsupported_model"),
        ("overloaded: 9 requests are waiting already", None, 429, "overloaded"),
        ("draining: the server is shutting down", None, 503, "service_unavailable"),
        ("step_failed: RuntimeError: no", None, 500, "engine_error"),
        ("", None, 500, "engine_error"),
    ],
)
def test_what_an_engine_refuses_names_the_parameter(said: str, param: str | None, status: int, code: str) -> None:
    error = refusal(Output("r", finish="error", error=said), "response_format", "messages")
    assert (error.param, error.status, error.code) == (param, status, code)


def test_every_name_that_an_engine_gives_is_known() -> None:
    """Those of the cores' sources: `Output.error` begins with one."""
    sources = "".join(Path(str(module.__file__)).read_text() for module in (core, encoder, constrain))
    named = set(re.findall(r"""\Wf?"([a-z]+_?[a-z_]*): """, sources))
    known = set(REFUSALS) | {"duplicate_request", "step_failed"}  # those are faults of ours
    assert named <= known, named - known
    assert {"context_length_exceeded", "output_too_long", "invalid_grammar", "wrong_task"} <= named
