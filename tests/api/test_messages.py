"""Anthropic's Messages through a real socket, with the official client. The stand-in says what the user wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.api.access import store
from tailrace.api.access.store import Quota
from tailrace.api.anthropic.shape import told_of
from tests.api.conftest import DEADLINE, NO_TLS, Running, serving
from tests.api.stand import CRASH, FIRST_BYTE

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, NOW]


def call(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Client(anthropic.Anthropic):
    """The official client, and what the wire says."""

    def __init__(self, server: Running, key: str = "none") -> None:
        self.server = server
        self.wire = httpx.Client(verify=NO_TLS, timeout=DEADLINE, base_url=server.url)
        super().__init__(base_url=server.url, api_key=key, max_retries=0, http_client=httpx.Client(verify=NO_TLS))

    def close(self) -> None:
        self.wire.close()
        super().close()

    def ask(self, content: Any, **options: Any) -> Any:
        messages = content if isinstance(content, list) and content and "role" in content[0] else None
        messages = messages or [{"role": "user", "content": content}]
        extra = {name: options.pop(name) for name in ("temperature", "top_p", "top_k") if name in options}
        extra.setdefault("temperature", 0)
        body = {"model": "stand", "max_tokens": 200, "messages": messages, **options}
        return self.messages.create(**body, extra_body=extra)

    def both(self, content: Any, **options: Any) -> Any:
        """The message, whole, which is the same as the client makes of the events; their order is checked."""
        whole = self.ask(content, **options)
        body = {"model": "stand", "max_tokens": 200, "messages": [{"role": "user", "content": content}], **options}
        body.setdefault("temperature", 0)
        with self.wire.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = list(read_events(answer.iter_lines()))
        check_order([name for name, _ in events])
        assert all(name == data["type"] for name, data in events)
        extra = {name: body.pop(name) for name in ("temperature", "top_p", "top_k") if name in body}
        with self.messages.stream(**body, extra_body=extra) as stream:
            final = stream.get_final_message()
        assert told(final) == told(whole)
        start = events[0][1]["message"]
        assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == prompt_of(whole)
        return whole

    def refused(self, body: dict[str, Any], path: str = "/v1/messages") -> tuple[int, dict[str, Any]]:
        """Status and error of a body."""
        base = {"model": "stand", "max_tokens": 10, "messages": [{"role": "user", "content": "a"}]}
        answer = self.wire.post(path, json={**base, **body})
        error = answer.json()
        assert set(error) == {"type", "error", "request_id"}
        assert error["type"] == "error"
        assert error["request_id"] == answer.headers["request-id"]
        return answer.status_code, error["error"]


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def check_order(names: list[str]) -> None:
    """A start, blocks that are begun and ended one after the other, the end; a ping after the first begin."""
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    inner = names[1:-2]
    if not inner:
        return
    assert inner[:2] == ["content_block_start", "ping"]
    inside = False
    for name in (one for one in inner if one != "ping"):
        assert inside == (name != "content_block_start")
        assert name in ("content_block_start", "content_block_delta", "content_block_stop")
        inside = name != "content_block_stop"
    assert not inside


def told(message: Any) -> tuple[Any, ...]:
    """What of a message does not differ from request to request."""
    blocks = [{k: v for k, v in one.to_dict().items() if k not in ("id", "parsed_output")} for one in message.content]
    usage = message.usage
    details = usage.output_tokens_details and usage.output_tokens_details.thinking_tokens
    return blocks, message.stop_reason, message.stop_sequence, usage.output_tokens, details, prompt_of(message)


def prompt_of(message: Any) -> int:
    return int(message.usage.input_tokens + message.usage.cache_read_input_tokens)


@pytest.fixture(scope="module")
def claude(quick: Running) -> Iterator[Client]:
    with Client(quick) as client:
        yield client


@pytest.fixture(scope="module")
def thinker() -> Iterator[Client]:
    """A server whose model reasons between tags, the closing one a token of its own."""
    with serving(served_names=["stand"], reasoning_parser="think") as server, Client(server) as client:
        yield client


def test_text_is_one_block_whole_and_streamed(claude: Client) -> None:
    message = claude.both("Grüezi 😀 there")
    assert message.content[0].to_dict() == {"type": "text", "text": "Grüezi 😀 there"}
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        "stand",
        "end_turn",
    )
    assert message.id.startswith("msg_")
    assert message._request_id
    assert claude.both("").content == []


def test_the_tokens_of_a_cached_prompt_are_counted_apart(claude: Client) -> None:
    long = "A prefix of many words. " * 10
    claude.ask(long + "1")
    again = claude.ask(long + "2").usage
    assert again.cache_read_input_tokens > 200
    assert 0 < again.input_tokens < 40
    assert again.cache_creation_input_tokens == 0


def test_why_it_stopped(claude: Client) -> None:
    cut = claude.both("On and on", max_tokens=4)
    assert (cut.content[0].text, cut.stop_reason) == ("On a", "max_tokens")
    stopped = claude.both("On and on", stop_sequences=["x", " on"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("On and", "stop_sequence", " on")


def test_a_call_is_a_tool_use_block_between_text(claude: Client) -> None:
    message = claude.both("Hm.\n" + call('{"city": "Oslo"}') + call("{}", "now") + "So.", tools=TOOLS)
    kinds = [block.type for block in message.content]
    assert kinds == ["text", "tool_use", "tool_use", "text"]
    assert (message.content[1].name, message.content[1].input) == ("get_weather", {"city": "Oslo"})
    assert message.content[2].input == {}
    assert message.content[1].id.startswith("toolu_")
    assert message.content[1].id != message.content[2].id
    assert message.stop_reason == "tool_use"


def test_long_arguments_come_in_pieces_and_cut_ones_are_what_is_complete(claude: Client) -> None:
    text = call(json.dumps({"city": "x" * 300, "days": [1, 2, {"a": "y" * 300}]}))
    message = claude.both(text, tools=TOOLS, max_tokens=900)
    assert message.content[0].input["days"][2]["a"] == "y" * 300
    cut = claude.both(text, tools=TOOLS, max_tokens=500)
    assert cut.stop_reason == "max_tokens"
    assert cut.content[0].input == {"city": "x" * 300, "days": [1, 2, {}]}


def test_half_a_surrogate_pair_harms_no_answer(claude: Client) -> None:
    message = claude.ask(call('{"city": "a\\ud800b", "x": ["\\udc00"], "y": "\\ud83d\\ude00"}'), tools=TOOLS)
    assert message.content[0].input == {"city": "a?b", "x": ["?"], "y": "😀"}


def test_tools_may_or_must_be_called(claude: Client) -> None:
    wish = "No, I will not."
    assert claude.both(wish, tools=TOOLS, tool_choice={"type": "auto"}).stop_reason == "end_turn"
    none = claude.both(call("{}", "now"), tools=TOOLS, tool_choice={"type": "none"})
    assert (none.content[0].type, none.stop_reason) == ("text", "end_turn")
    once = {"disable_parallel_tool_use": True}
    any_one = claude.both(wish, tools=TOOLS, tool_choice={"type": "any", **once})
    assert [block.type for block in any_one.content] == ["tool_use"]
    for name in ("get_weather", "now"):
        named = claude.both(wish, tools=TOOLS, tool_choice={"type": "tool", "name": name})
        assert [(block.type, block.name) for block in named.content] == [("tool_use", name)]
        assert named.stop_reason == "tool_use"
    two = call("{}", "now") + "\n" + call("{}", "now")
    assert len(claude.both(two, tools=TOOLS).content) == 2
    assert len(claude.both(two, tools=TOOLS, tool_choice={"type": "auto", **once}).content) == 1
    assert len(claude.both(two, tools=TOOLS, tool_choice={"type": "any"}).content) == 2
    assert len(claude.both(two, tools=TOOLS, tool_choice={"type": "any", **once}).content) == 1


def test_a_round_trip_with_a_tool(claude: Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hm.\n" + call('{"city": "Oslo"}')}]
    first = claude.ask(messages, tools=TOOLS)
    use = first.content[1]
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]},
            ],
        },
    ]
    second = claude.ask(messages, tools=TOOLS)
    assert second.content[0].text == "rain"  # the stand-in repeats the last message
    messages[-1]["content"][0]["is_error"] = True
    assert claude.ask(messages, tools=TOOLS).content[0].text == "Error: rain"
    messages[-1]["content"].append({"type": "text", "text": "and so?"})
    assert claude.ask(messages, tools=TOOLS).content[0].text == "and so?"


def ids(server: Running, body: dict[str, Any]) -> list[int]:
    return list(server.post("/tokenize", body).json()["tokens"])


def test_the_prompt_is_that_of_the_same_chat(claude: Client, quick: Running) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be", **cached}, {"type": "text", "text": "brief."}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "and two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Yes"},
                {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
    ]
    chat = [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "One\nand two"},
        {
            "role": "assistant",
            "content": "Yes",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": ""},
    ]
    functions = [
        {
            "type": "function",
            "function": {"name": one["name"], "parameters": one["input_schema"], "description": "The weather."},
        }
        for one in TOOLS[:1]
    ]
    expected = len(ids(quick, {"messages": chat, "tools": functions}))
    asked: Any = {"model": "stand", "messages": messages, "tools": TOOLS[:1], "system": system}
    assert claude.messages.count_tokens(**asked).input_tokens == expected
    assert prompt_of(claude.ask(messages, tools=TOOLS[:1], system=system)) == expected
    assert claude.messages.count_tokens(model="stand", messages=[{"role": "user", "content": "a"}]).input_tokens == (
        len(ids(quick, {"messages": [{"role": "user", "content": "a"}]}))
    )


def test_thinking_is_a_block_where_it_is_asked_for(thinker: Client) -> None:
    said = "<think>\nBecause.\n</think>\n\nSo."
    message = thinker.both(said, thinking={"type": "adaptive"})
    assert [block.to_dict() for block in message.content] == [
        {"type": "thinking", "thinking": "Because.", "signature": ""},
        {"type": "text", "text": "So."},
    ]
    assert message.usage.output_tokens_details.thinking_tokens == len("Because.\n</think>")
    for off in ({}, {"thinking": {"type": "disabled"}}):
        plain = thinker.both("<think>\n\n</think>\n\nSo.", **off)
        assert [block.type for block in plain.content] == ["text"]
    called = thinker.both(
        "<think>\nBecause.\n</think>\n\n" + call("{}", "now"),
        tools=TOOLS,
        tool_choice={"type": "any"},
        thinking={"type": "adaptive"},
    )
    assert [block.type for block in called.content] == ["thinking", "tool_use"]


def test_a_budget_of_thinking_is_kept(thinker: Client) -> None:
    budget = {"type": "enabled", "budget_tokens": 20}
    message = thinker.both("<think>\n" + "x" * 60 + "So.", thinking=budget)
    assert message.content[0].thinking == "x" * 20
    assert message.usage.output_tokens_details.thinking_tokens == 21  # with the tag
    assert message.content[1].text.endswith("xSo.")  # the stand-in goes on where it was
    called = thinker.both("<think>\n" + "x" * 60, thinking=budget, tools=TOOLS, tool_choice={"type": "any"})
    assert called.content[0].thinking == "x" * 20
    assert called.content[1].type == "tool_use"
    status, error = thinker.refused({"thinking": {"type": "enabled", "budget_tokens": 10}, "max_tokens": 10})
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "thinking.budget_tokens" in error["message"]
    with serving(served_names=["stand"], reasoning_parser="mistral") as server, Client(server) as other:
        _, error = other.refused({"thinking": budget, "max_tokens": 200})
        assert "thinking.budget_tokens cannot be kept" in error["message"]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_the_text_can_be_held_to_a_schema(claude: Client) -> None:
    asked = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    assert claude.both('{"a": 7} and more', **asked).content[0].text == '{"a": 7}'
    assert set(json.loads(claude.both("No.", **asked).content[0].text)) == {"a"}
    assert claude.both(call("{}", "now"), tools=TOOLS, **asked).content[0].name == "now"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: image"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "x"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "thinking blocks"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [*user("a"), {"role": "assistant", "content": "The"}]}, "must not end with the assistant"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0]: image",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_tokens": "a"}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"metadata": {"user": "a"}}, "metadata.user"),
    ({"metadata": {"user_id": "a" * 600}}, "metadata.user_id"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a", "input_schema": {}, "x": 1}]}, "tools[0].x"),
    ({"tools": [{**NOW, "input_examples": [{}]}]}, "tools[0].input_examples"),
    (
        {"tools": [{"name": "a", "input_schema": {"type": "array"}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    ({"tools": [NOW, NOW]}, "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "then"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format.schema"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"context_management": {}}, "context_management"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"container": "a"}, "container"),
    ({"seed": 1}, "seed"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("body", "said"), REFUSED, ids=[f"{said}-{n}" for n, (_, said) in enumerate(REFUSED)])
def test_what_is_wrong_is_named_with_anthropics_names(claude: Client, body: dict[str, Any], said: str) -> None:
    status, error = claude.refused(body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert said in error["message"]


def test_errors_are_what_the_official_client_raises(claude: Client, quick: Running) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other") as missing:
        claude.ask("a", model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.ask("a", temperature=3)
    answer = claude.wire.get("/v1/messages")
    assert (answer.status_code, answer.json()["type"]) == (405, "error")
    assert claude.wire.post("/v1/messages/batches", json={}).json()["error"]["type"] == "not_found_error"
    version = claude.wire.post("/v1/messages", json={}, headers={"anthropic-version": "2031-01-01"})
    assert (version.status_code, version.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "anthropic-version" in version.json()["error"]["message"]
    broken = claude.wire.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["type"] == "invalid_request_error"


def test_a_key_may_come_in_either_header() -> None:
    with serving(served_names=["stand"], api_keys=["secret"]) as server:
        with Client(server, "secret") as client:
            assert client.ask("a").content[0].text == "a"
        with Client(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            client.ask("a")
        body = {"model": "stand", "max_tokens": 5, "messages": user("a")}
        for headers, status in (
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 200),
            ({"x-api-key": "wrong", "authorization": "Bearer secret"}, 401),
            ({}, 401),
        ):
            assert server.post("/v1/messages", body, headers=headers).status_code == status
            count = {"model": "stand", "messages": user("a")}
            assert server.post("/v1/messages/count_tokens", count, headers=headers).status_code == status
        # A key in that header opens nothing else.
        assert server.post("/v1/chat/completions", body, headers={"x-api-key": "secret"}).status_code == 401


def test_the_limits_are_those_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = store.create(file, "small", limits=Quota(tokens_per_minute=60))[1]
    with serving(served_names=["stand"], keys=str(file)) as server, Client(server, key) as client:
        assert client.ask("abc", max_tokens=20).content[0].text == "abc"
        with pytest.raises(anthropic.RateLimitError, match="tokens") as refused:
            client.ask("abc", max_tokens=48)
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert refused.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        assert client.ask("abc", max_tokens=20).usage.output_tokens == 4  # what was not used was given back


def test_an_engine_that_dies_ends_the_stream_with_an_error_event() -> None:
    with serving(served_names=["stand"], loader="tests.api.stand:load_slow") as server, Client(server) as client:
        body = {"model": "stand", "max_tokens": 500, "messages": user("x" * 400), "stream": True}
        with client.wire.stream("POST", "/v1/messages", json=body) as answer:
            events = read_events(answer.iter_lines())
            assert next(events)[0] == "message_start"
            server.post("/v1/completions", {"model": "stand", "prompt": [FIRST_BYTE, CRASH], "max_tokens": 1})
            name, data = list(events)[-1]
        assert name == "error"
        assert data["type"] == "error"
        assert data["error"]["type"] == "overloaded_error"


def test_unknown_parameters_can_be_passed_over() -> None:
    with serving(served_names=["stand"], unknown_parameters="warn") as server:
        answer = server.post("/v1/messages", {"model": "stand", "max_tokens": 5, "messages": user("a"), "seed": 1})
        assert answer.status_code == 200
        assert answer.headers["x-tailrace-ignored-parameters"] == "seed"


def test_a_request_is_counted_and_has_its_timeline(claude: Client, quick: Running) -> None:
    before = quick.metric("tailrace_http_requests_total", endpoint="messages", status="200")
    body = {"model": "stand", "max_tokens": 5, "messages": user("a")}
    answer = quick.post("/v1/messages", body, headers={"x-tailrace-timeline": "1"}).json()
    assert answer["tailrace"]["timeline"]["request"] == answer["id"]
    assert quick.metric("tailrace_http_requests_total", endpoint="messages", status="200") == before + 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\{[,é', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab,", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("ab{,", min_size=1, max_size=3), JSON, max_size=4), st.integers(0, 200))
def test_arguments_that_were_cut_off_are_what_is_complete_of_them(value: dict[str, Any], size: int) -> None:
    text = json.dumps(value)
    assert told_of(text) == value
    cut = text[:size]
    if cut and not cut.rstrip().endswith(tuple("0123456789-")):  # numbers may go on: either way is right
        assert told_of(cut) == jiter.from_json(cut.encode(), partial_mode=True)


def test_a_system_prompt_alone_is_no_conversation(quick: Running) -> None:
    body = {"model": "stand", "messages": [], "system": "Be brief."}
    for path, more in (("/v1/messages", {"max_tokens": 4}), ("/v1/messages/count_tokens", {})):
        refused = quick.post(path, {**body, **more})
        assert refused.status_code == 400
        assert "messages is empty" in refused.json()["error"]["message"]


@pytest.mark.parametrize("block", [{"text": "a"}, {"type": "image", "source": {}}])
def test_a_system_prompt_is_blocks_of_text(quick: Running, block: dict[str, Any]) -> None:
    body = {"model": "stand", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}], "system": [block]}
    refused = quick.post("/v1/messages", body)
    assert refused.status_code == 400
    assert "system[0]" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def several() -> Iterator[Client]:
    """A server whose model has seven names."""
    names = [f"m{at}" for at in range(7)]
    with serving(served_names=names, api_keys=["key"]) as server, Client(server, key="key") as client:
        yield client


def test_models_are_listed_page_by_page_in_either_direction(several: Client) -> None:
    names = [f"m{at}" for at in range(7)]
    assert [model.id for model in several.models.list()] == names
    assert [model.id for model in several.models.list(limit=2)] == names  # the client asks for the other pages
    page = several.models.list(limit=3)
    assert (page.has_more, page.first_id, page.last_id) == (True, "m0", "m2")
    page = several.models.list(limit=3, after_id="m2")
    assert ([one.id for one in page.data], page.has_more) == (["m3", "m4", "m5"], True)
    page = several.models.list(limit=3, after_id="m5")
    assert ([one.id for one in page.data], page.has_more) == (["m6"], False)
    page = several.models.list(limit=3, after_id="m6")
    assert (page.data, page.has_more, page.first_id, page.last_id) == ([], False, None, None)
    page = several.models.list(limit=3, before_id="m6")
    assert ([one.id for one in page.data], page.has_more) == (["m3", "m4", "m5"], True)
    page = several.models.list(limit=3, before_id="m2")
    assert ([one.id for one in page.data], page.has_more) == (["m0", "m1"], False)


def test_a_model_has_anthropics_form_where_their_header_is_sent(several: Client) -> None:
    model = several.models.retrieve("m3")
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("m3", "model", "m3", "active")
    assert (model.max_input_tokens, model.max_tokens) == (2048, 2047)
    assert abs(model.created_at.timestamp() - time.time()) < 3600
    assert several.beta.models.retrieve("m3").id == "m3"
    assert [one.id for one in several.beta.models.list(limit=1)][-1] == "m6"
    plain = several.wire.get("/v1/models/m3", headers={"authorization": "Bearer key"}).json()
    assert plain["object"] == "model"
    listed = several.server.client("key").models.list().data
    assert [one.id for one in listed] == [f"m{at}" for at in range(7)]


def test_errors_of_models_have_anthropics_form_too(several: Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        several.models.retrieve("other")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with Client(several.server, key="wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.models.list()
    wrong: list[dict[str, Any]] = [
        {"limit": 0},
        {"limit": 1001},
        {"after_id": "other"},
        {"before_id": "other"},
        {"after_id": "m1", "before_id": "m3"},
    ]
    for options in wrong:
        with pytest.raises(anthropic.BadRequestError, match=r"limit|after_id|before_id"):
            several.models.list(**options)
    header = {"x-api-key": "key", "anthropic-version": "2023-06-01"}
    answer = several.wire.get("/v1/models?page=2", headers=header)
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    answer = several.wire.get("/v1/models", headers={**header, "anthropic-version": "1999-01-01"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
