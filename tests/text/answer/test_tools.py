"""Tool calls in each format: what is one, what is text, and what comes when."""

from __future__ import annotations

import json
import time

import pytest

from tailrace.text.answer.call import HELD_ARGUMENTS, MAX_HELD
from tailrace.text.answer.jsonread import MAX_DEPTH
from tailrace.text.answer.parts import Arguments, Call, Content
from tests.text.answer.support import Message, message, parser, run

ARGUMENTS = [
    "{}",
    '{"city": "Zürich", "days": 2}',
    '{ "a" : [1, -2.5e+3, true, false, null, {"b": {}}], "c": [] }',
    r'{"text": "a \"quoted\" \\ back\/slash \u00e9 \ud83d\ude00\n"}',
    '{"emoji": "👩‍👩‍👧", "東京": "日本語"}',
    '{"html": "</tool_call><tool_call>{\\"name\\": \\"f\\"}", "m": "[TOOL_CALLS][]", "l": "<|python_tag|>", "x": "}]"}',
]


def write(form: str, name: str, arguments: str) -> str:
    """One call as a model writes it."""
    match form:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        case "llama3":
            return f'{{"name": "{name}", "parameters": {arguments}}}'
        case "python tag":
            return f'<|python_tag|>{{"type": "function", "name": "{name}", "parameters": {arguments}}}'
        case "mistral":
            return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}, "id": "abcdefghi"}}]'
        case "mistral head":
            return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
        case "mistral id":
            return f"[TOOL_CALLS]{name}[CALL_ID]abc123DEF[ARGS] {arguments}"
        case "fence":
            return f'```json\n{{"name": "{name}", "arguments": {arguments}}}\n```'
        case _:
            return f'{{"name": "{name}", "arguments": {arguments}}}'


FORMS = {"hermes": "hermes", "llama3": "llama3", "python tag": "llama3", "mistral": "mistral"}
FORMS |= {"mistral head": "mistral", "mistral id": "mistral", "fence": "json", "json": "json"}


def parse(form: str, text: str, **options) -> Message:
    """Whole and a character at a time, which must be the same."""
    whole = run(parser(form, **options), [text])
    assert run(parser(form, **options), text) == whole
    return message(whole)


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_call_has_its_name_and_its_arguments_as_written(form: str, arguments: str) -> None:
    said = parse(FORMS[form], write(form, "größe", arguments))
    assert said == Message("", "", [("größe", arguments)])
    json.loads(said.calls[0][1])


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("hermes", "Let me look.\n{0}", "Let me look."),
        ("hermes", "\n\n{0}\n", ""),
        ("hermes", "Before.\n{0}\nAfter.  ", "Before.\n\nAfter.  "),
        ("hermes", "{0}\n\nAfter.", "After."),
        ("mistral", "Ok: {0} done", "Ok:  done"),
        ("python tag", "Now. {0}", "Now."),
        ("json", " \n{0}\n", ""),
        ("fence", "{0}\nThat is it.", "That is it."),
        ("llama3", "{0} and so on", "and so on"),
    ],
)
def test_text_around_a_call_is_content_without_the_white_space_beside_it(form: str, text: str, content: str) -> None:
    said = parse(FORMS[form], text.format(write(form, "f", "{}")))
    assert said == Message(content, "", [("f", "{}")])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "{hermes_f}\n{hermes_g}"),
        ("hermes", "{hermes_f}{hermes_g}"),
        ("hermes", '<tool_call>{{"name":"f","arguments":{{"a":1}}}}\n{{"name":"f","arguments":{{"b":2}}}}</tool_call>'),
        ("llama3", "{json_f}; {json_g}"),
        ("llama3", "<|python_tag|>{json_f};{json_g}"),
        ("llama3", "{json_f}\n{json_g}"),
        ("mistral", "[TOOL_CALLS] [{json_f}, {json_g}]"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{{"a":1}}[TOOL_CALLS]f[ARGS]{{"b":2}}'),
        ("mistral", '[TOOL_CALLS]f{{"a":1}} [TOOL_CALLS]f{{"b":2}}'),
        ("json", "[{json_f},\n {json_g}]"),
        ("json", "```\n[{json_f},{json_g}]\n```"),
        ("json", "{json_f},\n{json_g}"),
    ],
)
def test_several_calls_are_numbered_in_order(form: str, text: str) -> None:
    calls = {f"json_{n}": write("json", "f", a) for n, a in (("f", '{"a":1}'), ("g", '{"b":2}'))}
    calls |= {f"hermes_{n}": write("hermes", "f", a) for n, a in (("f", '{"a":1}'), ("g", '{"b":2}'))}
    text = text.format(**calls)
    assert parse(form, text) == Message("", "", [("f", '{"a":1}'), ("f", '{"b":2}')])
    assert parse(form, text, most=1) == Message("", "", [("f", '{"a":1}')])


MALFORMED = [
    "<tool_call>",
    "<tool_call>\n",
    "<tool_call>oops</tool_call>",
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
    r'<tool_call>{"name": "f", "arguments": {"a": "\x"}}</tool_call>',
    r'<tool_call>{"name": "f", "arguments": {"a": "\u12g4"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}{}"}</tool_call>',
    '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}, "parameters": {}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
    r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>{}</tool_call>",
    '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "unfinished',
    '<tool_call>{"name": "f", "argum',
    "a < b, <tool, <tool_cal",
    "</tool_call> alone",
    "text\n \n<tool_call>oops\n",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_stays_text(text: str) -> None:
    assert parse("hermes", text) == Message(text, "", [])


OTHERS = [
    ("llama3", '{"name": "unknown", "parameters": {}}'),
    ("llama3", '{"name": "f"}'),
    ("llama3", '{"name": "f", "parameters": null}'),
    ("llama3", '{"city": "Zürich"}'),
    ("llama3", 'Sure: {"name": "f", "parameters": {}}'),
    ("llama3", '<|python_tag|>print("hi")'),
    ("llama3", "<|python"),
    ("json", '{"answer": [1, 2]}'),
    ("json", '[{"a": 1}]'),
    ("json", "[]"),
    ("json", "[1, 2]"),
    ("json", "```json\n{}\n```"),
    ("json", "```python\nprint()\n```"),
    ("json", "``"),
    ("json", 'Look: {"name": "f", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS] I will call it."),
    ("mistral", "[TOOL_CALLS]f[ARG]{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a":'),
    ("mistral", "[TOOL_CALLS]" + "f" * 200 + "{}"),
    ("mistral", "[TOOL_CALLS"),
]


@pytest.mark.parametrize(("form", "text"), OTHERS)
def test_what_is_no_call_in_other_formats_stays_text(form: str, text: str) -> None:
    assert parse(form, text) == Message(text, "", [])


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # what follows the arguments does not undo the call
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', ("", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} so', ("so", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, oops} ok', ("oops} ok", '{"a": 1}')),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', ("", '{"a": 1}')),
        # other ways to write the same
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", '{"a": 1}')),
        ("hermes", '<tool_call>{"id": 1, "x": [{"name": 2}], "name": "f", "arguments": {}}</tool_call>', ("", "{}")),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "{}")),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "{}")),
        ("hermes", '<tool_call>{"n\\u0061me": "f", "arguments": {}}</tool_call>', ("", "{}")),
        # a call after one that is none
        ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', ("<tool_call>", "{}")),
        ("hermes", 'a <tool_cal<tool_call>{"name": "f", "arguments": {}}', ("a <tool_cal", "{}")),
    ],
)  # fmt: skip
def test_small_mistakes_are_understood(form: str, text: str, expected: tuple[str, str]) -> None:
    content, arguments = expected
    assert parse(form, text) == Message(content, "", [("f", arguments)])


def long_call(size: int, tail: str = "") -> str:
    return '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * size + tail


def test_short_arguments_come_whole_and_long_ones_as_they_are_written() -> None:
    made = parser("hermes")
    assert [p for c in long_call(HELD_ARGUMENTS - 20, '"') for p in made.push(c)] == []
    assert made.push("}") == [Call(0, "f"), Arguments(0, '{"a": "' + "x" * (HELD_ARGUMENTS - 20) + '"}')]
    made = parser("hermes")
    head = long_call(HELD_ARGUMENTS - 7)
    assert [part for char in head for part in made.push(char)] == []
    first = made.push("y")
    assert [type(part) for part in first] == [Call, Arguments]
    assert made.push("z") == [Arguments(0, "z")]
    assert made.push('"') == [Arguments(0, '"')]
    assert made.push("}}\n</tool_call>") == [Arguments(0, "}")]
    assert made.push("Bye") == [Content("Bye")]
    assert made.finish() == []


def test_long_arguments_that_go_wrong_go_on_as_the_model_wrote_them() -> None:
    text = long_call(400, '", oops: </tool_call>\nBye')
    assert parse("hermes", text) == Message("Bye", "", [("f", '{"a": "' + "x" * 400 + '", oops: ')])
    unfinished = long_call(400)
    assert parse("hermes", unfinished) == Message("", "", [("f", '{"a": "' + "x" * 400)])
    text = '{"name": "f", "parameters": {"a": "' + "x" * 400 + '" "b"}} end'
    assert parse("llama3", text) == Message("", "", [("f", '{"a": "' + "x" * 400 + '" "b"}} end')])


def test_what_is_held_back_is_bounded() -> None:
    for text in (
        '<tool_call>{"junk": "' + "x" * 2 * MAX_HELD,
        '<tool_call>{"name": "f", "arguments": "' + "x" * 2 * MAX_HELD,
        '<tool_call>{"arguments": {"a": "' + "x" * 2 * MAX_HELD,
    ):
        made = parser("hermes")
        shown = "".join(part.text for at in range(0, len(text), 97) for part in made.push(text[at : at + 97]))
        assert len(text) - len(shown) < 200
        assert parse("hermes", text).content == text


def test_deep_nesting_is_no_call() -> None:
    def nested(depth: int) -> str:
        return write("hermes", "f", '{"a": ' + "[" * depth + "]" * depth + "}")

    assert len(parse("hermes", nested(MAX_DEPTH - 2)).calls) == 1
    assert parse("hermes", nested(MAX_DEPTH)).calls == []


def test_text_is_shown_at_once_unless_it_may_become_a_tag() -> None:
    made = parser("hermes")
    assert made.push("a <") == [Content("a")]
    assert made.push("b") == [Content(" <b")]
    assert made.push("<tool") == []
    assert made.push("_box") == [Content("<tool_box")]
    made = parser("mistral")
    assert made.push("[TOOL_CALLS]f[") == []
    assert made.push("x") == [Content("[TOOL_CALLS]f[x")]
    made = parser("llama3")
    assert made.push("S") == [Content("S")]
    made = parser("json")
    assert made.push("``") == []
    assert made.push("x") == [Content("``x")]


@pytest.mark.parametrize(
    "piece", ["<tool_call>", '<tool_call>{"a":"', "<tool_cal", '{"name": ', "[TOOL_CALLS]a", " \n"]
)
@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "json"])
def test_time_is_linear_whatever_the_model_writes(form: str, piece: str) -> None:
    made = parser(form)
    began = time.process_time()
    for _ in range(20_000):
        made.push(piece)
    made.finish()
    assert time.process_time() - began < 5  # quadratic work would be a thousand times more
