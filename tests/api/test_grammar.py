"""Structured output through the server: what is asked for is what comes, and what is wrong is refused by name."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.api.conftest import Running, serving

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(server: Running, content: str = "hello", **fields: Any) -> Any:
    body = {"model": "stand", "messages": [{"role": "user", "content": content}], "max_tokens": 100, **fields}
    return server.post("/v1/chat/completions", body)


def strict(schema: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def misnamed() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a b"}}


class Person(pydantic.BaseModel):
    name: str
    age: int
    kind: Literal["cat", "dog"]


def test_the_official_client_parses_into_a_model(quick: Running) -> None:
    said = '{"name": "Tom", "age": 7, "kind": "cat"}'
    answer = quick.client().chat.completions.parse(
        model="stand", messages=[{"role": "user", "content": said}], response_format=Person, max_tokens=100
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed == Person(name="Tom", age=7, kind="cat")


def test_a_stream_is_equal_to_its_whole_and_ends_when_the_text_is_complete(quick: Running) -> None:
    said = '{"name": "Ann", "age": 41} and more'
    whole = ask(quick, said, response_format=strict(SCHEMA), seed=1).json()["choices"][0]
    assert whole["message"]["content"] == '{"name": "Ann", "age": 41}'
    assert whole["finish_reason"] == "stop"
    stream = quick.client().chat.completions.create(
        model="stand",
        messages=[{"role": "user", "content": said}],
        response_format=strict(SCHEMA),  # type: ignore[call-overload]
        seed=1,
        max_tokens=100,
        stream=True,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole["message"]["content"]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "said", "want"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, 2]}', '{"a": [1, 2]}'),
        ({"guided_choice": ["yes", "no"]}, "no", "no"),
        ({"guided_regex": "[a-c]{3}"}, "abcabc", "abc"),
        ({"guided_json": SCHEMA}, '{"name": "B", "age": 1}', '{"name": "B", "age": 1}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"name": "B", "age": 1}', '{"name": "B", "age": 1}'),
        ({"guided_grammar": 'start: "x" NUMBER "y"\nNUMBER: /[0-9]+/'}, "x12y", "x12y"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "right", "right"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"name": "B", "age": 1}', '{"name": "B", "age": 1}'),
        ({"structured_outputs": {"regex": "(ab)+"}}, "abab", "abab"),
    ],
)
def test_each_way_to_ask_for_a_form(quick: Running, fields: dict[str, Any], said: str, want: str) -> None:
    answer = ask(quick, said, **fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (want, "stop")


def test_completions_and_several_choices_have_it_too(quick: Running) -> None:
    body = {"model": "stand", "prompt": "a", "max_tokens": 40, "n": 3, "guided_regex": "[x-z]{4}", "logprobs": 1}
    answer = quick.post("/v1/completions", body).json()
    for choice in answer["choices"]:
        assert len(choice["text"]) == 4
        assert set(choice["text"]) <= set("xyz")
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_what_is_cut_short_ends_with_length(quick: Running) -> None:
    choice = ask(quick, '{"name": "Ann", "age": 4}', response_format=strict(SCHEMA), max_tokens=12).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"name": "Ann"'.startswith(choice["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": strict([1])}, "response_format.json_schema.schema"),
        ({"response_format": strict({"type": "nonsense"})}, "response_format.json_schema.schema"),
        ({"response_format": strict({"type": "array", "uniqueItems": True})}, "response_format.json_schema.schema"),
        ({"response_format": strict({"x": "y" * 300_000})}, "response_format"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_wrong_is_refused_by_name(quick: Running, fields: dict[str, Any], param: str) -> None:
    answer = ask(quick, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"]


ENDLESS = {"$ref": "#"}
NESTED = {"$defs": {"x": {"$ref": "#/$defs/x"}}, "type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}
INSIDE = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "age", "parameters": parameters, "strict": True}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"guided_grammar": "start: start"}, "guided_grammar"),
        ("/v1/chat/completions", {"guided_json": ENDLESS}, "guided_json"),
        ("/v1/chat/completions", {"guided_json": NESTED}, "guided_json"),
        ("/v1/chat/completions", {"response_format": strict(ENDLESS)}, "response_format.json_schema.schema"),
        ("/v1/chat/completions", {"tools": [tool(INSIDE)], "tool_choice": "required"}, "tools"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": ENDLESS}}, "structured_outputs.json"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": ENDLESS}}},
            "text.format.schema",
        ),
    ],
)
def test_what_only_the_engine_finds_wrong_names_the_parameter_too(
    quick: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}]} if path == "/v1/chat/completions" else {}
    answer = quick.post(path, {"model": "stand", **messages, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "it refers to itself without an end" in error["message"]


@pytest.mark.alone
def test_a_grammar_that_takes_long_holds_nobody_else_up(quick: Running) -> None:
    def names(start: int) -> dict[str, Any]:
        return {"properties": {f"property number {n}": {"type": "string"} for n in range(start, start + 800)}}

    answers: list[int] = []

    def large(n: int) -> None:
        answers.append(ask(quick, response_format=strict(names(n)), max_tokens=1, temperature=0).status_code)

    threads = [threading.Thread(target=large, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        begin = time.monotonic()
        assert ask(quick, "free", max_tokens=4).status_code == 200
        assert time.monotonic() - begin < 5.0
    assert answers == [200, 200]


def test_the_error_is_what_the_official_client_raises(quick: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="unclosed character class"):
        quick.client().chat.completions.create(
            model="stand", messages=[{"role": "user", "content": "a"}], extra_body={"guided_regex": "["}
        )


TOOLS = [{"type": "function", "function": {"name": "age"}}]
CALL = '<tool_call>\n{"name": "age", "arguments": {}}\n</tool_call>'


def test_with_tools_the_answer_has_the_form_or_is_a_call(quick: Running) -> None:
    said = '{"name": "Ann", "age": 41}'
    fields: dict[str, Any] = {"response_format": strict(SCHEMA), "tools": TOOLS}
    choice = ask(quick, said + " and more", **fields).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
    choice = ask(quick, CALL, **fields).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "age", "arguments": "{}"}
    assert ask(quick, said, tool_choice="none", **fields).json()["choices"][0]["message"]["content"] == said
    forced = ask(quick, said, tool_choice="required", **fields).json()["choices"][0]["message"]
    assert forced["tool_calls"][0]["function"]["name"] == "age"


def test_a_form_is_that_of_the_answer_and_reasoning_comes_before_it() -> None:
    with serving(served_names=["stand"], reasoning_parser="think") as server:
        opened = {"chat_template_kwargs": {"enable_thinking": True}}  # the prompt ends within reasoning
        said = "<think>\nHm.\n</think>\n\nno"
        for fields in ({"guided_choice": ["yes", "no"]}, {"guided_regex": "no|never"}):
            whole = ask(server, said, **fields, **opened).json()
            message = whole["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("no", "Hm.")
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Hm.\n</think>")
            closed = ask(server, "<think>\n\n</think>\n\nno", **fields, reasoning_effort="none").json()["choices"][0][
                "message"
            ]
            assert (closed["content"], closed["reasoning_content"]) == ("no", None)
            free = ask(server, "<think>Hm.</think>\n\nno", **fields).json()["choices"][0]["message"]
            assert (free["content"], free["reasoning_content"]) == ("no", "Hm.")
            assert ask(server, "no", **fields).json()["choices"][0]["message"]["content"] == "no"
        cut = ask(server, "<think>\nOn and on", guided_choice=["yes"], max_tokens=5, **opened).json()["choices"][0]
        assert (cut["message"]["content"], cut["message"]["reasoning_content"], cut["finish_reason"]) == (
            "",
            "On an",
            "length",
        )
