# ruff: noqa: E501 - templates are easier to read on one line
"""Chat templates: what messages are turned into, errors, and bounded work."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace.terms import InvalidInput
from tailrace.text import Text, load_text, sandbox
from tests.text import samples
from tests.text.support import assets, golden, text_of


def rendered(template: str, *messages: dict, **arguments) -> str:
    return text_of("qwen", template).render_chat(messages or [{"role": "user", "content": "hi"}], **arguments).text


def test_an_assistant_without_content_is_the_same_as_one_with_none() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for name in ("llama3", "qwen", "tekken", "spm"):
        turns = [
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [call], **content},
                {"role": "user", "content": "y"},
            ]
            for content in ({}, {"content": None})
        ]
        assert text_of(name).encode_chat(turns[0]) == text_of(name).encode_chat(turns[1])


def test_a_template_that_cannot_do_without_content_gets_an_empty_one() -> None:
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    for content in ({}, {"content": None}, {"content": ""}):
        said = rendered(template, {"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [], **content})
        assert said == "user:a;assistant:;"


def test_arguments_that_are_json_text_reach_the_template_as_objects() -> None:
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments is mapping }} {{ c.function.arguments | tojson }};{% endfor %}"
    calls = [
        {"function": {"name": "f", "arguments": given}} for given in ('{"a": "é"}', {"a": 1}, "not json", "[1]", '"x"')
    ]
    said = rendered(template, {"role": "assistant", "tool_calls": calls})
    assert said == 'True {"a": "é"};True {"a": 1};False "not json";False "[1]";False "\\"x\\"";'


def test_content_parts_are_joined_unless_the_template_takes_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert rendered("{{ messages[0].content }}", message) == "one\ntwo"
    assert rendered("{{ messages[0]['content'] + '!' }}", message) == "one\ntwo!"
    assert rendered("{{ messages[0].content | tojson }}", message) == '"one\\ntwo"'
    assert rendered("{% for p in messages[0].content %}({{ p.text }}){% endfor %}", message) == "(one)(two)"
    with pytest.raises(InvalidInput, match="parts"):
        rendered("{{ messages[0].content }}", {"role": "user", "content": [{"type": "image_url"}]})


def test_hugging_faces_conventions() -> None:
    cases = {
        "{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}": '{"b": "<é>", "a": [1, null, true]}',
        "{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}": '{\n "a": 2,\n "b": 1\n}',
        "{{ [1] | tojson(separators=(',', ':')) }}": "[1]",
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}": "02",
        "{% generation %}x{{ messages | length }}{% endgeneration %}": "x1",
        "  {% if true %}\na\n  {% endif %}\nb": "a\nb",
        "{{ strftime_now('%Y') | length }}": "4",
        "{{ eos_token }}": "<|im_end|>",
        "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}": "True True True",
        "{{ undefined_thing }}{{ messages[0].nothing }}": "",
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{% endfor %}": "1True11",
        "{{ 'a' ~ 1 ~ none }}": "a1None",
        "{{ 'x' * 3 + '%05d' % 42 + '{:>4}'.format(7) + (2 ** 3) | string }}": "xxx00042   78",
        "{{ messages[0].content.startswith('h') }}{{ 'h' in messages[0].content }}{{ messages[0].role in ['user'] }}": "TrueTrueTrue",
    }
    for template, expected in cases.items():
        assert rendered(template) == expected, template


def test_reasoning_reaches_the_template_under_every_name() -> None:
    template = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }};{% endfor %}"
    for name in ("reasoning", "thinking", "reasoning_content"):
        assert rendered(template, {"role": "assistant", "content": "x", name: "why"}) == "why|why;"


def test_template_arguments_reach_the_template_but_cannot_replace_the_conversation() -> None:
    assert rendered("{{ mood }}", template_args={"mood": "fine"}) == "fine"
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidInput, match=name):
            rendered("{{ mood }}", template_args={name: []})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{% for %}", "line 1"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "__class__"),
        ("{% include 'x' %}", "loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ x | striptags }}", "striptags"),
    ],
)
def test_template_errors_name_the_messages(template: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        rendered(template)
    assert caught.value.param == "messages"


def test_without_a_chat_template_the_error_says_what_to_do() -> None:
    text = load_text(assets(golden("qwen")["tokenizer"]), vocab=800)
    assert not text.has_chat_template
    with pytest.raises(InvalidInput, match="/v1/completions"):
        text.encode_chat([{"role": "user", "content": "hi"}])


def test_deeply_nested_input_is_refused() -> None:
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InvalidInput, match="deep"):
        rendered("{{ messages }}", {"role": "user", "content": "x", "extra": deep})


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(99999999999) %}{% endfor %}",
    "{{ 'x' * 9999999999 }}",
    "{{ ['x'] * 9999999999 }}",
    "{{ 9 ** 99999999 }}",
    "{{ '%99999999d' % 1 }}",
    "{{ '%*d' % (99999999, 1) }}",
    "{{ '{:>99999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 99999999) }}",
    "{{ 'x'.ljust(99999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x' | indent(999999999, true) }}",
    "{{ {} | tojson(indent=999999999) }}{{ [[1]] | tojson(indent=999999999) }}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('x', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | string | length }}",
    "{% set ns = namespace(x=99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(99) }}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [[1, 1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "{{ ([range(99999) | list] * 9999) | sum(start=[]) | length }}",
    "{{ (['x' * 9999999] * 9999) | join | length }}",
    "{{ ''.join(['x' * 9999999] * 9999) | length }}",
    "{% for i in range(99999) %}{% for j in range(999) %}" + "long text " * 999 + "{% endfor %}{% endfor %}",
    "{{ lipsum(n=99999999) }}",
    "{{ range(99999) | map('string') | map('center', 9999) | list | length }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_templates_that_would_work_for_ever_fail_soon(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    text = text_of("qwen", template)
    began = time.monotonic()
    with pytest.raises(InvalidInput) as caught:
        text.render_chat([{"role": "user", "content": "hi"}])
    assert time.monotonic() - began < 15  # far more than it takes, far less than for ever
    assert caught.value.param == "messages"


def test_long_conversations_fit_the_budget() -> None:
    messages = [
        {"role": role, "content": "some words < and > more " * 40} for _ in range(150) for role in ("user", "assistant")
    ]
    assert len(text_of("qwen").encode_chat(messages)) > 40_000
    assert len(text_of("qwen").render_chat([{"role": "user", "content": "x " * 2_500_000}]).text) > 5_000_000


def test_named_templates_are_chosen_by_whether_there_are_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    text = load_text(assets(golden("qwen")["tokenizer"], config={"chat_template": named}), vocab=800)
    hi = [{"role": "user", "content": "hi"}]
    assert (text.render_chat(hi).text, text.render_chat(hi, tools=[samples.WEATHER]).text) == ("plain", "with tools")


def test_threads_share_a_text() -> None:
    text: Text = text_of("llama3")
    chats = [[{"role": "user", "content": f"Question {n} <|eot_id|> {'x ' * n}"}] for n in range(24)]
    alone = [text.encode_chat(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text.encode_chat, chats)) == alone
