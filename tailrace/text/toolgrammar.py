"""Tools to grammars: what a model must write so that it calls one of them, in the format that it was taught."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tailrace.text.grammar import JSON_STYLE, Grammar

Format = Literal["hermes", "llama3", "mistral"]
"""`hermes`: <tool_call>{"name": ..., "arguments": ...}</tool_call>, one after the other (Qwen, too); `llama3`: one
object {"name": ..., "parameters": ...}; `mistral`: [TOOL_CALLS] and a list of objects."""


def tool_grammar(functions: Sequence[Mapping[str, Any]], form: Format, *, parallel: bool = True) -> Grammar:
    """A call of one of these functions, or several in a row where the format has that and `parallel` is true.
    `functions` are OpenAI's: `name` and `parameters` (a JSON schema; none: no arguments). The schemas are the caller's,
    so the grammar has to be checked as any other (`grammar.check`). References within a function's own schema
    ("#/$defs/...") are not found there and are refused. "[TOOL_CALLS]" is asked for as text, not as a control token."""
    many = "+" if parallel else ""
    match form:
        case "hermes":
            called = _json(_any_of([_call(one, "arguments") for one in functions]))
            return Grammar(
                "lark", f'start: call{many}\ncall: "<tool_call>\\n" body "\\n</tool_call>" "\\n"?\nbody: {called}'
            )
        case "llama3":
            return Grammar("lark", f"start: {_json(_any_of([_call(one, 'parameters') for one in functions]))}")
        case "mistral":
            calls = {"type": "array", "items": _any_of([_call(one, "arguments") for one in functions]), "minItems": 1}
            if not parallel:
                calls["maxItems"] = 1
            return Grammar("lark", f'start: "[TOOL_CALLS]" body\nbody: {_json(calls)}')


def _call(function: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _json(schema: dict[str, Any]) -> str:
    """The schema as a part of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": {**JSON_STYLE, "lenient": True}})
