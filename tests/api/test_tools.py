"""Tools and reasoning through a real socket, with the official client. The stand-in model says what the user wrote, in
any format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tailrace.api.answers import call_ids
from tailrace.api.messages import with_short_ids
from tailrace.api.settings import Settings
from tailrace.terms import InvalidInput
from tests.api.conftest import Running, serving
from tests.api.stand import TAG_SIGN

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PLAIN = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, PLAIN]


def call(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server that was told its formats: reasoning in <think>, calls after a control token."""
    with serving(served_names=["stand"], tool_parser="mistral", reasoning_parser="think") as running:
        yield running


@pytest.fixture(scope="module")
def without() -> Iterator[Running]:
    """A server without parsers."""
    with serving(served_names=["stand"], tool_parser="none", reasoning_parser="none") as running:
        yield running


def ask(server: Running, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return server.client().chat.completions.create(model="stand", messages=messages, **{"tools": TOOLS, **options})


def joined(chunks: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that a client makes of the first choice's chunks, and the finish reason; checks each delta."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = []
    for chunk in chunks:
        for choice in [one for one in chunk.choices if one.index == 0]:
            delta = choice.delta.model_dump(exclude_unset=True)
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    assert set(piece) == {"index", "id", "type", "function"}
                    assert piece["function"]["arguments"] == ""
                    made = {"id": piece["id"], "type": "function", "function": dict(piece["function"])}
                    message["tool_calls"].append(made)
                else:
                    assert set(piece) == {"index", "function"}
                    assert set(piece["function"]) == {"arguments"}
                    assert piece["index"] == len(message["tool_calls"]) - 1
                    message["tool_calls"][-1]["function"]["arguments"] += piece["function"]["arguments"]
            finish += [choice.finish_reason] if choice.finish_reason else []
    assert len(finish) == 1
    return message, finish[0]


def said(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return message["content"] or "", message.get("reasoning_content") or "", calls


def both(server: Running, text: str, **options: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls and finish reason, whole and streamed, which must be the same."""
    whole = ask(server, text, **options)
    message = whole.choices[0].message.model_dump()
    chunks = list(ask(server, text, stream=True, stream_options={"include_usage": True}, **options))
    streamed, finish = joined(chunks)
    assert said(streamed) == said(message)
    assert finish == whole.choices[0].finish_reason
    details = whole.usage.completion_tokens_details
    assert chunks[-1].usage.completion_tokens_details == details
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    return (*said(message), finish)


def test_a_call_is_a_call_whole_and_streamed(quick: Running) -> None:
    arguments = '{"city": "Zürich 😀"}'
    assert both(quick, call(arguments)) == ("", "", [("get_weather", arguments)], "tool_calls")
    answer = ask(quick, call(arguments)).choices[0].message
    assert answer.content is None
    assert answer.tool_calls[0].type == "function"
    assert answer.tool_calls[0].id.startswith("call_")
    assert both(quick, "Hm.\n" + call("{}", "now") + "\n")[:3] == ("Hm.", "", [("now", "{}")])


def test_the_official_clients_own_accumulation_agrees(quick: Running) -> None:
    text = "First.\n" + call('{"city": "A"}') + "\n" + call("{}", "now")
    messages: Any = [{"role": "user", "content": text}]
    with quick.client().chat.completions.stream(model="stand", messages=messages, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "First."
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == [
        ("get_weather", '{"city": "A"}'),
        ("now", "{}"),
    ]
    assert len({c.id for c in final.message.tool_calls}) == 2
    results = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in final.message.tool_calls]
    again = quick.client().chat.completions.create(
        model="stand", messages=[*messages, final.message, *results], tools=TOOLS
    )
    assert again.choices[0].message.content == "x"


def test_long_arguments_are_streamed_in_pieces(quick: Running) -> None:
    arguments = json.dumps({"city": "x" * 400})
    chunks = list(ask(quick, call(arguments), stream=True))
    pieces = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert pieces[0].function.name == "get_weather"
    assert len(pieces) > 10
    assert joined(chunks)[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_is_no_call_is_text_and_ends_as_text_does(quick: Running) -> None:
    for text in ("plain", "a < b", call("{oops"), "<tool_call>", "  <tool_call>\n{} \n"):
        assert both(quick, text) == (text, "", [], "stop")
    assert ask(quick, call("{}"), tools=None).choices[0].message.content == call("{}")


def test_without_a_choice_of_tools_the_prompt_has_none_and_the_text_stays(quick: Running) -> None:
    bare = ask(quick, call("{}"), tools=None)
    none = ask(quick, call("{}"), tool_choice="none")
    assert none.choices[0].message.content == call("{}")
    assert none.choices[0].finish_reason == "stop"
    assert none.usage.prompt_tokens == bare.usage.prompt_tokens
    assert ask(quick, "x", tool_choice="auto").usage.prompt_tokens > ask(quick, "x", tools=None).usage.prompt_tokens


def test_without_parallel_calls_the_first_one_stays(quick: Running) -> None:
    text = call('{"city": "A"}') + call('{"city": "B"}') + "\nDone."
    both_calls = [("get_weather", '{"city": "A"}'), ("get_weather", '{"city": "B"}')]
    assert both(quick, text) == ("Done.", "", both_calls, "tool_calls")
    assert both(quick, text, parallel_tool_calls=True)[2] == both_calls
    assert both(quick, text, parallel_tool_calls=False) == ("Done.", "", both_calls[:1], "tool_calls")


def test_ids_of_calls_are_unique(quick: Running) -> None:
    text = call("{}") * 3
    answers = [ask(quick, text, n=3) for _ in range(2)]
    ids = [c.id for answer in answers for choice in answer.choices for c in choice.message.tool_calls]
    chunks = ask(quick, text, n=2, stream=True)
    ids += [c.id for chunk in chunks for c in chunk.choices[0].delta.tool_calls or () if c.id]
    assert len(ids) == 18 + 6
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("size", [10, 400])
def test_an_answer_that_is_cut_off_is_not_a_finished_call(quick: Running, size: int) -> None:
    text = call(json.dumps({"city": "x" * size}))
    content, _, calls, finish = both(quick, text, max_tokens=len(text) - 30)
    assert finish == "length"
    if size == 10:
        assert (content, calls) == (text[:-30], [])
    else:
        assert (content, calls) == ("", [("get_weather", text[text.index('{"city') : -30])])


def test_stop_strings_end_a_call_as_they_end_text(quick: Running) -> None:
    text = "Hm. " + call('{"city": "A"}') + " and more"
    assert both(quick, text, stop="city") == (
        "Hm. <tool_call>\n" + '{"name": "get_weather", "arguments": {"',
        "",
        [],
        "stop",
    )
    assert both(quick, text, stop=" and") == ("Hm.", "", [("get_weather", '{"city": "A"}')], "tool_calls")


def test_log_probabilities_are_of_every_token(quick: Running) -> None:
    text = "Hm. " + call('{"city": "A"}')
    whole = ask(quick, text, logprobs=True).choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in whole[:-1]).decode() == text
    chunks = list(ask(quick, text, logprobs=True, stream=True))
    assert [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content] == whole


def test_usage_counts_up_beside_calls(quick: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(quick, "Hm. " + call("{}"), stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks[1:]]
    assert counts == sorted(counts)


def test_what_was_called_can_be_sent_back_in_any_form(quick: Running) -> None:
    message = ask(quick, "Hm.\n" + call('{"city": "A"}')).choices[0].message.model_dump()
    ident = message["tool_calls"][0]["id"]

    def prompt(assistant: dict[str, Any]) -> list[int]:
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", **assistant},
            {"role": "tool", "tool_call_id": ident, "content": "rain"},
        ]
        body = {"model": "stand", "messages": messages, "tools": TOOLS}
        assert quick.post("/v1/chat/completions", body).status_code == 200
        del body["model"]
        return list(quick.post("/tokenize", body).json()["tokens"])

    assert prompt(message) == prompt({"content": "Hm.", "tool_calls": message["tool_calls"]})
    calls = {"tool_calls": message["tool_calls"]}
    assert prompt(calls) == prompt({**calls, "content": None}) == prompt({**calls, "content": ""})
    assert prompt(calls) == prompt({**message, "content": None, "reasoning_content": None})


def test_ids_are_shortened_for_templates_that_want_them_short() -> None:
    short, long = call_ids(short=True)(), call_ids(short=False)()
    assert (len(short), short.isalnum(), len(long)) == (9, True, 29)
    calls = [{"id": ident, "function": {"name": "f", "arguments": {}}} for ident in (short, long)]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "", "tool_call_id": short},
        {"role": "tool", "content": "", "tool_call_id": long},
    ]
    changed = with_short_ids(messages)
    new = [one["id"] for one in changed[0]["tool_calls"]]
    assert [one["tool_call_id"] for one in changed[1:]] == new
    assert new[0] == short
    assert len(new[1]) == 9
    assert new[1].isalnum()
    assert messages[2]["tool_call_id"] == long


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
def test_a_parser_that_is_not_known_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"auto, .*none, not magic") as refused:
        Settings("m", **{name: "magic"}).check()
    assert refused.value.param == name
    Settings("m", **{name: "none"}).check()


def test_a_tag_that_is_a_control_token_is_seen_and_a_user_cannot_write_it(thinking: Running) -> None:
    text = f'{TAG_SIGN}[{{"name": "get_weather", "arguments": {{"city": "A"}}}}]'
    assert both(thinking, text) == ("", "", [("get_weather", '{"city": "A"}')], "tool_calls")
    assert both(thinking, f"{TAG_SIGN}now[ARGS]{{}}")[2] == [("now", "{}")]
    assert both(thinking, f"{TAG_SIGN} oops") == ("[TOOL_CALLS] oops", "", [], "stop")
    assert both(thinking, f"a{TAG_SIGN}b", stop="CALLS]b") == ("a[TOOL_", "", [], "stop")


def test_a_control_token_is_no_text_where_nobody_looks_for_it(without: Running) -> None:
    assert ask(without, f"a{TAG_SIGN}b<think>c</think>", tools=None).choices[0].message.content == "ab<think>c</think>"
    error = without.post("/v1/chat/completions", body(tools=TOOLS)).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert without.post("/v1/chat/completions", body(tools=TOOLS, tool_choice="none")).status_code == 200


def reasoned(server: Running, text: str, **options: Any) -> tuple[tuple[str, str, list[Any], str], Any]:
    usage = ask(server, text, **options).usage
    return both(server, text, **options), usage.completion_tokens_details.reasoning_tokens


def test_reasoning_is_told_from_the_answer_and_counted(thinking: Running) -> None:
    reasoning = "<think>\nBecause é.\n</think>"
    text = reasoning + "\n\nYes."
    answer, tokens = reasoned(thinking, text, tools=None)
    assert answer == ("Yes.", "Because é.", [], "stop")
    assert tokens == len(reasoning.encode())
    assert reasoned(thinking, "Yes.", tools=None) == (("Yes.", "", [], "stop"), 0)
    message = ask(thinking, "Yes.", tools=None).choices[0].message
    assert message.reasoning_content is None
    answer, tokens = reasoned(thinking, reasoning + f"{TAG_SIGN}now{{}}", n=2)
    assert answer[:3] == ("", "Because é.", [("now", "{}")])
    assert tokens == 2 * len(reasoning.encode())


def test_reasoning_that_is_cut_off_is_reasoning(thinking: Running) -> None:
    text = "<think>\nOn and on"
    assert reasoned(thinking, text, max_tokens=12)[0] == ("", "On a", [], "length")
    assert reasoned(thinking, text, stop=" and")[0] == ("", "On", [], "stop")


def test_the_prompt_says_whether_reasoning_has_begun(thinking: Running) -> None:
    def options(value: bool) -> dict[str, Any]:
        return {"extra_body": {"chat_template_kwargs": {"enable_thinking": value}}, "tools": None}

    answer, tokens = reasoned(thinking, "<think>\nWhy.\n</think>\n\nSo.", **options(True))
    assert answer == ("So.", "Why.", [], "stop")
    assert tokens == len("Why.\n</think>")
    closed = "<think>\n\n</think>\n\nSo <think>."
    assert reasoned(thinking, closed, **options(False)) == (("So <think>.", "", [], "stop"), 0)
    assert both(thinking, closed, tools=None, reasoning_effort="none")[0] == "So <think>."


def body(**extra: Any) -> dict[str, Any]:
    return {"model": "stand", "messages": [{"role": "user", "content": "a"}], **extra}


def tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **function}}]


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [*TOOLS, {"type": "custom", "custom": {"name": "x"}}]}, "tools[2]"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]}, "tools[0].x"),
    ({"tools": tool(name="a b")}, "tools[0].function.name"),
    ({"tools": tool(name="x" * 65)}, "tools[0].function.name"),
    ({"tools": tool(name=5)}, "tools[0].function.name"),
    ({"tools": tool(description=5)}, "tools[0].function.description"),
    ({"tools": tool(parameters=[])}, "tools[0].function.parameters"),
    ({"tools": tool(parameters=nested(33))}, "tools[0].function.parameters"),
    ({"tools": tool(parameters={"d": "x" * 300_000})}, "tools"),
    ({"tools": tool(strict="no")}, "tools[0].function.strict"),
    ({"tools": tool(other=1)}, "tools[0].function.other"),
    ({"tools": tool() * 2}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": named("now")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": named("then")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "now"}}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": TOOLS, "tool_choice": allowed("any", "now")}, "tool_choice.allowed_tools.mode"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "then")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": tool(parameters={"type": "string"}), "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tools": tool(parameters={"type": "nonsense"}), "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tools": [PLAIN, *tool(strict=True, parameters=UNIQUE)]}, "tools[1].function.parameters"),
    ({"tools": [PLAIN, *tool(strict=True, parameters={"$ref": "#/$defs/a"})]}, "tools[1].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "none", "functions": []}, "functions"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "none"}, "function_call"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"chat_template_kwargs": {"mood": "fine"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "reasoning_effort"),
]


@pytest.mark.parametrize(("extra", "param"), REFUSED, ids=[f"{param}-{n}" for n, (_, param) in enumerate(REFUSED)])
def test_what_is_wrong_with_tools_and_reasoning_is_named(quick: Running, extra: dict[str, Any], param: str) -> None:
    answer = quick.post("/v1/chat/completions", body(**extra))
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(param)


def test_what_is_right_at_its_limit_is_taken(quick: Running) -> None:
    most = [{"type": "function", "function": {"name": f"f{n}", "strict": False}} for n in range(10)]
    for extra in ({"tools": most}, {"tools": tool(parameters=nested(32))}, {"tools": tool(parameters=None)}):
        answer = quick.post("/v1/chat/completions", body(**extra))
        assert answer.status_code == 200, answer.text
    assert quick.post("/tokenize", {"prompt": "a", "tools": TOOLS}).json()["error"]["param"] == "tools"


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"}},
}
HELD = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}, PLAIN]


def held(found: list[tuple[str, str]]) -> list[str]:
    """The names of calls whose arguments must be valid."""
    for name, arguments in found:
        jsonschema.validate(json.loads(arguments), CITY if name == "get_weather" else {"maxProperties": 0})
    return [name for name, _ in found]


def test_a_required_call_is_made_whatever_the_model_wants(quick: Running) -> None:
    wanted = call('{"city": "oslo", "days": 2}')
    answer = both(quick, wanted, tools=HELD, tool_choice="required")
    assert answer == ("", "", [("get_weather", '{"city": "oslo", "days": 2}')], "tool_calls")
    for seed in range(4):
        content, _, calls, finish = both(
            quick, "I will not.", tools=HELD, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert (content, len(held(calls)), finish) == ("", 1, "tool_calls")
    content, _, calls, finish = both(quick, wanted, tools=HELD, tool_choice="required", max_tokens=30)
    assert finish == "length"


def test_a_named_tool_is_called_once_and_no_other(quick: Running) -> None:
    for said in ("I will not.", call("{}", "now"), call('{"city": "oslo", "days": 2}') * 2):
        content, _, calls, finish = both(quick, said, tools=HELD, tool_choice=named("get_weather"), seed=3)
        assert (content, held(calls), finish) == ("", ["get_weather"], "tool_calls")


def test_allowed_tools_leave_the_prompt_as_it_is(quick: Running) -> None:
    bare = ask(quick, "x", tools=HELD).usage.prompt_tokens
    answer = ask(quick, call('{"city": "oslo", "days": 2}'), tools=HELD, tool_choice=allowed("required", "now"))
    assert [one.function.name for one in answer.choices[0].message.tool_calls][:1] == ["now"]
    assert ask(quick, "x", tools=HELD, tool_choice=allowed("auto", "now")).usage.prompt_tokens == bare
    assert both(quick, "Just text.", tools=HELD, tool_choice=allowed("auto", "now"))[0] == "Just text."
    made = both(quick, "Hm. " + call("{}", "now"), tools=HELD, tool_choice=allowed("auto", "now"))
    assert made == ("Hm.", "", [("now", "{}")], "tool_calls")
    names = both(quick, call("{}"), tools=HELD, tool_choice=allowed("auto", "now"), max_tokens=200, seed=4)[2]
    assert {name for name, _ in names} <= {"now"}


def test_arguments_of_strict_tools_are_held_to_their_schema_and_text_is_free(quick: Running) -> None:
    strict = [{"type": "function", "function": {**HELD[0]["function"], "strict": True}}, PLAIN]
    assert both(quick, "Just < text.", tools=strict) == ("Just < text.", "", [], "stop")
    right = '{"city": "oslo", "days": 2}'
    assert both(quick, "Hm. " + call(right) + call("{}", "now") + "So.", tools=strict) == (
        "Hm. So.",
        "",
        [("get_weather", right), ("now", "{}")],
        "tool_calls",
    )
    _, _, calls, finish = both(quick, call('{"town": "oslo"}'), tools=strict, max_tokens=300, seed=4)
    assert finish == "length" or held(calls[:1]) == ["get_weather"]
    # Without it the model writes what it likes.
    assert both(quick, call('{"town": "oslo"}'), tools=HELD)[2] == [("get_weather", '{"town": "oslo"}')]


def test_a_required_call_after_reasoning_and_a_control_token(thinking: Running) -> None:
    body = '{"name": "get_weather", "arguments": {"city": "oslo", "days": 2}}'
    said = f"<think>\nSo.\n</think>\n\n{TAG_SIGN} [{body}]"
    asked = {"tools": HELD, "tool_choice": "required"}
    assert both(thinking, said, **asked) == (
        "",
        "So.",
        [("get_weather", '{"city": "oslo", "days": 2}')],
        "tool_calls",
    )
    assert (
        both(thinking, f"{TAG_SIGN} [{body}, {body}]", **asked)[2]
        == [("get_weather", '{"city": "oslo", "days": 2}')] * 2
    )
    opened = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    content, reasoning, calls, finish = both(thinking, "<think>\nI never stop", max_tokens=9, **asked, **opened)
    assert (content, reasoning, calls, finish) == ("", "I never s", [], "length")


def test_several_choices_are_held_each(quick: Running) -> None:
    answer = ask(quick, "no", tools=HELD, tool_choice=named("get_weather"), n=3, seed=5)
    for choice in answer.choices:
        assert held([(c.function.name, c.function.arguments) for c in choice.message.tool_calls]) == ["get_weather"]
