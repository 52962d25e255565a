"""Whatever the pieces, the parts are the same; nothing is lost and nothing is doubled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.text.answer.call import HELD_ARGUMENTS
from tailrace.text.answer.parts import Arguments, Content, Reasoning
from tailrace.text.answer.reasoning import Opened
from tests.text.answer.support import Message, cut, message, parser, run
from tests.text.answer.test_tools import write

FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "_call>", "<", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", "[ARGS]"),
        *("[CALL_ID]", "<think>", "</think>", "</thi", "[THINK]", "[/THINK]", "```json", "```", "`", ";", ",", ":"),
        *('{"name": "f", "arguments": {', '{"name": "f", "parameters": {}}', '{"arguments": {"a": 1}, "name": "f"}'),
        *('{"name"', '"', "{", "}", "{}", '"f"', "f", '"a": ', "1", "-0.5e3", "true", "nul", "\\", "\\u00", "\\ud800"),
        *(" ", "\n", "\n\n", "é", "😀", "text", "x" * 100, "x" * HELD_ARGUMENTS, '"name": "get_weather"'),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 600), max_size=8)
FORMS = st.sampled_from(["hermes", "llama3", "mistral", "json", None])
REASONING = st.sampled_from(["think", "think-close", "mistral", None])


@settings(max_examples=250, deadline=None)
@given(TEXTS, CUTS, FORMS, REASONING, st.sampled_from(list(Opened)), st.sampled_from([None, 1]))
def test_every_way_to_cut_the_text_gives_the_same_parts(
    text: str, cuts: list[int], form: str | None, reasoning: str | None, opened: Opened, most: int | None
) -> None:
    whole = run(parser(form, reasoning, opened, most), [text])
    assert run(parser(form, reasoning, opened, most), cut(text, cuts)) == whole
    assert run(parser(form, reasoning, opened, most), text) == whole


def visible(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=150, deadline=None)
@given(TEXTS, FORMS, REASONING, st.sampled_from(list(Opened)))
def test_nothing_is_shown_twice_or_made_up(text: str, form: str | None, reasoning: str | None, opened: Opened) -> None:
    """Content, reasoning and arguments, in order, are pieces of the text that do not overlap; without calls and tags
    they are all of it."""
    parts = run(parser(form, reasoning, opened), [text])
    at = 0
    for part in parts:
        if isinstance(part, Content | Reasoning):
            for word in part.text.split():
                found = text.find(word, at)
                assert found >= 0
                at = found + len(word)
    said = message(parts)
    if not said.calls and not any(tag in text for tag in ("think>", "THINK]")):
        assert visible(said.reasoning + said.content) == visible(text)
    if form is None and reasoning is None:
        assert said == Message(text, "", [])


@settings(max_examples=80, deadline=None)
@given(TEXTS, FORMS, REASONING)
def test_what_is_shown_is_never_taken_back(text: str, form: str | None, reasoning: str | None) -> None:
    final = message(run(parser(form, reasoning), [text]))
    made = parser(form, reasoning)
    parts: list[Any] = []
    for char in text:
        parts += made.push(char)
        so_far = message(parts)
        assert final.content.startswith(so_far.content)
        assert final.reasoning.startswith(so_far.reasoning)
        assert [name for name, _ in final.calls[: len(so_far.calls)]] == [name for name, _ in so_far.calls]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=4)
SPEECH = st.text(alphabet="aé😀.,\n ", max_size=12)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(SPEECH, OBJECTS), min_size=1, max_size=3), SPEECH, st.booleans(), st.booleans(), CUTS)
def test_calls_that_are_written_are_the_calls_that_are_read(
    turns: list[tuple[str, dict[str, Any]]], after: str, escaped: bool, spaced: bool, cuts: list[int]
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    arguments = [json.dumps(value, ensure_ascii=escaped, separators=separators) for _, value in turns]
    text = "".join(speech + write("hermes", "f", one) for (speech, _), one in zip(turns, arguments, strict=True))
    said = message(run(parser("hermes"), cut(text + after, cuts)))
    assert said.calls == [("f", one) for one in arguments]
    assert visible(said.content) == visible("".join(speech for speech, _ in turns) + after)
    assert [json.loads(one) for _, one in said.calls] == [value for _, value in turns]


@settings(max_examples=80, deadline=None)
@given(OBJECTS, st.data())
def test_a_call_in_which_one_character_is_missing_is_text_or_its_arguments_are_whole(
    value: dict[str, Any], data: st.DataObject
) -> None:
    arguments = json.dumps(value)
    text = write("hermes", "f", arguments)
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + text[at + 1 :]
    parts = run(parser("hermes"), [broken])
    assert run(parser("hermes"), broken) == parts
    said = message(parts)
    if not said.calls:
        assert visible(said.content) == visible(broken)
    elif len(arguments) < HELD_ARGUMENTS:
        assert isinstance(json.loads(said.calls[0][1]), dict)


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_pieces_of_arguments_join_to_the_whole(form: str) -> None:
    arguments = json.dumps({"code": "print('é')\n" * 200})
    made = parser(form)
    pieces = [part for char in write(form, "f", arguments) for part in made.push(char)]
    texts = [part.text for part in pieces if isinstance(part, Arguments)]
    assert "".join(texts) == arguments
    assert len(texts) > len(arguments) - HELD_ARGUMENTS - 5
