"""What a request's output must look like: `response_format`, and vLLM's `guided_*` and `structured_outputs`, to a
`Grammar`; and whether it can be served, found out off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api.schema import Common, raw
from tailrace.api.settings import Limits
from tailrace.terms import InvalidInput
from tailrace.text.grammar import Grammar, check, choice

JSON_OBJECT = Grammar("json", '{"type":"object"}')
CHECK_SECONDS = 10.0
"""A grammar that has not been found right after so long is refused."""
VERDICTS = 256
"""Grammars whose verdict is remembered."""
LOOKED_UP = 4096
"""Characters of a grammar beyond which its digest is remembered instead."""
NAME_LENGTH = 64


@dataclass(frozen=True)
class Wanted:
    """A grammar, and the parameter that it came with."""

    grammar: Grammar
    param: str


class _Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: Raw | UnsetType = UNSET
    strict: bool | None = None


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    json_schema: Raw | UnsetType = UNSET


class _Structured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: Raw | UnsetType = UNSET
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def wanted(body: Common, limits: Limits) -> Wanted | None:
    """What the output must match; None where anything will do. Raises InvalidInput, also where several parameters ask
    for something."""
    found = [one for one in (_response_format(body, limits), *_guided(body, limits), _structured(body, limits)) if one]
    if len(found) > 1:
        raise InvalidInput(
            f"{found[0].param} and {found[1].param} both say what the output must be: give one of them",
            param=found[1].param,
        )
    if not found:
        return None
    if body.min_tokens:
        raise InvalidInput(
            f"min_tokens cannot be combined with {found[0].param}: the output ends where its form is complete",
            param="min_tokens",
            code="unsupported_parameter",
        )
    if body.ignore_eos:
        raise InvalidInput(
            f"ignore_eos cannot be combined with {found[0].param}: the output ends where its form is complete",
            param="ignore_eos",
            code="unsupported_parameter",
        )
    return found[0]


def _given(value: Raw | UnsetType) -> Raw | None:
    return None if isinstance(value, UnsetType) or bytes(value) == b"null" else value


def _response_format(body: Common, limits: Limits) -> Wanted | None:
    value = _given(body.response_format)
    if value is None:
        return None
    form: _Format = raw(value, _Format, "response_format", max_bytes=limits.grammar_bytes)
    given = _given(form.json_schema)
    if given is not None and form.type != "json_schema":
        raise InvalidInput(
            'response_format.json_schema needs response_format.type to be "json_schema"',
            param="response_format.json_schema",
        )
    match form.type:
        case "text":
            return None
        case "json_object":
            return Wanted(JSON_OBJECT, "response_format")
        case "json_schema":
            if given is None:
                raise InvalidInput(
                    "response_format.json_schema is missing",
                    param="response_format.json_schema",
                    code="missing_required_parameter",
                )
            return _json_schema(given, limits)
    shown = form.type if len(form.type) <= NAME_LENGTH else form.type[:NAME_LENGTH] + "..."
    raise InvalidInput(
        f'response_format.type must be "text", "json_object" or "json_schema", not {shown!r}',
        param="response_format.type",
    )


def _json_schema(value: Raw, limits: Limits) -> Wanted:
    given: _Schema = raw(value, _Schema, "response_format.json_schema", max_bytes=limits.grammar_bytes)
    name = given.name
    if not 0 < len(name) <= NAME_LENGTH or not name.isascii() or not name.replace("-", "_").replace("_", "a").isalnum():
        raise InvalidInput(
            f"response_format.json_schema.name must be 1 to {NAME_LENGTH} letters, digits, _ and -",
            param="response_format.json_schema.name",
        )
    param = "response_format.json_schema.schema"
    schema = _given(given.schema)
    if schema is None:
        return Wanted(JSON_OBJECT, param)
    return Wanted(_of_schema(schema, param, lenient=not given.strict), param)


def _of_schema(schema: Raw, param: str, *, lenient: bool) -> Grammar:
    """A JSON schema, given as an object or as its text."""
    data = bytes(schema)
    if data[:1] == b'"':
        text: str = raw(schema, str, param)
        data = text.encode().strip()
    if data[:1] != b"{":
        raise InvalidInput(f"{param} must be a JSON schema: an object", param=param, code="invalid_type")
    return Grammar("json", data.decode("utf-8", "replace"), lenient)


def _guided(body: Common, limits: Limits) -> list[Wanted]:
    most = limits.grammar_bytes
    found = []
    if (schema := _given(body.guided_json)) is not None:
        raw(schema, Raw, "guided_json", max_bytes=most)
        found.append(Wanted(_of_schema(schema, "guided_json", lenient=True), "guided_json"))
    names: tuple[tuple[Literal["regex", "lark"], Raw | UnsetType, str], ...] = (
        ("regex", body.guided_regex, "guided_regex"),
        ("lark", body.guided_grammar, "guided_grammar"),
    )
    for kind, given, param in names:
        if (value := _given(given)) is not None:
            found.append(Wanted(Grammar(kind, raw(value, str, param, max_bytes=most)), param))
    if (value := _given(body.guided_choice)) is not None:
        options: list[str] = raw(value, list[str], "guided_choice", max_bytes=most)
        found.append(_choice(options, "guided_choice", limits))
    return found


def _choice(options: list[str], param: str, limits: Limits) -> Wanted:
    if not options or not all(options):
        raise InvalidInput(f"{param} needs at least one text, and none may be empty", param=param)
    if len(options) > limits.grammar_choices:
        raise InvalidInput(
            f"{param} has {len(options)} texts; at most {limits.grammar_choices} are possible", param=param
        )
    return Wanted(choice(options), param)


def _structured(body: Common, limits: Limits) -> Wanted | None:
    value = _given(body.structured_outputs)
    if value is None:
        return None
    given: _Structured = raw(value, _Structured, "structured_outputs", max_bytes=limits.grammar_bytes)
    found = []
    if (schema := _given(given.json)) is not None:
        param = "structured_outputs.json"
        found.append(Wanted(_of_schema(schema, param, lenient=True), param))
    if given.regex is not None:
        found.append(Wanted(Grammar("regex", given.regex), "structured_outputs.regex"))
    if given.choice is not None:
        found.append(_choice(given.choice, "structured_outputs.choice", limits))
    if given.grammar is not None:
        found.append(Wanted(Grammar("lark", given.grammar), "structured_outputs.grammar"))
    if given.json_object:
        found.append(Wanted(JSON_OBJECT, "structured_outputs.json_object"))
    if len(found) != 1:
        raise InvalidInput(
            "structured_outputs needs one of json, json_object, regex, choice and grammar", param="structured_outputs"
        )
    return found[0]


def _short(grammar: Grammar) -> Grammar:
    """What stands for a grammar where it is only looked up: no more than a few kilobytes."""
    if len(grammar.text) <= LOOKED_UP:
        return grammar
    digest = hashlib.sha256(grammar.text.encode("utf-8", "surrogatepass")).hexdigest()
    return msgspec.structs.replace(grammar, text=digest)


class GrammarDesk:
    """Says which grammars can be served. One thread looks at them, one after the other, so that whoever sends large
    ones delays nobody but those who send others; what it found is remembered."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict([(_short(JSON_OBJECT), "")])
        self._thread: ThreadPoolExecutor | None = None

    async def admit(self, asked: Wanted | None) -> None:
        """Raises InvalidInput, naming the parameter, where the grammar cannot be served."""
        if asked is None:
            return
        error = self._verdicts.get(_short(asked.grammar))
        if error is None:
            error = await self._look(asked)
        else:
            self._verdicts.move_to_end(_short(asked.grammar))
        if error:
            raise InvalidInput(f"{asked.param} cannot be followed: {error}", param=asked.param, code="invalid_grammar")

    async def _look(self, asked: Wanted) -> str:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        work = asyncio.get_running_loop().run_in_executor(self._thread, check, asked.grammar)
        try:
            error = await asyncio.wait_for(work, CHECK_SECONDS)
        except TimeoutError:
            return f"it takes more than {CHECK_SECONDS:g} seconds to look at"
        self._verdicts[_short(asked.grammar)] = error
        while len(self._verdicts) > VERDICTS:
            self._verdicts.popitem(last=False)
        return error
