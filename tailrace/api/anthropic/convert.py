"""A Messages request as the chat completion that it is. Every refusal has Anthropic's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api import schema as openai
from tailrace.api.anthropic.schema import (
    CountTokens,
    Document,
    Image,
    Messages,
    OutputConfig,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    ToolResult,
    ToolUse,
    Turn,
)
from tailrace.api.params import bounded, given, refuse_unserved, unsupported
from tailrace.api.settings import Limits
from tailrace.terms import InvalidInput

ERROR = "Error: "
"""What a result begins with where its call failed: templates know no other sign of it."""

Encode = msgspec.json.Encoder().encode


def chat_of(body: Messages, limits: Limits, *, arguments: dict[str, Any], effort: str | None) -> openai.Chat:
    """The chat completion. `arguments` and `effort` are for the template. Raises InvalidInput."""
    refuse_unserved(body)
    for name in ("temperature", "top_p"):
        if getattr(body, name) is not None:
            bounded(getattr(body, name), 0.0, 1.0, name)
    tools = tools_of(body.tools, limits)
    choice, parallel = _choice(body.tool_choice, tools)
    return openai.Chat(
        model=body.model,
        messages=messages_of(body),
        max_tokens=body.max_tokens,
        stop=_stop(body.stop_sequences),
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        user=None if body.metadata is None else body.metadata.user_id,
        tools=UNSET if tools is None else Raw(Encode(tools)),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_form(body.output_config),
        chat_template_kwargs=Raw(Encode(arguments)) if arguments else UNSET,
        reasoning_effort=UNSET if effort is None else Raw(Encode(effort)),
    )


def _stop(value: Raw | UnsetType) -> Raw | UnsetType:
    data = given(value)
    if data is not None and bytes(data)[:1] != b"[":
        raise InvalidInput("stop_sequences must be a list of strings", param="stop_sequences", code="invalid_type")
    return UNSET if data is None else data


def _form(config: OutputConfig | None) -> Raw | UnsetType:
    if config is None or config.format is None:
        return UNSET
    form = {"name": "output", "schema": config.format.schema, "strict": True}
    return Raw(Encode({"type": "json_schema", "json_schema": form}))


def tools_of(value: Raw | UnsetType, limits: Limits) -> list[dict[str, Any]] | None:
    """The tools, as chats have them; None for none. Raises InvalidInput."""
    data = given(value)
    if data is None:
        return None
    tools: list[Any] = openai.raw(data, list[Any], "tools", max_bytes=limits.tools_bytes)
    return [_tool(one, f"tools[{at}]") for at, one in enumerate(tools)] or None


def _tool(fields: Any, where: str) -> dict[str, Any]:
    kind = fields.get("type") if isinstance(fields, dict) else None
    if kind not in (None, "custom"):
        shown = kind[:40] if isinstance(kind, str) else kind
        raise unsupported(f"{where}.type", f'can only be "custom", not {shown!r}: the server has no tools of its own')
    try:
        tool = msgspec.convert(fields, Tool)
    except msgspec.ValidationError as error:
        inner = openai.explain(error)
        param = f"{where}.{inner.param}" if inner.param else where
        raise InvalidInput(f"{param}: {inner}", param=param, code=inner.code) from None
    for name in ("input_examples", "allowed_callers", "defer_loading", "eager_input_streaming"):
        if getattr(tool, name):
            raise unsupported(f"{where}.{name}")
    if tool.input_schema is None:
        raise InvalidInput(
            f"missing parameter: {where}.input_schema",
            param=f"{where}.input_schema",
            code="missing_required_parameter",
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None, tools: list[dict[str, Any]] | None) -> tuple[Raw | UnsetType, bool | None]:
    """`tool_choice` and `parallel_tool_calls` as chats have them. Raises InvalidInput."""
    if choice is None:
        return UNSET, None
    if tools is None and choice.type != "none":
        raise InvalidInput("tool_choice needs tools", param="tool_choice")
    if (choice.name is not None) != (choice.type == "tool"):
        raise InvalidInput('tool_choice.name belongs to the type "tool"', param="tool_choice.name")
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    match choice.type:
        case "tool":
            made: Any = {"type": "function", "function": {"name": choice.name}}
        case "any":
            made = "required"
        case other:
            made = other
    return Raw(Encode(made)), parallel if tools is not None else None


def messages_of(body: CountTokens) -> list[openai.Message]:
    """The conversation, as chats have it: what tools gave becomes messages of its own, and neighbours of one role are
    one message, since templates want them to alternate. Raises InvalidInput."""
    if not body.messages:
        raise InvalidInput("messages is empty: give at least one", param="messages")
    made: list[openai.Message] = []
    if body.system:
        made.append(_system(body.system, "system"))
    for at, turn in enumerate(body.messages):
        where = f"messages[{at}]"
        if turn.role == "system":
            made.append(_system(turn.content, f"{where}.content"))
        elif turn.role == "user":
            made += _user(turn, where)
        else:
            made.append(_assistant(turn, where))
    if body.messages[-1].role == "assistant":
        raise unsupported("messages", "must not end with the assistant: the beginning of an answer cannot be given")
    return _joined(made)


def _system(content: Any, where: str) -> openai.Message:
    if isinstance(content, str):
        return openai.Message("system", content)
    return openai.Message("system", [_part(block, f"{where}[{at}]") for at, block in enumerate(content)])


def _part(block: Any, where: str) -> openai.ContentPart:
    """A block of text. Raises InvalidInput for any other: nothing else is read, or fetched."""
    if not isinstance(block, Text):
        kind = type(block).__struct_config__.tag
        why = "this model reads text only" if isinstance(block, Image | Document) else "it does not belong here"
        raise InvalidInput(f"{where}: {kind} blocks are not supported: {why}", param=where, code="unsupported_content")
    if given(block.citations) is not None:
        raise unsupported(f"{where}.citations")
    return openai.ContentPart("text", block.text)


def _user(turn: Turn, where: str) -> list[openai.Message]:
    if isinstance(turn.content, str):
        return [openai.Message("user", turn.content)]
    made: list[openai.Message] = []
    for at, block in enumerate(turn.content):
        here = f"{where}.content[{at}]"
        if isinstance(block, ToolResult):
            text = _result(block, here)
            made.append(openai.Message("tool", text, tool_call_id=block.tool_use_id))
        else:
            made.append(openai.Message("user", [_part(block, here)]))
    if not made:
        raise InvalidInput(f"{where}.content is empty", param=f"{where}.content")
    return made


def _result(block: ToolResult, where: str) -> str:
    content = block.content or ""
    if not isinstance(content, str):
        parts = [_part(one, f"{where}.content[{at}]") for at, one in enumerate(content)]
        content = "\n".join(part.text or "" for part in parts)
    return ERROR + content if block.is_error else content


def _assistant(turn: Turn, where: str) -> openai.Message:
    if isinstance(turn.content, str):
        return openai.Message("assistant", turn.content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[openai.ToolCall] = []
    for at, block in enumerate(turn.content):
        here = f"{where}.content[{at}]"
        if isinstance(block, ToolUse):
            if bytes(block.input)[:1] != b"{":
                raise InvalidInput(f"{here}.input must be an object", param=f"{here}.input", code="invalid_type")
            calls.append(openai.ToolCall(openai.FunctionCall(block.name, block.input), block.id))
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        else:
            texts.append(_part(block, here).text or "")
    return openai.Message(
        "assistant",
        "".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _joined(messages: Sequence[openai.Message]) -> list[openai.Message]:
    joined: list[openai.Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or last.role != message.role or message.role == "tool":
            joined.append(message)
            continue
        joined[-1] = msgspec.structs.replace(
            last,
            content=[*_parts(last), *_parts(message)],
            tool_calls=[*(last.tool_calls or ()), *(message.tool_calls or ())] or None,
            reasoning_content="\n".join(filter(None, (last.reasoning_content, message.reasoning_content))) or None,
        )
    return joined


def _parts(message: openai.Message) -> list[openai.ContentPart]:
    content = message.content
    if isinstance(content, list):
        return content
    return [openai.ContentPart("text", content)] if content else []
