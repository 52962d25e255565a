"""Parameters that nobody knows: refused, or by choice passed over and named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.api import schema, unknown
from tests.api.conftest import Running, serving

CHAT: dict[str, Any] = {"model": "stand", "messages": [{"role": "user", "content": "hello there"}]}
IGNORED = "x-tailrace-ignored-parameters"


@pytest.fixture(scope="module")
def lenient() -> Iterator[Running]:
    with serving(unknown_parameters="warn") as server:
        yield server


def test_they_are_passed_over_and_named_wherever_they_stand(lenient: Running) -> None:
    body = {
        **CHAT,
        "messages": [{"role": "user", "content": "hello there", "mood": "good"}],
        "stream": True,
        "stream_options": {"include_usage": True, "speed": 9},
        "reasoning": {"deep": [1, {"deeper": "yes"}]},
    }
    answer = lenient.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    assert answer.headers[IGNORED] == "messages[0].mood, stream_options.speed, reasoning"
    plain = lenient.post("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    assert IGNORED not in plain.headers
    assert texts(answer.text) == texts(plain.text) == "hello there"


def texts(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_those_of_responses_too(lenient: Running) -> None:
    body = {"model": "stand", "input": "hello there", "mood": 1, "text": {"format": {"type": "text"}, "colour": 2}}
    answer = lenient.post("/v1/responses", body)
    assert answer.status_code == 200
    assert answer.headers[IGNORED] == "mood, text.colour"
    assert answer.json()["output"][0]["content"][0]["text"] == "hello there"


def test_what_is_known_is_still_checked(lenient: Running) -> None:
    for wrong, param in (
        ({"temperature": 9}, "temperature"),
        ({"temperature": "x"}, "temperature"),
        ({"web_search_options": {}}, "web_search_options"),  # known, and not served
    ):
        answer = lenient.post("/v1/chat/completions", {**CHAT, "foo": 1, **wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert answer.headers[IGNORED] == "foo"
    for body in ({"foo": 1}, {"foo": 1, "messages": [[]]}):
        assert lenient.post("/v1/chat/completions", body).status_code == 400


def test_names_cannot_break_the_header(lenient: Running) -> None:
    names = ["a\r\nset-cookie: x", "ü", "x" * 5000, *(f"p{index}" for index in range(50))]
    answer = lenient.post("/v1/chat/completions", {**CHAT, **dict.fromkeys(names, 1)})
    assert answer.status_code == 200
    shown = answer.headers[IGNORED].split(", ")
    assert shown[:3] == ["a??set-cookie??x", "?", "x" * 64]
    assert shown[-1] == "and 33 more"
    assert "set-cookie" not in answer.headers


def test_absurdly_many_or_deep_ones_are_refused(lenient: Running) -> None:
    with lenient.http() as client:
        for extra in (b'"x":' + b"[" * 100_000 + b"]" * 100_000, b",".join(b'"p%d":1' % n for n in range(200_000))):
            data = json.dumps(CHAT).encode()[:-1] + b"," + extra + b"}"
            answer = client.post("/v1/chat/completions", content=data, headers={"content-type": "application/json"})
            assert answer.status_code == 400
    assert lenient.get("/health").status_code == 200


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=8).map("x-{}".format), plain, max_size=4), plain)
def test_what_is_known_stays_as_it_was(extra: dict[str, Any], bias: Any) -> None:
    known = {**CHAT, "tools": bias, "tailrace": {"timeline": True}}
    data, names = unknown.without(json.dumps({**extra, **known}).encode(), schema.Chat)
    assert json.loads(data) == known
    assert names == list(extra)
