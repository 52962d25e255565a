"""A request as the chat completion that it is, and what that says of it in this endpoint's own words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api import schema
from tailrace.api.errors import HttpError
from tailrace.api.params import given, unsupported
from tailrace.api.responses.body import LOGPROBS, Create
from tailrace.api.schema import Chat, Message
from tailrace.api.settings import Limits
from tailrace.api.tools import CHOICE_BYTES
from tailrace.terms import InvalidInput

WORDS = (
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax(_completion)?_tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bmessages\b"), "input"),
)
"""What chat completions call it, and what it is called here."""
SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "stream", "user", "metadata",
    "priority", "tailrace", "service_tier", "chat_template_kwargs", "top_logprobs",
)  # fmt: skip
FUNCTION = ("name", "description", "parameters", "strict")


@contextmanager
def own_words() -> Iterator[None]:
    """Errors from inside name this endpoint's parameters."""
    try:
        yield
    except (InvalidInput, HttpError) as error:
        text = str(error)
        for word, ours in WORDS:
            text = word.sub(ours, text)
            if error.param is not None:
                error.param = word.sub(ours, error.param)
        error.args = (text,)
        raise


def as_chat(body: Create, messages: Sequence[Message], limits: Limits) -> Chat:
    """The chat completion with the same answer. Raises InvalidInput."""
    tools = chat_tools(body.tools, limits)
    logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    more: dict[str, Any] = {}
    if body.stream:
        more["stream_options"] = schema.StreamOptions(include_usage=True)
    if tools is not UNSET:
        more["parallel_tool_calls"] = body.parallel_tool_calls
    if body.reasoning is not None:
        more["reasoning_effort"] = body.reasoning.effort
    return Chat(
        messages=list(messages),
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        tools=tools,
        tool_choice=chat_choice(body.tool_choice),
        response_format=UNSET if body.text is None else chat_format(body.text.format, limits),
        **{name: getattr(body, name) for name in SAME},
        **more,
    )


def chat_tools(value: Raw | UnsetType, limits: Limits) -> Raw | UnsetType:
    """`tools` as chat completions have them; functions only."""
    data = given(value)
    if data is None:
        return UNSET
    tools: list[Any] = schema.raw(data, list[Any], "tools", max_bytes=limits.tools_bytes)
    if len(tools) > limits.tools:
        raise InvalidInput(f"tools has {len(tools)} entries; at most {limits.tools} are possible", param="tools")
    made = [_nested(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    return Raw(msgspec.json.encode(made)) if made else UNSET


def _nested(tool: Any, where: str) -> Any:
    if not isinstance(tool, dict):
        return tool  # chat completions say what is wrong with it
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "function":
        raise unsupported(
            f"{where}.type", f'can only be "function": this server has no built-in tools such as {kind[:64]!r}'
        )
    known = {name: tool[name] for name in FUNCTION if name in tool}
    rest = {name: entry for name, entry in tool.items() if name not in (*FUNCTION, "type") and entry is not None}
    return {"type": kind, "function": {**known, **rest}}


def chat_choice(value: Raw | UnsetType) -> Raw | UnsetType:
    """`tool_choice` as chat completions have it."""
    data = given(value)
    if data is None:
        return UNSET
    choice: Any = schema.raw(data, str | dict[str, Any], "tool_choice", max_bytes=CHOICE_BYTES)
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind != "function":
            raise unsupported("tool_choice", f"names what this server does not have: {str(kind)[:64]!r}")
        rest = {name: entry for name, entry in choice.items() if name not in ("type", "name")}
        choice = {"type": "function", "function": {"name": choice.get("name")}, **rest}
    return Raw(msgspec.json.encode(choice))


def chat_format(value: Raw | UnsetType, limits: Limits) -> Raw | UnsetType:
    """`text.format` as `response_format`."""
    data = given(value)
    if data is None:
        return UNSET
    form: dict[str, Raw] = schema.raw(data, dict[str, Raw], "text.format", max_bytes=limits.grammar_bytes)
    kind = form.get("type")
    if kind is not None and bytes(kind) == b'"json_schema"':
        inner = {name: entry for name, entry in form.items() if name != "type"}
        return Raw(msgspec.json.encode({"type": "json_schema", "json_schema": inner}))
    return data


def shown_tools(value: Raw | UnsetType) -> list[Mapping[str, Any]]:
    """The tools of a checked request as a response shows them."""
    data = given(value)
    tools: list[dict[str, Any]] = [] if data is None else msgspec.json.decode(data)
    return [
        {"type": "function", "name": tool["name"], "description": tool.get("description"),
         "parameters": tool.get("parameters"), "strict": bool(tool.get("strict"))}
        for tool in tools
    ]  # fmt: skip


def shown_format(value: Raw | UnsetType) -> Any:
    """`text.format` of a checked request as a response shows it."""
    data = given(value)
    return {"type": "text"} if data is None else msgspec.json.decode(data)
