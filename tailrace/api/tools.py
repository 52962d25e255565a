"""What a chat request says of tools, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Raw, UnsetType

from tailrace.api.params import given, unsupported
from tailrace.api.schema import Chat, raw
from tailrace.api.settings import Limits
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.text.toolgrammar import Function

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""OpenAI's names of functions."""
CHOICE_BYTES = 1 << 16
NO_PARAMETERS = {"type": "object", "properties": {}}
_ALLOWED = ("mode", "tools")


@dataclass(frozen=True)
class Tools:
    """`offered`: the tools as a chat template wants them; None where the model is to call none. `parallel`: it may call
    several in one answer. `callable`: those that it may call, or must where `required`. `strict`: those whose arguments
    are held to their schema whatever happens."""

    offered: list[dict[str, Any]] | None
    parallel: bool = True
    required: bool = False
    callable: frozenset[str] = frozenset()
    strict: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(tool["function"]["name"] for tool in self.offered or ())

    @property
    def bound(self) -> bool:
        """Whether calls are held to a grammar."""
        return self.offered is not None and (self.required or bool(self.strict) or self.callable != self.names)


@dataclass(frozen=True)
class _Choice:
    """`names`: of the tools that may be called; None for all. `one`: exactly one call."""

    mode: Literal["auto", "none", "required"]
    names: frozenset[str] | None = None
    one: bool = False


def read_tools(body: Chat, limits: Limits) -> Tools:
    """The tools of a request and what it wants of them. Raises InvalidInput."""
    choice = _choice(body)
    tools = offered(body.tools, limits)
    if body.parallel_tool_calls is not None and tools is None:
        raise InvalidInput("parallel_tool_calls needs tools", param="parallel_tool_calls")
    if tools is None and (choice.mode == "required" or choice.names is not None):
        raise InvalidInput("this tool_choice needs tools", param="tool_choice")
    parallel = body.parallel_tool_calls is not False and not choice.one
    if tools is None or choice.mode == "none":
        return Tools(None, parallel)
    names = frozenset(tool["function"]["name"] for tool in tools)
    for name in choice.names or ():
        if name not in names:
            raise InvalidInput(f"tool_choice: there is no tool of the name {name[:64]!r}", param="tool_choice")
    made = Tools(
        [_shown(tool) for tool in tools],
        parallel,
        choice.mode == "required",
        names if choice.names is None else choice.names,
        frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict")),
    )
    if made.bound:
        _refuse_endless(body)
    return made


def _refuse_endless(body: Chat) -> None:
    for name in ("min_tokens", "ignore_eos"):
        if getattr(body, name):
            raise unsupported(name, "cannot be combined with calls that are held to their schemas: they end the answer")


def _choice(body: Chat) -> _Choice:
    value = given(body.tool_choice)
    if value is None:
        return _Choice("auto")
    choice: Any = raw(value, str | dict[str, Any], "tool_choice", max_bytes=CHOICE_BYTES)
    if choice in ("auto", "none", "required"):
        return _Choice(choice)
    if isinstance(choice, str):
        raise InvalidInput(
            f'tool_choice must be "none", "auto", "required", or an object that names tools, not {choice[:40]!r}',
            param="tool_choice",
        )
    if choice.get("type") == "function":
        return _Choice("required", frozenset([_named(choice, "tool_choice")]), one=True)
    if choice.get("type") != "allowed_tools":
        raise unsupported("tool_choice.type", 'can only be "function" or "allowed_tools"')
    where = "tool_choice.allowed_tools"
    allowed = _object(_object(choice, "tool_choice", ("type", "allowed_tools")).get("allowed_tools"), where, _ALLOWED)
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidInput(f'{where}.mode must be "auto" or "required"', param=f"{where}.mode")
    if not isinstance(tools, list) or not tools:
        raise InvalidInput(f"{where}.tools must be a list of at least one tool", param=f"{where}.tools")
    return _Choice(mode, frozenset(_named(tool, f"{where}.tools[{at}]") for at, tool in enumerate(tools)))


def _named(tool: Any, where: str) -> str:
    """The name in {"type": "function", "function": {"name": ...}}."""
    fields = _object(tool, where, ("type", "function"))
    if fields.get("type") != "function":
        raise unsupported(f"{where}.type", 'can only be "function"')
    name = _object(fields.get("function"), f"{where}.function", ("name",)).get("name")
    if not isinstance(name, str):
        raise InvalidInput(f"{where}.function.name must be a string", param=f"{where}.function.name")
    return name


def functions(tools: Tools) -> list[Function]:
    """The tools that may be called, as a grammar wants them. Raises InvalidInput where arguments could be no object."""
    from tailrace.text.toolgrammar import ANY_OBJECT, NO_ARGUMENTS, Function

    made = []
    for index, tool in enumerate(tools.offered or ()):
        name, parameters = tool["function"]["name"], tool["function"]["parameters"]
        if name not in tools.callable:
            continue
        strict = name in tools.strict
        if not tools.required and not strict:
            made.append(Function(name, ANY_OBJECT))
        elif parameters in ({}, NO_PARAMETERS):
            made.append(Function(name, NO_ARGUMENTS))
        else:
            made.append(Function(name, _of_object(parameters, parameters_at(index)), lenient=not strict))
    return made


def parameters_at(index: int) -> str:
    """The name of a tool's schema as a parameter."""
    return f"tools[{index}].function.parameters"


def _of_object(parameters: dict[str, Any], where: str) -> dict[str, Any]:
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidInput(f'{where}.type must be "object": arguments are one', param=where)
    return {**parameters, "type": "object"}


def shown(value: Raw | UnsetType, limits: Limits) -> list[dict[str, Any]] | None:
    """A `tools` parameter as a chat template wants it, in the client's order; None for none. Raises InvalidInput."""
    tools = offered(value, limits)
    return None if tools is None else [_shown(tool) for tool in tools]


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {"type": "function", "function": plain}


def offered(value: Raw | UnsetType, limits: Limits) -> list[dict[str, Any]] | None:
    """The tools of a `tools` parameter, checked, in the client's order; None for none. Raises InvalidInput."""
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
    if _deeper(function.get("parameters"), limits.tools_depth):
        raise InvalidInput(
            f"{where}.parameters is nested more than {limits.tools_depth} levels deep", param=f"{where}.parameters"
        )
    return {"type": "function", "function": {**function, "parameters": function.get("parameters", NO_PARAMETERS)}}


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
