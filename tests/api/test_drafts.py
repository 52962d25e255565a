"""Drafts through a real socket: steps that give several tokens, and answers that are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.conftest import Running, serving
from tests.api.stand import FIRST_BYTE, SAY

LOOP = [*(FIRST_BYTE + byte for byte in b"the mill and the river " * 4), SAY]
"""The stand-in says it."""
PREFIX = "vllm:spec_decode_num_"


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Running, Running]]:
    """One with drafts and one without."""
    with serving() as quick, serving(draft_tokens=0) as plain:
        yield quick, plain


def pieces(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    lines = server.post("/v1/completions", {**body, "stream": True}).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.9, "seed": 3}, {"stop": ["rive"]}, {"n": 2}, {"logprobs": 2}])
def test_answers_are_the_same(servers: tuple[Running, Running], more: dict[str, Any]) -> None:
    body = {"model": "stand", "prompt": LOOP, "max_tokens": 80, "temperature": 0, **more}
    quick, plain = (server.post("/v1/completions", body).json() for server in servers)
    assert quick["choices"] == plain["choices"]
    assert quick["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_a_stream_is_the_whole_in_fewer_pieces(servers: tuple[Running, Running]) -> None:
    body = {"model": "stand", "prompt": LOOP, "max_tokens": 80, "temperature": 0, "logprobs": 1}
    streams = [pieces(server, body) for server in servers]
    quick, plain = ([choice for piece in stream for choice in piece["choices"]] for stream in streams)
    whole = servers[1].post("/v1/completions", body).json()["choices"][0]
    assert "".join(choice["text"] for choice in quick) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for c in quick if c["logprobs"] for one in c["logprobs"][name]] == whole["logprobs"][name]
    assert len(quick) < len(plain)


def test_drafts_are_counted(servers: tuple[Running, Running]) -> None:
    quick, plain = servers
    names = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    before = [quick.metric(PREFIX + name) for name in names]
    body = {"model": "stand", "prompt": LOOP, "max_tokens": 80, "temperature": 0, "tailrace": {"timeline": True}}
    answer = quick.post("/v1/completions", body).json()
    drafts, drafted, accepted = (quick.metric(PREFIX + n) - b for n, b in zip(names, before, strict=True))
    assert 0 < drafts < drafted
    assert 0 < accepted <= drafted
    steps = answer["tailrace"]["timeline"]["steps"]["decode"]
    assert steps == answer["usage"]["completion_tokens"] - 1 - accepted
    assert [plain.metric(PREFIX + name) for name in names] == [0, 0, 0]


SENTENCE = "Nobody remembered who had built the first dam; the stones were older than the church."


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_is_told_in_the_usage(servers: tuple[Running, Running], stream: bool) -> None:
    quick, plain = (openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") for server in servers)
    asked: dict[str, Any] = {"model": "stand", "messages": [{"role": "user", "content": SENTENCE}], "temperature": 0}
    expected = {"type": "content", "content": [{"type": "text", "text": SENTENCE.replace("first", "last")}]}
    truth = plain.chat.completions.create(**asked)
    if stream:
        chunks = list(
            quick.chat.completions.create(
                **asked, prediction=expected, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
    else:
        answer = quick.chat.completions.create(**asked, prediction=expected)
        text, usage = answer.choices[0].message.content, answer.usage
    assert text == truth.choices[0].message.content == SENTENCE
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 25  # bytes; after the difference the prompt itself is as good a guess
    assert 0 < details.rejected_prediction_tokens < 8
    assert truth.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    "more",
    [
        {"prediction": {"type": "image", "content": "x"}},
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        {"prediction": {"type": "content", "content": "x"}, "frequency_penalty": 0.5},
        {"prediction": {"type": "content", "content": "x"}, "response_format": {"type": "json_object"}},
        {"prediction": "x"},
    ],
)
def test_predictions_that_are_refused(servers: tuple[Running, Running], more: dict[str, Any]) -> None:
    body = {"model": "stand", "messages": [{"role": "user", "content": "x"}], **more}
    answer = servers[0].post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prediction"
