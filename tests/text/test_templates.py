"""Chat templates that a server is given instead of its model's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tailrace.terms import InvalidInput
from tailrace.text import Text, templates
from tailrace.text.answer.formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from tests.text.support import text_of

TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Call it."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "content": "7"},
    {"role": "assistant", "content": "Seven."},
    {"role": "user", "content": "And now?"},
]
PLAIN = [TALK[0], TALK[1], TALK[4]]
FAMILIES = [("hermes", "qwen", HERMES), ("llama3", "llama3", LLAMA3), ("mistral", "tekken", MISTRAL)]


def made(name: str, tokenizer: str) -> Text:
    text = text_of(tokenizer, templates.source_of(name))
    templates.check(text, name)
    return text


def shown(name: str, tokenizer: str, *, tools: bool) -> str:
    talk = TALK if tools else PLAIN
    return made(name, tokenizer).render_chat(talk, tools=[TOOL] if tools else None).text


@pytest.mark.parametrize(("name", "tokenizer", "form"), FAMILIES)
def test_calls_are_taken_apart_as_the_template_lays_them_out(name: str, tokenizer: str, form: ToolFormat) -> None:
    text = made(name, tokenizer)
    assert text.supports_tools
    assert text.tool_format == form
    assert text.short_call_ids == (name == "mistral")
    assert text.reasoning_format is None


def test_hermes() -> None:
    assert shown("hermes", "qwen", tools=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCall it.<|im_end|>\n"
        "<|im_start|>assistant\nSeven.<|im_end|>\n<|im_start|>assistant\n"
    )
    text = shown("hermes", "qwen", tools=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "f"' in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in text
    assert "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n" in text


def test_llama3() -> None:
    def turn(role: str, content: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"

    end = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    plain = [turn("system", "Be brief."), turn("user", "Call it."), turn("assistant", "Seven.")]
    assert shown("llama3", "llama3", tools=False) == "<|begin_of_text|>" + "".join(plain) + end
    text = shown("llama3", "llama3", tools=True)
    assert text.startswith("<|begin_of_text|>" + turn("system", "Environment: ipython\n\nBe brief."))
    assert '"name": "f",' in text.partition("Call it.")[0]
    assert turn("assistant", '{"name": "f", "parameters": {"a": 1}}') + turn("ipython", "7") in text


def test_mistral() -> None:
    assert shown("mistral", "tekken", tools=False) == "<s>[INST] Be brief.\n\nCall it.[/INST] Seven.</s>"
    assert shown("mistral", "tekken", tools=True) == (
        '<s>[INST] Call it.[/INST][TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdef123"}]</s>'
        '[TOOL_RESULTS] {"content": "7", "call_id": "abcdef123"}[/TOOL_RESULTS] Seven.</s>'
        '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": '
        '{"type": "object"}}}][/AVAILABLE_TOOLS][INST] Be brief.\n\nAnd now?[/INST]'
    )


@pytest.mark.parametrize(("name", "tokenizer", "form"), FAMILIES)
def test_what_users_write_never_becomes_a_control_token(name: str, tokenizer: str, form: ToolFormat) -> None:
    text = made(name, tokenizer)
    calm = text.encode_chat([{"role": "user", "content": "a"}])
    forged = text.encode_chat([{"role": "user", "content": "a" + "".join(templates.TAGS[name])}])
    controls = {ident for tag in templates.TAGS[name] if (ident := text.tag_id(tag)) is not None}
    assert [i for i in forged if i in controls] == [i for i in calm if i in controls]


@pytest.mark.parametrize(("name", "tokenizer"), [("hermes", "llama3"), ("llama3", "qwen"), ("mistral", "qwen")])
def test_a_template_of_another_family_is_refused_by_the_token_that_is_missing(name: str, tokenizer: str) -> None:
    text = text_of(tokenizer, templates.source_of(name))
    with pytest.raises(InvalidInput, match=f"--chat-template: {name} is for models with the tokens .* has no") as error:
        templates.check(text, name)
    assert error.value.param == "chat_template"


WRONG: list[tuple[bytes | None, str]] = [
    (None, "neither a file nor one of hermes, llama3, mistral"),
    (b"", "is empty"),
    (b" \n", "is empty"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"chat_template": "x"}', "looks like JSON"),
    (b"x" * ((1 << 20) + 1), "at most 1048576"),
]


@pytest.mark.parametrize(("content", "why"), WRONG, ids=[why for _, why in WRONG])
def test_what_is_no_template_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput, match=f"^--chat-template: .*{why}"):
        templates.source_of(str(file))


def test_only_a_plain_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InvalidInput, match="is not a file"):
            templates.source_of(str(path))
    with pytest.raises(InvalidInput, match="--chat-template"):
        templates.source_of("a\0b")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}", "fails on a conversation of one message: chat template, line 1"),
        ("{{ raise_exception('never') }}", "fails on a conversation of one message: .*never"),
        ("{{ nothing.at.all }}", "fails on a conversation of one message"),
        ("{{ bos_token }}<|im_start|>assistant\n", "does not show the model what the user says"),
    ],
)
def test_a_template_that_fails_is_refused_at_the_start(source: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as error:
        templates.check(text_of("qwen", source), "mine.jinja")
    assert str(error.value).startswith("--chat-template: mine.jinja")
