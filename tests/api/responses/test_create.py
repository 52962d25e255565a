"""Responses through a real socket, with the official client. The stand-in model says what the user wrote last."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.api.conftest import Running, serving

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ARGUMENTS = '{"city": "Zürich 😀"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
CHANGING = ("id", "created_at", "completed_at", "call_id", "item_id", "input_tokens_details")


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server whose model reasons in <think>."""
    with serving(served_names=["stand"], reasoning_parser="think") as running:
        yield running


def ask(server: Running, given: Any, **options: Any) -> Any:
    return server.client().responses.create(model="stand", input=given, **options)


def plain(value: Any) -> Any:
    """Without what is another in every answer."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items() if key not in CHANGING}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def both(server: Running, given: Any, **options: Any) -> tuple[Response, list[Any]]:
    """The whole answer, which the streamed one must equal, and the events."""
    whole = ask(server, given, **options)
    events = list(ask(server, given, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert plain(events[-1].response.to_dict()) == plain(whole.to_dict())
    return whole, events


def kinds(events: list[Any]) -> list[str]:
    """The types of the events, deltas in a row as one."""
    found: list[str] = []
    for event in events:
        if not found or found[-1] != event.type or not event.type.endswith(".delta"):
            found.append(event.type.removeprefix("response."))
        if len(found) > 1 and found[-1] == found[-2] and found[-1].endswith(".delta"):
            found.pop()
    return found


TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
BEGUN = ["created", "in_progress"]


def test_a_text_is_a_message_whole_and_streamed(quick: Running) -> None:
    whole, events = both(quick, "naïve 😀 text")
    assert whole.status == "completed"
    assert whole.output_text == "naïve 😀 text"
    assert whole.id.startswith("resp_")
    assert (whole.object, whole.error, whole.incomplete_details) == ("response", None, None)
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    assert kinds(events) == [*BEGUN, *TEXT, "completed"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert len({event.item_id for event in deltas}) == 1


def test_the_official_clients_own_accumulation_agrees(quick: Running) -> None:
    options: Any = {"model": "stand", "input": "Hm. " + CALL, "tools": [WEATHER]}
    with quick.client().responses.stream(**options) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == ask(quick, "Hm. " + CALL, tools=[WEATHER]).output_text == "Hm."
    assert final.output[1].type == "function_call"
    assert final.output[1].arguments == ARGUMENTS


def test_a_call_is_an_item_and_its_output_can_be_sent_back(quick: Running) -> None:
    whole, events = both(quick, "Hm.\n" + CALL, tools=[WEATHER])
    called = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [*BEGUN, *TEXT, *called, "completed"]
    message, call = whole.output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.call_id.startswith("call_")
    assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    items = [
        {"role": "user", "content": "Hm.\n" + CALL},
        *[item.to_dict() for item in whole.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert ask(quick, items, tools=[WEATHER]).output_text == "rain"


def test_reasoning_is_an_item_of_its_own(thinking: Running) -> None:
    whole, events = both(thinking, "<think>well, well</think>So: 4")
    reasoned = [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert kinds(events) == [*BEGUN, *reasoned, *TEXT, "completed"]
    reasoning = whole.output[0]
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["well, well"]
    assert whole.output_text == "So: 4"
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len("<think>well, well</think>")
    again = [
        {"role": "user", "content": "a"},
        *[item.to_dict() for item in whole.output],
        {"role": "user", "content": "b"},
    ]
    assert ask(thinking, again).output_text == "b"


def test_an_answer_that_is_cut_off_is_incomplete(quick: Running) -> None:
    whole, events = both(quick, "0123456789", max_output_tokens=4)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text == "0123"
    assert whole.output[0].status == "incomplete"
    assert kinds(events)[-1] == "incomplete"


def test_items_give_the_prompt_of_the_same_chat(quick: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    chat = quick.client().chat.completions.create(
        model="stand",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    answer = ask(quick, items, instructions="be brief")
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == chat.choices[0].message.content == "d"
    assert answer.instructions == "be brief"


def test_cached_tokens_are_told(quick: Running) -> None:
    first, second = (ask(quick, "a prefix that is longer than a page of sixteen tokens") for _ in range(2))
    assert second.usage.input_tokens_details.cached_tokens >= 16
    assert first.output_text == second.output_text


def test_log_probabilities_come_with_the_text(quick: Running) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, events = both(quick, "abc", **options)
    rows = whole.output[0].content[0].logprobs
    assert [row.token for row in rows][:3] == ["a", "b", "c"]
    assert all(len(row.top_logprobs) == 2 for row in rows)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [row.token for event in deltas for row in event.logprobs] == ["a", "b", "c"]
    assert ask(quick, "abc").output[0].content[0].logprobs == []


def test_structured_output_is_text_format(quick: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "seven", "schema": schema, "strict": True}}
    whole, _ = both(quick, '{"n": 7}', text=form)
    assert json.loads(whole.output_text) == {"n": 7}
    assert whole.text.to_dict()["format"]["name"] == "seven"


def test_an_empty_answer_is_an_empty_message(quick: Running) -> None:
    whole, events = both(quick, "abc", extra_body={"stop": "a"})
    assert whole.output_text == ""
    assert [item.type for item in whole.output] == ["message"]
    assert kinds(events)[-1] == "completed"


def test_what_was_said_of_the_request_is_in_the_response(quick: Running) -> None:
    answer = ask(
        quick,
        "x",
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        tools=[WEATHER],
        parallel_tool_calls=False,
        user="u",
    )
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.9, {"a": "b"})
    assert answer.tools[0].to_dict() == {**WEATHER, "strict": False}
    assert answer.parallel_tool_calls is False
    assert answer.to_dict()["store"] is False
    assert (answer.truncation, answer.tool_choice) == ("disabled", "auto")


def test_truncation_leaves_out_the_oldest_turns(quick: Running) -> None:
    turns = [{"role": "user", "content": f"{index} " + "x" * 400} for index in range(12)]
    items = [{"role": "system", "content": "kept"}, *turns, {"role": "user", "content": "last"}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(quick, items)
    assert refused.value.code == "context_length_exceeded"
    answer = ask(quick, items, truncation="auto")
    assert answer.output_text == "last"
    assert 1200 < answer.usage.input_tokens < 2048 - 2048 // 8 + 1
    bounded = ask(quick, items, truncation="auto", max_output_tokens=1000)
    assert bounded.usage.input_tokens <= 1048
    with pytest.raises(openai.BadRequestError):
        ask(quick, "x" * 3000, truncation="auto")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "file_search", "vector_store_ids": []}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "colour": "red"}]}, "tools[0].colour"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format.schema"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ],
)
def test_what_is_wrong_is_named(quick: Running, wrong: dict[str, Any], param: str) -> None:
    answer = quick.post("/v1/responses", {"model": "stand", "input": "x", **wrong})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    for word in ("response_format", "messages", "completion", "reasoning_effort", ".function."):
        assert word not in error["message"]


def test_an_unknown_model_and_another_method_are_refused(quick: Running) -> None:
    assert quick.post("/v1/responses", {"model": "other", "input": "x"}).status_code == 404
    answer = quick.get("/v1/responses")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


def test_a_stream_whose_engine_dies_ends_with_a_failed_response(fresh: Any) -> None:
    with fresh(served_names=["stand"], loader="tests.api.stand:load_slow") as server:
        events = []
        for event in ask(server, "x" * 500, stream=True):
            events.append(event)
            if len(events) == 8:
                os.kill(server.engine, signal.SIGKILL)
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed"
        assert events[-1].response.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))


def test_metrics_and_the_log_know_the_endpoint(quick: Running) -> None:
    before = quick.metric("tailrace_http_requests_total", endpoint="responses", status="200")
    ask(quick, "x", metadata={"colour": "red"})
    assert quick.metric("tailrace_http_requests_total", endpoint="responses", status="200") == before + 1
    assert any(line.get("endpoint") == "responses" for line in quick.requests())
