"""Whole answers held to grammars: reasoning, calls in each format, text of a form; and what is in them parses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.text import TokenBytes
from tailrace.text.answer.formats import LAYOUTS, MISTRAL_THINK, THINK, THINK_CLOSE, TOOL_FORMATS, Layout
from tailrace.text.answer.parser import AnswerParser
from tailrace.text.answer.parts import Arguments, Call
from tailrace.text.answer.reasoning import Opened, ReasoningParser
from tailrace.text.answer.tools import ToolParser
from tailrace.text.grammar import Compiler, Grammar, check, choice
from tailrace.text.toolgrammar import NO_ARGUMENTS, Calls, Function, Tags, Thinking, answer_grammar

CONTROLS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
MARKUP = ("<tool_call>", "</think>", "k>\n")
SPELLED = [b"<eos>", *(one.encode() for one in CONTROLS), *(bytes([value]) for value in range(256))]
SPELLED += [one.encode() for one in MARKUP]
IDS = {tag: at for at, tag in enumerate(CONTROLS, 1)}
CLOSER, TOOL_CALL = SPELLED.index(b"</think>"), SPELLED.index(b"<tool_call>")

WEATHER = Function(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"type": "string", "maxLength": 20}},
    },
)
NOW = Function("now", NO_ARGUMENTS)
HEADED = Layout("[TOOL_CALLS]", "[ARGS]", "", between="")
WITH_IDS = Layout("[TOOL_CALLS]", "[ARGS]", "", between="", ident="[CALL_ID]")
LISTED = Layout('{"name": "', '", "arguments": ', "}", ", ", "[", "]")
FENCED = Layout('{"name": "', '", "arguments": ', "}", None, "```json\n[", "]\n```")

ALONE = Layout('{"name": "', '", "arguments": ', "}", None, "```json\n", "\n```")


def encode(text: str, *, tags: bool = True) -> list[int]:
    """Control tokens and markup where they are spelled and `tags`, else bytes."""
    ids, data = [], text.encode()
    choices = [*range(1, len(SPELLED))] if tags else [t for t in range(1, len(SPELLED)) if len(SPELLED[t]) == 1]
    while data:
        token = max((t for t in choices if data.startswith(SPELLED[t])), key=lambda t: len(SPELLED[t]))
        ids.append(token)
        data = data[len(SPELLED[token]) :]
    return ids


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    table = TokenBytes.build(SPELLED, range(1 + len(CONTROLS)))
    return Compiler(
        table, vocab=len(SPELLED), eos_ids=[0], encode=lambda text: [at + 1 + len(CONTROLS) for at in text.encode()]
    )


def fits(compiler: Compiler, grammar: Grammar | None, ids: list[int]) -> bool:
    """Whether this is a complete text of the grammar."""
    assert grammar is not None
    assert check(grammar) == ""
    matcher = compiler.compile(grammar)
    return bool(matcher._matcher.try_consume_tokens(ids) == len(ids) and matcher._matcher.is_accepting())


TAGS = Tags(IDS, CONTROLS)


def calls_of(form: str, layout: Layout | None = None, *, required: bool = True, parallel: bool = True) -> Calls:
    return Calls([WEATHER, NOW], TOOL_FORMATS[form], layout or LAYOUTS[form], required, parallel)


def grammar_of(
    calls: Calls | None, form: Grammar | None = None, thinking: Thinking | None = None, tags: Tags = TAGS
) -> Grammar | None:
    return answer_grammar(thinking=thinking, calls=calls, form=form, tags=tags)


def parsed(text: str, form: str) -> list[tuple[str, Any]]:
    """The calls that the parser finds."""
    parser = ToolParser(TOOL_FORMATS[form], frozenset({"weather", "now"}))
    found: list[tuple[str, str]] = []
    for part in [*parser.push(text), *parser.finish()]:
        if isinstance(part, Call):
            found.append((part.name, ""))
        elif isinstance(part, Arguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return [(name, json.loads(arguments)) for name, arguments in found]


ONE: list[tuple[str, Layout | None, str]] = [
    ("hermes", None, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
    ("llama3", None, '{"name": "weather", "parameters": {"city": "Oslo"}}'),
    ("mistral", None, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ("mistral", HEADED, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'),
    ("mistral", WITH_IDS, '[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "Oslo"}'),
    ("json", None, '{"name": "weather", "arguments": {"city": "Oslo"}}'),
    ("json", LISTED, '[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ("json", FENCED, '```json\n[{"name": "weather", "arguments": {"city": "Oslo"}}]\n```'),
    ("json", ALONE, '```json\n{"name": "weather", "arguments": {"city": "Oslo"}}\n```'),
]
EACH = pytest.mark.parametrize(("form", "layout", "text"), ONE, ids=[f"{f}-{n}" for n, (f, _, _) in enumerate(ONE)])


@EACH
def test_a_required_call_is_all_that_fits_and_parses(
    compiler: Compiler, form: str, layout: Layout | None, text: str
) -> None:
    grammar = grammar_of(calls_of(form, layout))
    assert fits(compiler, grammar, encode(text))
    assert parsed(text, form) == [("weather", {"city": "Oslo"})]
    assert fits(compiler, grammar, encode(text.replace("weather", "now").replace('"city": "Oslo"', "")))
    for wrong in ("", "Let me see.", f"Well: {text}", text.replace("weather", "then"), text.replace("city", "town")):
        assert not fits(compiler, grammar, encode(wrong))
    assert not fits(compiler, grammar, encode(text.replace('"Oslo"', '"' + "x" * 21 + '"')))


TWICE = [
    ("hermes", None, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "\n"),
    ("mistral", None, '{"name": "now", "arguments": {}}', ", "),
    ("mistral", HEADED, "[TOOL_CALLS]now[ARGS]{}", ""),
    ("json", LISTED, '{"name": "now", "arguments": {}}', ", "),
]


@pytest.mark.parametrize(("form", "layout", "call", "between"), TWICE)
def test_several_calls_fit_unless_one_is_asked_for(
    compiler: Compiler, form: str, layout: Layout | None, call: str, between: str
) -> None:
    opening = (layout or LAYOUTS[form]).opening
    closing = (layout or LAYOUTS[form]).closing
    one, two = (opening + between.join([call] * count) + closing for count in (1, 2))
    assert parsed(two, form) == [("now", {})] * 2
    grammar = grammar_of(calls_of(form, layout))
    assert fits(compiler, grammar, encode(one))
    assert fits(compiler, grammar, encode(two))
    single = grammar_of(calls_of(form, layout, parallel=False))
    assert fits(compiler, single, encode(one))
    assert not fits(compiler, single, encode(two))


@EACH
def test_calls_that_are_not_required_stand_in_text_and_are_held_to_their_schemas(
    compiler: Compiler, form: str, layout: Layout | None, text: str
) -> None:
    grammar = grammar_of(calls_of(form, layout, required=False))
    for free in ("", "Let me see: {1, 2} <b>.", "a\n\nb < c", "<tool_", "é 😀"):
        assert fits(compiler, grammar, encode(free))
    assert fits(compiler, grammar, encode(text))
    assert not fits(compiler, grammar, encode(text.replace("city", "town")))
    if not TOOL_FORMATS[form].bare:
        assert fits(compiler, grammar, encode(f"I see.\n{text}\nSo."))
        assert fits(compiler, grammar, encode(f"{text}\n{text}"))
        once = grammar_of(calls_of(form, layout, required=False, parallel=False))
        assert fits(compiler, once, encode(f"{text}\n"))
        assert not fits(compiler, once, encode(f"{text}\n{text}"))


@EACH
def test_a_form_and_calls_are_either_or(compiler: Compiler, form: str, layout: Layout | None, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = Grammar("json", json.dumps({**schema, "additionalProperties": False}))
    grammar = grammar_of(calls_of(form, layout, required=False), wanted)
    assert fits(compiler, grammar, encode('{"a": 1}'))
    assert fits(compiler, grammar, encode(text))
    for wrong in ("", "Let me see.", '{"b": 1}', text + '{"a": 1}', '{"a": 1}' + text):
        assert not fits(compiler, grammar, encode(wrong))


FORMS = [
    (Grammar("json", '{"type": "array", "items": {"enum": [1, 2]}}'), "[1, 2]", "[3]"),
    (Grammar("regex", "[a-c/]{2}\\n"), "a/\n", "ad"),
    (Grammar("lark", 'start: A " " B\nA: "x"\nB: /[0-9]+/'), "x 12", "x y"),
    (choice(["ja}", "nein\n"]), "ja}", "vielleicht"),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMS, ids=["json", "regex", "lark", "choice"])
def test_each_kind_of_form_stands_beside_calls_and_behind_reasoning(
    compiler: Compiler, form: Grammar, right: str, wrong: str
) -> None:
    beside = grammar_of(calls_of("hermes", required=False), form)
    assert fits(compiler, beside, encode(right))
    assert fits(compiler, beside, encode(ONE[0][2]))
    assert not fits(compiler, beside, encode(wrong))
    behind = grammar_of(None, form, Thinking(THINK, Opened.OPEN))
    assert fits(compiler, behind, encode("Hm.\n</think>\n\n" + right))
    assert not fits(compiler, behind, encode(right))
    assert not fits(compiler, behind, encode("Hm.\n</think>\n\n" + wrong))


@pytest.mark.parametrize("tags", [True, False])
def test_reasoning_comes_first_as_the_prompt_has_it(compiler: Compiler, tags: bool) -> None:
    call = encode(ONE[0][2])
    thought = encode("<think>\nSo </thin< I call.\n</think>\n\n", tags=tags)
    inside = encode("So I call.</think>\n\n", tags=tags)
    maybe = grammar_of(calls_of("hermes"), None, Thinking(THINK, Opened.NO))
    assert fits(compiler, maybe, call)
    assert fits(compiler, maybe, thought + call)
    assert not fits(compiler, maybe, inside + call)
    for thinking in (Thinking(THINK, Opened.OPEN), Thinking(THINK_CLOSE, Opened.NO)):
        opened = grammar_of(calls_of("hermes"), None, thinking)
        assert fits(compiler, opened, inside + call)
        assert not fits(compiler, opened, inside)
        assert not fits(compiler, opened, call)


def test_reasoning_between_control_tokens(compiler: Compiler) -> None:
    grammar = grammar_of(calls_of("mistral", HEADED), None, Thinking(MISTRAL_THINK, Opened.NO))
    call = encode(ONE[3][2])
    assert fits(compiler, grammar, call)
    assert fits(compiler, grammar, encode("[THINK]Well </think>.[/THINK]") + call)
    assert not fits(compiler, grammar, encode("[THINK]Well.") + call)


def test_a_budget_closes_the_reasoning_and_text_is_free_after_it(compiler: Compiler) -> None:
    tags = Tags({**IDS, "</think>": CLOSER}, CONTROLS)
    opened = grammar_of(None, None, Thinking(THINK, Opened.OPEN, budget=5), tags)
    for thought in ("", "abc", "abcde"):
        assert fits(compiler, opened, encode(thought + "</think>\n\nSo it is <think>."))
    assert not fits(compiler, opened, encode("abcdef</think>\n\nSo."))
    assert not fits(compiler, opened, encode("a") + encode("</think>", tags=False))
    assert opened is not None
    matcher = compiler.compile(opened)
    assert matcher._matcher.try_consume_tokens(encode("abcde")) == 5
    assert matcher.forced()[0] == CLOSER
    maybe = grammar_of(None, None, Thinking(THINK, Opened.NO, budget=5), tags)
    assert fits(compiler, maybe, encode("So."))
    assert fits(compiler, maybe, encode("<think>abc</think>\n\nSo."))
    for longer in ("<think>abcdefgh", "\n <think>abcdefgh"):
        assert not fits(compiler, maybe, encode(longer))


def test_strict_calls_in_text_come_after_reasoning(compiler: Compiler) -> None:
    for form, text in (("hermes", ONE[0][2]), ("llama3", ONE[1][2])):
        grammar = grammar_of(calls_of(form, required=False), None, Thinking(THINK, Opened.NO))
        for right in ("So.", text, "<think>Hm.</think>\n\nSo.", "<think>Hm.</think>\n\n" + text):
            assert fits(compiler, grammar, encode(right))
        assert not fits(compiler, grammar, encode("<think>Hm. So."))


def test_tags_that_are_one_token_are_that_token_where_they_are_forced(compiler: Compiler) -> None:
    tags = Tags({**IDS, "<tool_call>": TOOL_CALL}, CONTROLS)
    call = encode(ONE[0][2])
    spelled = encode(ONE[0][2], tags=False)
    required = grammar_of(calls_of("hermes"), tags=tags)
    assert required is not None
    assert compiler.compile(required).forced()[0] == call[0] == TOOL_CALL
    assert fits(compiler, required, call)
    assert not fits(compiler, required, spelled)
    free = grammar_of(calls_of("hermes", required=False), tags=tags)
    assert fits(compiler, free, encode("So. ") + call)
    assert fits(compiler, free, encode("So. ") + spelled)


def test_references_are_found_wherever_the_arguments_stand(compiler: Compiler) -> None:
    named = {"type": "object", "properties": {"default": {"$ref": "#/$defs/D"}, "me": {"$ref": "#"}}, "$defs": {}}
    named = {**named, "$defs": {"D": {"type": "integer"}}, "additionalProperties": False, "default": {"$ref": "#/no"}}
    for name, form in TOOL_FORMATS.items():
        calls = Calls([Function("f", named)], form, LAYOUTS[name], required=True)
        text = LAYOUTS[name].opening + LAYOUTS[name].begin + "f" + LAYOUTS[name].middle
        text += '{"default": 1, "me": {"default": 2}}' + LAYOUTS[name].end + LAYOUTS[name].closing
        assert fits(compiler, grammar_of(calls), encode(text))
        assert not fits(compiler, grammar_of(calls), encode(text.replace("2", '"2"')))


def test_nothing_is_asked_for_where_anything_will_do() -> None:
    assert grammar_of(None) is None
    assert grammar_of(None, None, Thinking(THINK, Opened.OPEN)) is None
    form = Grammar("regex", "a")
    assert grammar_of(None, form) is form


def test_the_parser_takes_apart_what_a_grammar_of_all_made(compiler: Compiler) -> None:
    text = "<think>\nBoth.\n</think>\n\n" + ONE[0][2] + "\n" + ONE[0][2].replace("Oslo", "</tool_call>")
    assert fits(compiler, grammar_of(calls_of("hermes"), None, Thinking(THINK, Opened.NO)), encode(text))
    tools = ToolParser(TOOL_FORMATS["hermes"], frozenset({"weather"}))
    parser = AnswerParser(ReasoningParser(THINK, Opened.NO), tools)
    parts = [*parser.push(text), *parser.finish()]
    assert [json.loads(p.text)["city"] for p in parts if isinstance(p, Arguments)] == ["Oslo", "</tool_call>"]


def test_a_schema_that_cannot_be_enforced_is_wrong_only_where_it_is_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for lenient in (True, False):
        function = Function("f", schema, lenient)
        for form in ("hermes", "llama3"):
            calls = Calls([function], TOOL_FORMATS[form], LAYOUTS[form], required=True)
            grammar = grammar_of(calls)
            assert grammar is not None
            assert (check(grammar) == "") == lenient
