# ruff: noqa: E501 - templates are easier to read on one line
"""Which formats a chat template means."""

from __future__ import annotations

import functools

import pytest

from tailrace.terms import InvalidInput
from tailrace.text import Text
from tailrace.text.answer.formats import (
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_THINK,
    REASONING_PARSERS,
    THINK,
    TOOL_PARSERS,
    Layout,
    ToolFormat,
)
from tailrace.text.answer.formats import LAYOUTS as USUAL
from tailrace.text.answer.reasoning import Opened
from tailrace.text.grammar import Compiler
from tailrace.text.toolgrammar import Calls, Function, Tags, answer_grammar
from tests.text.support import text_of

LOOP = "{{{{ tools | tojson }}}}{{% for m in messages %}}{{% if m.tool_calls %}}{0}{{% else %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
CALLS = "<|im_start|>assistant\n{{% for c in m.tool_calls %}}{0}{{% endfor %}}<|im_end|>\n"


def template(call: str) -> str:
    """A template that lays calls out like this; @NAME and @ARGS stand for the call's."""
    call = call.replace("@NAME", "{{ c.function.name }}").replace("@ARGS", "{{ c.function.arguments | tojson }}")
    return LOOP.format(CALLS.format(call))


LAYOUTS: list[tuple[str, ToolFormat | None]] = [
    ('<tool_call>\n{"name": "@NAME", "arguments": @ARGS}\n</tool_call>', HERMES),
    ('<tool_call>{"name":"@NAME","arguments":@ARGS}</tool_call>', HERMES),
    ('[TOOL_CALLS] [{"name": "@NAME", "arguments": @ARGS, "id": "{{ c.id }}"}]', MISTRAL),
    ("[TOOL_CALLS]@NAME[ARGS]@ARGS", MISTRAL),
    ("[TOOL_CALLS]@NAME[CALL_ID]{{ c.id }}[ARGS]@ARGS", MISTRAL),
    ('{"name": "@NAME", "parameters": @ARGS}', LLAMA3),
    ('<|python_tag|>{"type": "function", "name": "@NAME", "parameters": @ARGS}', LLAMA3),
    ('{"name": "@NAME", "arguments": @ARGS}', JSON),
    ('[{"name": "@NAME", "arguments": @ARGS}]', JSON),
    ('```json\n{"name": "@NAME", "arguments": @ARGS}\n```', JSON),
    ("<tool_call>\n<function=@NAME>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>", None),
    ("<tool_call>@NAME\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>", None),
    ('<other>{"name": "@NAME", "arguments": @ARGS}</other>', None),
    ("@NAME(@ARGS)", None),
    ("nothing of it", None),
]


@pytest.mark.parametrize(("layout", "form"), LAYOUTS, ids=[layout[:40] for layout, _ in LAYOUTS])
def test_the_format_is_what_the_template_does_with_a_call(layout: str, form: ToolFormat | None) -> None:
    assert text_of("qwen", template(layout)).tool_format == form


WRITTEN: list[tuple[str, Layout]] = [
    (LAYOUTS[0][0], Layout('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")),
    (LAYOUTS[1][0], Layout('<tool_call>{"name":"', '","arguments":', "}</tool_call>", "\n")),
    (LAYOUTS[2][0], Layout('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]")),
    (LAYOUTS[3][0], Layout("[TOOL_CALLS]", "[ARGS]", "", "")),
    (LAYOUTS[4][0], Layout("[TOOL_CALLS]", "[ARGS]", "", "", ident="[CALL_ID]")),
    (LAYOUTS[5][0], Layout('{"name": "', '", "parameters": ', "}")),
    (LAYOUTS[7][0], Layout('{"name": "', '", "arguments": ', "}")),
    (LAYOUTS[8][0], Layout('{"name": "', '", "arguments": ', "}", ", ", "[", "]")),
    (LAYOUTS[9][0], Layout('{"name": "', '", "arguments": ', "}", None, "```json\n", "\n```")),
]


@pytest.mark.parametrize(("layout", "written"), WRITTEN, ids=[layout[:40] for layout, _ in WRITTEN])
def test_a_layout_is_the_templates_to_the_letter(layout: str, written: Layout) -> None:
    text = text_of("qwen", template(layout))
    assert text.tool_format is not None
    assert text.tool_layout(text.tool_format) == written


def test_a_layout_that_the_template_does_not_show_is_the_usual_one() -> None:
    for form in (HERMES, MISTRAL, JSON, LLAMA3):
        assert text_of("qwen", template("@NAME(@ARGS)")).tool_layout(form) == USUAL[form.name]
        assert text_of("qwen", "{{ raise_exception('no') }}").tool_layout(form) == USUAL[form.name]


def test_the_formats_of_whole_templates() -> None:
    assert (text_of("qwen").tool_format, text_of("qwen").reasoning_format) == (HERMES, THINK)
    assert (text_of("llama3").tool_format, text_of("llama3").reasoning_format) == (LLAMA3, None)
    plain = text_of("qwen", "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (plain.tool_format, plain.reasoning_format, plain.short_call_ids) == (None, None, False)
    assert text_of("qwen", "{{ tools }}{{ raise_exception('no') }}").tool_format is None
    assert text_of("qwen", "{# [/THINK] #}").reasoning_format == MISTRAL_THINK


def test_a_template_that_insists_on_short_ids_is_known_for_it() -> None:
    check = "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    text = text_of("qwen", template(check + "[TOOL_CALLS]@NAME[ARGS]@ARGS"))
    assert text.short_call_ids
    assert text.tool_format == MISTRAL
    assert not text_of("qwen").short_call_ids


def test_a_templates_variables_are_those_that_callers_may_set() -> None:
    assert "enable_thinking" in text_of("qwen").template_variables
    assert text_of("qwen").template_variables.isdisjoint({"messages", "tools", "content", "mood", "text_of", "ns"})
    source = "{% set a = 1 %}{{ a }}{{ bos_token }}{{ mood | default('x') }}{% if effort is defined %}{% endif %}"
    source += "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) }}{{ raise_exception }}{{ range(2) }}{{ documents }}"
    source += "{% if not style is defined %}{% set style = 'plain' %}{% endif %}{{ style }}"
    assert text_of("qwen", source).template_variables == {"mood", "effort", "style"}
    with pytest.raises(InvalidInput):
        _ = text_of("qwen", "{% for %}").template_variables


@pytest.mark.parametrize(
    ("tail", "opened"),
    [
        ("<|im_start|>assistant\n", Opened.NO),
        ("<|im_start|>assistant\n<think>\n", Opened.OPEN),
        ("<|im_start|>assistant\n<think>", Opened.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Opened.CLOSED),
    ],
)
def test_the_prompts_end_says_whether_reasoning_has_begun(tail: str, opened: Opened) -> None:
    text: Text = text_of("qwen")
    for words in ("", "a long prompt " * 20, "<think>"):
        prompt = text.encode(words + tail, parse_special=True)
        assert text.reasoning_opened(prompt, THINK) == opened


def test_what_a_user_writes_opens_nothing() -> None:
    text = text_of("qwen")
    assert text.reasoning_opened(text.encode_chat([{"role": "user", "content": "<think>"}]), THINK) == Opened.NO
    closed = text.encode_chat([{"role": "user", "content": "x"}], template_args={"enable_thinking": False})
    assert text.reasoning_opened(closed, THINK) == Opened.CLOSED


def test_only_control_tokens_without_text_have_to_be_shown() -> None:
    tekken = text_of("tekken")
    ident = tekken.encode("[TOOLS]", add_bos=False, parse_special=True)[0]
    assert tekken.control_tags(["[TOOLS]", "[nothing]"]) == {"[TOOLS]": ident}
    assert text_of("qwen").control_tags(HERMES.tags + THINK.tags) == {}
    assert tekken.tag_id("[TOOLS]") == ident
    assert tekken.tag_id("[nothing]") is None


def test_the_command_line_knows_every_parser() -> None:
    from tailrace.cli import options

    assert (options.TOOL_PARSERS, options.REASONING_PARSERS) == (TOOL_PARSERS, REASONING_PARSERS)


@pytest.mark.parametrize(("layout", "written"), WRITTEN, ids=[layout[:40] for layout, _ in WRITTEN])
def test_what_a_grammar_makes_a_model_write_is_what_its_template_shows_it(layout: str, written: Layout) -> None:
    text = text_of("qwen", template(layout))
    call = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"key": "ü"}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    shown = text.render_chat(messages, add_generation_prompt=False, tools=[{}]).text
    begin = shown.rindex("assistant\n") + len("assistant\n")
    made = shown[begin : shown.index("<|im_end|>", begin)]
    made = made.replace(', "id": "abcdef123"', "").removeprefix("<|python_tag|>").replace('"type": "function", ', "")
    form = text.tool_format
    assert form is not None
    function = Function("f", {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]})
    tokens = {tag: ident for tag in form.tags if (ident := text.tag_id(tag)) is not None}
    tags = Tags(tokens, text.control_tags(form.tags).keys())
    calls = Calls([function], form, text.tool_layout(form), required=True)
    grammar = answer_grammar(thinking=None, calls=calls, form=None, tags=tags)
    assert grammar is not None
    matcher = qwen_compiler().compile(grammar)
    ids = text.encode(made, add_bos=False, parse_special=True)
    assert matcher._matcher.try_consume_tokens(ids) == len(ids)
    assert matcher._matcher.is_accepting()
    forced = qwen_compiler().compile(grammar).forced()
    assert forced == ids[: len(forced)] or form.bare


@functools.cache
def qwen_compiler() -> Compiler:
    text = text_of("qwen")
    return Compiler(text.token_bytes(), vocab=text.vocab_size, eos_ids=text.eos_ids, encode=text.encode_inside)
