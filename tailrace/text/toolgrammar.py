"""What a whole answer must match: reasoning first, then calls of tools in the model's own format, or text of a form.

A tag that is one token for the model is asked for as that token. Where the model writes it of its own accord, it may be
spelled in any way, unless it is a control token without text of its own (`[TOOL_CALLS]`, say): a *silent* one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.terms import InvalidInput
from tailrace.text.answer.formats import Layout, ReasoningFormat, ToolFormat
from tailrace.text.answer.reasoning import Opened
from tailrace.text.grammar import JSON_STYLE, Grammar

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_IDENT = "/[A-Za-z0-9]{9}/"
_ANYTHING = "/(?s:.*)/"
_NO_SCHEMAS = ("const", "enum", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values are schemas by names of the caller's."""


@dataclass(frozen=True)
class Function:
    """A tool that may be called. `parameters`: the JSON schema of its arguments, an object. `lenient`: keywords that
    cannot be enforced are left to the model."""

    name: str
    parameters: Mapping[str, Any]
    lenient: bool = True


@dataclass(frozen=True)
class Calls:
    """The calls that an answer may hold, in the model's format and layout. `required`: it holds nothing else, and at
    least one; `parallel`: several, where the layout has that."""

    functions: Sequence[Function]
    form: ToolFormat
    layout: Layout
    required: bool
    parallel: bool = True

    @property
    def several(self) -> bool:
        """Whether more than one can come."""
        return self.parallel and self.layout.between is not None


@dataclass(frozen=True)
class Thinking:
    """Reasoning that comes first. `opened`: what the prompt says of it, never CLOSED. `budget`: most tokens between the
    tags; it takes a closing tag that is one token."""

    form: ReasoningFormat
    opened: Opened
    budget: int | None = None

    @property
    def optional(self) -> bool:
        """Whether the answer may begin without it."""
        return self.opened is Opened.NO and not self.form.begins


@dataclass(frozen=True)
class Tags:
    """`tokens`: the tags that are one token for the model, with its id; `silent`: those that produce no text."""

    tokens: Mapping[str, int]
    silent: Collection[str] = ()


def answer_grammar(
    *, thinking: Thinking | None, calls: Calls | None, form: Grammar | None, tags: Tags
) -> Grammar | None:
    """The grammar of an answer; None where anything will do. `form`: what its text must match, where it is no call.

    Where calls are not required and there is no form, text may stand around them, and what begins like a call is one.
    Schemas and form are the caller's, so the whole has to be checked (`grammar.check`). Raises InvalidInput for a form
    that is no JSON."""
    if calls is None and (thinking is None or (form is None and thinking.budget is None)):
        return form
    rules = _Rules(tags)
    first = thinking.form.opener if thinking is not None and thinking.optional else ""
    if calls is None:
        rest = embedded(form) if form is not None else rules.text("FREE", first)
    elif calls.required:
        rest = _calls(rules, calls)
    elif form is not None:
        rest = f"{_calls(rules, calls)} | {embedded(form)}"
    else:
        rest = _among_text(rules, calls, first)
    rules.add("rest", rest)
    if thinking is not None:
        _think(rules, thinking)
    rules.add("start", "rest" if thinking is None else "think? rest" if thinking.optional else "think rest")
    return Grammar("lark", "\n".join(rules.lines))


@dataclass
class _Rules:
    """A Lark grammar in the making."""

    tags: Tags
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, body: str) -> str:
        """One more rule; its name without options."""
        self.lines.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self, name: str, first: str = "", without: str = "") -> str:
        """A terminal of any text that does not begin with `first`, after white space or not, and has no `without`."""
        body = _ANYTHING
        if first and first not in self.tags.silent:
            body += f" & ~/(?s:[ \\t\\r\\n]*{_escaped(first)}.*)/"
        if without and without not in self.tags.silent:
            body += f" & ~/(?s:.*{_escaped(without)}.*)/"
        return self.add(name, body)

    def literal(self, text: str) -> str:
        """This text."""
        tokens = self.tags.tokens
        tags = "|".join(map(re.escape, tokens))
        pieces = re.split(f"({tags})", text) if tags else [text]
        return " ".join(f"<[{tokens[one]}]>" if one in tokens else _quoted(one) for one in pieces if one)


def _think(rules: _Rules, thinking: Thinking) -> None:
    """`think`: reasoning, its tags, and what stands between it and the answer."""
    form = thinking.form
    begin = rules.literal(form.opener) if thinking.optional else ""
    bounded = thinking.budget is not None and form.closer in rules.tags.tokens
    if form.closer in rules.tags.silent or bounded:
        thought = rules.text("THOUGHT", without=form.closer)
        inside = rules.add(f"thought[max_tokens={thinking.budget}]" if bounded else "thought", thought)
        end = rules.literal(form.closer)
    else:
        inside = rules.add("thought[lazy]", f"/(?s:.*){_escaped(form.closer)}/")
        end = ""
    rules.add("think", f"{begin} {inside} {end} {rules.literal(form.gap)}")


def _calls(rules: _Rules, calls: Calls) -> str:
    """An answer that is one call or several, and nothing else."""
    if calls.form.bare and not calls.layout.begin.startswith(calls.form.opener or "{{"):
        return _bare_calls(rules, calls)
    tag, block = _block(rules, calls)
    rules.add("tagged", f"{tag} {block}")
    if calls.layout.opening or not calls.several:
        return "tagged"
    return f"tagged ({rules.literal(calls.layout.between or '')} tagged)*"


def _block(rules: _Rules, calls: Calls) -> tuple[str, str]:
    """The tag that begins calls, and what follows it: one call, or a list of them."""
    layout, opener = calls.layout, calls.form.opener
    for at, function in enumerate(calls.functions):
        begin = rules.literal(layout.begin.removeprefix(opener))
        ident = f"{rules.literal(layout.ident)} {_IDENT}" if layout.ident else ""
        middle, end = rules.literal(layout.middle), rules.literal(layout.end)
        arguments = _json(function.parameters, lenient=function.lenient)
        rules.add(f"call{at}", f"{begin} {_quoted(function.name)} {ident} {middle} {arguments} {end}")
    call = rules.add("call", " | ".join(f"call{at}" for at in range(len(calls.functions))))
    if layout.opening:
        more = f"({rules.literal(layout.between or '')} call)*" if calls.several else ""
        before, after = rules.literal(layout.opening.removeprefix(opener)), rules.literal(layout.closing)
        call = rules.add("listed", f"{before} call {more} {after}")
    return rules.literal(opener), call


def _bare_calls(rules: _Rules, calls: Calls) -> str:
    """Calls that have no tag: JSON through and through, so that one grammar can tell them from an answer in JSON."""
    layout = calls.layout
    key = "parameters" if "parameters" in layout.middle else "arguments"
    if not layout.opening.rstrip().endswith("["):
        rows = [_json(_object(one, key, "#"), lenient=one.lenient) for one in calls.functions]
        call = rules.add("call", " | ".join(rows))
        return rules.add("calls", f"{rules.literal(layout.opening)} {call} {rules.literal(layout.closing)}")
    items = [_object(one, key, f"#/items/anyOf/{at}") for at, one in enumerate(calls.functions)]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": items}, "minItems": 1}
    if not calls.several:
        schema["maxItems"] = 1
    before = rules.literal(layout.opening.rstrip().removesuffix("["))
    after = rules.literal(layout.closing.lstrip().removeprefix("]"))
    lenient = all(one.lenient for one in calls.functions)
    return rules.add("calls", f"{before} {_json(schema, lenient=lenient)} {after}")


def _object(function: Function, key: str, at: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            key: _moved(function.parameters, f"{at}/properties/{key}"),
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Any, at: str) -> Any:
    """A schema that stands at `at` now, with its references to places within itself."""
    if isinstance(schema, list):
        return [_moved(one, at) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = at + value[1:]
        elif key in _BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(one, at) for name, one in value.items()}
        else:
            moved[key] = value if key in _NO_SCHEMAS else _moved(value, at)
    return moved


def _among_text(rules: _Rules, calls: Calls, first: str) -> str:
    """Text, with calls in it or as a whole where the format has no tag for them."""
    opener = calls.form.opener
    if calls.form.bare:
        signs = r" \t\r\n{" + (r"\[" if calls.form.listed else "") + ("`" if calls.form.fences else "")
        tag = f" & ~/(?s:.*{_escaped(opener)}.*)/" if opener and opener not in rules.tags.silent else ""
        begin = f" & ~/(?s:{_escaped(first)}.*)/" if first and first not in rules.tags.silent else ""
        plain = rules.add("PLAIN", f"/([^{signs}](?s:.*))?/{tag}{begin}")
        return f"{_calls(rules, calls)} | {plain}"
    tag, block = _block(rules, calls)
    silent = opener in rules.tags.silent
    lazy, tag = ("", tag) if silent else ("[lazy]", _quoted(opener))
    lead = rules.add(f"lead{lazy}", f"{rules.text('FIRST', first)} {tag}")
    if not calls.several:
        return f"FIRST | {lead} {block} {rules.text('LAST', without=opener)}"
    again = rules.add(f"again{lazy}", f"{rules.text('TEXT')} {tag}")
    return f"FIRST | {lead} {block} ({again} {block})* TEXT"


def embedded(form: Grammar) -> str:
    """A grammar as a part of a Lark grammar. Raises InvalidInput for a schema that is no JSON."""
    match form.kind:
        case "json":
            try:
                schema = json.loads(form.text)
            except (ValueError, RecursionError):
                raise InvalidInput("the schema is no JSON", code="invalid_grammar") from None
            return _json(schema, lenient=form.lenient)
        case "regex":
            from llguidance import LLMatcher

            made = json.loads(LLMatcher.grammar_from_regex(form.text))
            return f"%lark {{\n{made['grammars'][0]['lark_grammar']}\n}}"
        case "lark":
            return f"%lark {{\n{form.text}\n}}"


def _json(schema: Mapping[str, Any], *, lenient: bool) -> str:
    given = schema.get("x-guidance")
    style = {**(given if isinstance(given, dict) else {}), **JSON_STYLE, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": style})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
