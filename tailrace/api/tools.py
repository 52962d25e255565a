"""What a chat request says of tools, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Raw, UnsetType

from tailrace.api.params import given, unsupported
from tailrace.api.schema import Chat, raw
from tailrace.api.settings import Limits
from tailrace.terms import InvalidInput

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""OpenAI's names of functions."""
CHOICE_BYTES = 1 << 16
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tools:
    """`offered`: the tools as a chat template wants them; None where the model is to call none. `parallel`: it may call
    several in one answer."""

    offered: list[dict[str, Any]] | None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(tool["function"]["name"] for tool in self.offered or ())


def read_tools(body: Chat, limits: Limits) -> Tools:
    """The tools of a request and what it wants of them. Raises InvalidInput."""
    for name, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if given(getattr(body, name)) is not None:
            raise unsupported(name, f"is not supported: OpenAI has replaced it by {new}")
    choice = _choice(body)
    tools = offered(body.tools, limits)
    if body.parallel_tool_calls is not None and tools is None:
        raise InvalidInput("parallel_tool_calls needs tools", param="parallel_tool_calls")
    return Tools(None if choice == "none" else tools, body.parallel_tool_calls is not False)


def _choice(body: Chat) -> str:
    value = given(body.tool_choice)
    choice: Any = "auto" if value is None else raw(value, str | dict[str, Any], "tool_choice", max_bytes=CHOICE_BYTES)
    if choice in ("auto", "none"):
        return str(choice)
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function"):
        raise needs_grammar("tool_choice", 'can only be "none" or "auto"')
    if isinstance(choice, dict):
        raise unsupported("tool_choice", 'can only be "none" or "auto"')
    raise InvalidInput('tool_choice must be "none" or "auto"', param="tool_choice")


def needs_grammar(param: str, what: str) -> InvalidInput:
    """The refusal of what holds only where the grammar of the calls constrains the model's output. All that waits for
    that comes through here."""
    return unsupported(param, f"{what}: calls of tools are not constrained so far")


def offered(value: Raw | UnsetType, limits: Limits) -> list[dict[str, Any]] | None:
    """A `tools` parameter as a chat template wants it, in the client's order; None for none. Raises InvalidInput."""
    data = given(value)
    if data is None:
        return None
    tools: list[Any] = raw(data, list[Any], "tools", max_bytes=limits.tools_bytes)
    if len(tools) > limits.tools:
        raise InvalidInput(f"tools has {len(tools)} entries; at most {limits.tools} are possible", param="tools")
    made = [_tool(tool, f"tools[{index}]", limits) for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in made]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools[{index}].function.name"
            raise InvalidInput(f"{where}: there are two tools of the name {name}", param=where)
    return made or None


def _tool(tool: Any, where: str, limits: Limits) -> dict[str, Any]:
    fields = _object(tool, where, ("type", "function"))
    if fields.get("type") != "function":
        shown = f", not {fields['type'][:40]!r}" if isinstance(fields.get("type"), str) else ""
        raise unsupported(f"{where}.type", f'can only be "function"{shown}')
    if "function" not in fields:
        raise _missing(f"{where}.function")
    function = _object(fields["function"], f"{where}.function", ("name", "description", "parameters", "strict"))
    where += ".function"
    if "name" not in function:
        raise _missing(f"{where}.name")
    for name, kind, what in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema, which is an object"),
        ("strict", bool, "true or false"),
    ):
        if name in function and not isinstance(function[name], kind):
            raise InvalidInput(f"{where}.{name} must be {what}", param=f"{where}.{name}", code="invalid_type")
    if not NAME.fullmatch(function["name"]):
        raise InvalidInput(
            f"{where}.name must have 1 to 64 letters, digits, underscores and hyphens", param=f"{where}.name"
        )
    if function.get("strict"):
        raise needs_grammar(f"{where}.strict", "can only be false")
    if _deeper(function.get("parameters"), limits.tools_depth):
        raise InvalidInput(
            f"{where}.parameters is nested more than {limits.tools_depth} levels deep", param=f"{where}.parameters"
        )
    plain = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": {**plain, "parameters": plain.get("parameters", NO_PARAMETERS)}}


def _object(value: Any, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """The fields that are there and not null."""
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} must be an object", param=where, code="invalid_type")
    for key in value:
        if key not in known:
            shown = f"{where}.{key[:64]}"
            raise InvalidInput(f"unknown parameter: {shown}", param=shown, code="unknown_parameter")
    return {key: entry for key, entry in value.items() if entry is not None}


def _missing(where: str) -> InvalidInput:
    return InvalidInput(f"missing parameter: {where}", param=where, code="missing_required_parameter")


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than so many levels."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(one, levels - 1) for one in inner)
