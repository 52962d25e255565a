"""What must hold of one endpoint that generates must hold of each: a rule that one of them forgets is a bug there."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Running, until
from tests.api.test_lifecycle import busy, send

TEXTS = ("plain", "Zürich, 水車 🌊", "tags: <tool_call> </think> {", "a\n\n b\t", '{"name": "x"}')


def asked(path: str, text: str, **extra: Any) -> dict[str, Any]:
    """A request for what the stand-in was told to say (of chats), of at most 40 tokens."""
    match path:
        case "/v1/completions":
            body = {"prompt": text, "max_tokens": 40, "temperature": 0}
        case "/v1/responses":
            body = {"input": text, "max_output_tokens": 40}
        case _:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40}
    return {"model": "stand", **body, **extra}


ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    match path:
        case "/v1/completions":
            return str(answer["choices"][0]["text"])
        case "/v1/responses":
            return "".join(part["text"] for item in answer["output"] for part in item["content"])
        case "/v1/messages":
            return "".join(block["text"] for block in answer["content"])
        case _:
            return str(answer["choices"][0]["message"]["content"] or "")


def deltas(path: str, stream: str) -> Iterator[str]:
    """The pieces of text of a stream."""
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if path == "/v1/responses":
            yield event["delta"] if event["type"] == "response.output_text.delta" else ""
        elif path == "/v1/messages":
            yield event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
        elif event["choices"]:
            choice = event["choices"][0]
            yield choice["text"] if path == "/v1/completions" else choice["delta"].get("content") or ""


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("extra", [{}, {"stop": [" b", "🌊"]}, {"temperature": 1.2, "seed": 5}], ids=str)
def test_a_stream_is_equal_to_its_whole(quick: Running, path: str, text: str, extra: dict[str, Any]) -> None:
    if path == "/v1/messages":
        extra = {("stop_sequences" if name == "stop" else name): value for name, value in extra.items()}
        extra.pop("seed", None)
        extra |= {"temperature": 0} if "temperature" in extra else {}  # there is no seed, and 1 is the most
    whole = quick.post(path, asked(path, text, **extra))
    assert whole.status_code == 200, whole.text
    stream = quick.post(path, asked(path, text, stream=True, **extra))
    assert "".join(deltas(path, stream.text)) == text_of(path, whole.json())


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_text_is_cut_between_tokens_and_inside_characters_alike(quick: Running, path: str) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for most in range(1, 12):
        body = asked(path, "水車 🌊", **{name: most})
        whole = text_of(path, quick.post(path, body).json())
        assert "".join(deltas(path, quick.post(path, {**body, "stream": True}).text)) == whole


NUMBERS = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "seed"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "logprobs", "top_logprobs"),
)


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/embeddings"])
def test_numbers_that_are_none_or_absurd_are_refused(quick: Running, path: str) -> None:
    plain = json.dumps(asked(path, "a"))
    with quick.http(headers={"content-type": "application/json"}) as client:
        for name in NUMBERS:
            others = {key: value for key, value in json.loads(plain).items() if key != name}
            for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e308", "1e308", str(2**70), str(-(2**70))):
                body = json.dumps(others)[:-1] + f', "{name}": {value}}}'
                answer = client.post(path, content=body)
                assert 400 <= answer.status_code < 500, (name, value, answer.text)
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.alone
def test_a_small_request_for_very_much_is_refused_at_once_in_flat_memory(quick: Running, path: str) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{quick.process.pid}/statm").read_text().split()[1]) * 4096

    before = resident()
    much: list[dict[str, Any]] = [
        {"n": 5_000_000},
        {"top_logprobs": 10**9},
        {"stop": ["x"] * 10**5},
        {"max_tokens": 2**31},
    ]
    much += [{"stop_sequences": ["x"] * 10**5}, {"max_output_tokens": 2**31}, {"max_completion_tokens": 2**31}]
    much += [{"logprobs": 10**9}, {"metadata": {str(key): "x" for key in range(10**4)}}]
    for extra in much:
        begin = time.monotonic()
        answer = quick.post(path, asked(path, "a") | extra)
        assert answer.status_code == 400, (extra, answer.text)
        assert time.monotonic() - begin < 2.0
    deep = json.dumps(asked(path, "a"))[:-1] + ', "metadata": ' + "[" * 50_000 + "]" * 50_000 + "}"
    with quick.http(headers={"content-type": "application/json"}) as client:
        assert client.post(path, content=deep).status_code == 400
    assert resident() < before + (32 << 20)


EMPTY = {
    "/v1/chat/completions": [{"messages": []}, {"messages": [{}]}, {"messages": [{"role": "user"}]}],
    "/v1/completions": [{"prompt": value} for value in ([], [[]], [""], None)],
    "/v1/responses": [{"input": value} for value in ([], [[]], [{}], None)],
    "/v1/messages": [{"messages": value} for value in ([], [{}], None, "")],
    "/v1/embeddings": [{"input": value} for value in ("", [], [[]], [""], None)],
    "/rerank": [{"query": "", "documents": []}, {"query": "a", "documents": []}],
    "/score": [{"text_1": "", "text_2": []}],
    "/tokenize": [{"prompt": None}, {"messages": []}],
}


@pytest.mark.parametrize("path", EMPTY)
def test_what_is_empty_is_refused_and_the_next_request_works(quick: Running, path: str) -> None:
    engine = quick.engine
    for extra in EMPTY[path]:
        answer = quick.post(path, {"model": "stand", "max_tokens": 4, **extra})
        assert answer.status_code == 400 or (answer.status_code == 200 and extra == {"prompt": [""]}), answer.text
    assert quick.post("/v1/completions", asked("/v1/completions", "a")).status_code == 200
    assert quick.engine == engine


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "2130706433:{port}", "[::ffff:127.0.0.1]:{port}"]
)
def test_nothing_that_a_request_names_is_fetched(quick: Running, path: str, host: str) -> None:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen(1)
        trap.settimeout(0.05)
        url = f"http://{host}:{trap.getsockname()[1]}/x.png"
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "image", "source": {"type": "url", "url": url}},
            {"type": "input_file", "file_url": url},
            {"type": "document", "source": {"type": "url", "url": url}},
        ]
        for part in parts:
            messages = [{"role": "user", "content": [part]}]
            field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
            answer = quick.post(path, asked(path, "a") | {field: messages})
            assert answer.status_code == 400, answer.text
        tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": url}}}
        for extra in ({"guided_json": {"$ref": url}}, {"tools": [tool], "tool_choice": "required"}):
            answer = quick.post(path, asked(path, "a", **extra))
            assert answer.status_code == 400, answer.text
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_what_it_held(slow: Running, path: str, stream: bool) -> None:
    aborted = slow.metric("tailrace_request_success_total", finished_reason="abort")
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = asked(path, "x" * 800, **{name: 900}, stream=stream)  # which it says, 20 ms a letter
    connections = [send(slow, body, path) for _ in range(2)]
    until(lambda: busy(slow)[:2] == (2, 0), "two running")
    connections.append(send(slow, body, path))
    until(lambda: busy(slow)[:2] == (2, 1), "one waiting")
    for connection in connections:
        connection.close()
    until(lambda: busy(slow) == (0, 0, 0), "nothing held")
    assert slow.metric("tailrace_request_success_total", finished_reason="abort") == aborted + 3


def test_completions_tell_usage_last_where_it_is_asked_for_and_never_otherwise(quick: Running) -> None:
    path = "/v1/completions"
    for asking in (False, True):
        options = {"stream_options": {"include_usage": asking}} if asking else {}
        lines = quick.post(path, asked(path, "abc", stream=True, **options)).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        events = [json.loads(line[6:]) for line in lines[:-2]]
        told = [event for event in events if event.get("usage")]
        assert told == (events[-1:] if asking else [])
        assert all(event["choices"] == [] for event in told)
        assert all("choices" in event for event in events)
