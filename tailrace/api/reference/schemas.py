"""JSON schemas of what bodies keep raw: their types say nothing of it."""

from __future__ import annotations

from tailrace.api.grammars import NAME_LENGTH
from tailrace.api.params import MOST
from tailrace.api.reference.declare import Json
from tailrace.api.settings import Limits

LIMITS = Limits()
OBJECT: Json = {"type": "object"}
LIST: Json = {"type": "array"}
TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 1, "maximum": MOST}
CHOICES: Json = {"type": "integer", "minimum": 1, "maximum": LIMITS.choices}
LIKELY: Json = {"type": "integer", "minimum": 0, "maximum": LIMITS.logprobs}
IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
USER: Json = {"type": "string", "maxLength": 512}
SOME_TEXT: Json = {"type": "string", "minLength": 1}
SOME_IDS: Json = {**IDS, "minItems": 1}
MESSAGES: Json = {"minItems": 1, "maxItems": LIMITS.messages}
NAME: Json = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
LABELS: Json = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": 512},
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
}
BIAS: Json = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "propertyNames": {"pattern": "^[0-9]+$"},
    "maxProperties": LIMITS.logit_bias,
}
STOP_TEXT: Json = {"type": "string", "minLength": 1, "maxLength": LIMITS.stop_chars}
STOPS: Json = {"type": "array", "items": STOP_TEXT, "maxItems": LIMITS.stop_strings}
STOP: Json = {"anyOf": [STOP_TEXT, STOPS]}


def some(item: Json, most: int) -> Json:
    """A list of one or more."""
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


def one_or_some(most: int) -> Json:
    """A text, token ids, or a list of either."""
    return {"anyOf": [SOME_TEXT, SOME_IDS, some(SOME_TEXT, most), some(SOME_IDS, most)]}


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


CHOSEN = some(SOME_TEXT, LIMITS.grammar_choices)
SCHEMA: Json = {"type": ["object", "string"]}
FORMS: Json = {
    "anyOf": [
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=_object(
                ("name",),
                name={"type": "string", "pattern": f"^[A-Za-z0-9_-]{{1,{NAME_LENGTH}}}$"},
                description=_or_null(TEXT),
                schema=_or_null(SCHEMA),
                strict=_or_null({"type": "boolean"}),
            ),
        ),
    ]
}
STRUCTURED: Json = {
    "anyOf": [
        _object(("json",), json=SCHEMA),
        _object(("regex",), regex=TEXT),
        _object(("choice",), choice=CHOSEN),
        _object(("grammar",), grammar=TEXT),
        _object(("json_object",), json_object={"const": True}),
    ]
}
PREDICTION: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "content"},
        "content": {
            "anyOf": [
                TEXT,
                {"type": "array", "items": _object(("type", "text"), type={"const": "text"}, text=TEXT)},
            ]
        },
    },
    "required": ["type", "content"],
}
_FUNCTION: Json = {
    "name": NAME,
    "description": _or_null(TEXT),
    "parameters": _or_null(OBJECT),
    "strict": _or_null({"type": "boolean"}),
}
TOOLS: Json = {
    "type": "array",
    "items": _object(("type", "function"), type={"const": "function"}, function=_object(("name",), **_FUNCTION)),
    "maxItems": LIMITS.tools,
}
RESPONSE_TOOLS: Json = {
    "type": "array",
    "items": _object(("type", "name"), type={"const": "function"}, **_FUNCTION),
    "maxItems": LIMITS.tools,
}
MESSAGE_TOOLS: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": NAME, "description": _or_null(TEXT), "input_schema": OBJECT},
        "required": ["name", "input_schema"],
    },
    "maxItems": LIMITS.tools,
}
CHOICE: Json = {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]}
