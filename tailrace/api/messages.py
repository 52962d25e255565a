"""Chat messages as the chat template wants them, and what of a client's messages is refused."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import UNSET

from tailrace.api.schema import ContentPart, Message, ToolCall, raw
from tailrace.api.settings import Limits
from tailrace.terms import InvalidInput

SHORT_ID = 9
ROLES = {"developer": "system"}
"""Templates know no developer; OpenAI's developer messages are what system messages were."""


def for_template(messages: Sequence[Message], limits: Limits) -> list[dict[str, Any]]:
    """Messages as plain dictionaries. Absent, null and empty content are the same. Raises InvalidInput."""
    if not messages:
        raise InvalidInput("messages cannot be empty", param="messages")
    calls = sum(len(message.tool_calls) for message in messages if message.tool_calls)
    for name, count in (("messages", len(messages)), ("tool_calls", calls)):
        if count > limits.messages:
            raise InvalidInput(f"messages: {count} {name}; at most {limits.messages} are possible", param="messages")
    return [_one(message, f"messages[{index}]") for index, message in enumerate(messages)]


def text_size(messages: Sequence[Message]) -> int:
    """Characters of everything in the messages that a template may show; of tool calls, the bytes of the JSON."""
    return sum(map(_size, messages))


def _size(message: Message) -> int:
    content = message.content
    if isinstance(content, list):
        size = sum(len(part.text or part.refusal or "") + 1 for part in content)
    else:
        size = len(content or "")
    size += sum(len(value) for value in (message.name, message.tool_call_id, message.reasoning_content) if value)
    for call in message.tool_calls or ():
        size += len(call.id) + len(call.function.name) + len(bytes(call.function.arguments))
    return size


def _one(message: Message, param: str) -> dict[str, Any]:
    for name in ("audio", "function_call"):
        value = getattr(message, name)
        if value is not UNSET and bytes(value) != b"null":
            raise InvalidInput(
                f"{param}.{name} is not supported", param=f"{param}.{name}", code="unsupported_parameter"
            )
    calls = message.tool_calls
    if message.role != "assistant" and calls:
        raise InvalidInput(f"{param}: only an assistant has tool_calls", param=f"{param}.tool_calls")
    if message.content is None and message.role in ("system", "developer", "user"):
        raise InvalidInput(f"{param}: a {message.role} message needs content", param=f"{param}.content")
    plain: dict[str, Any] = {
        "role": ROLES.get(message.role, message.role),
        "content": content_text(message.content, f"{param}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if calls:
        plain["tool_calls"] = [_call(call, f"{param}.tool_calls") for call in calls]
    return plain


def content_text(content: str | list[ContentPart] | None, param: str) -> str:
    """The text of a message's content. Raises InvalidInput for anything that is not text; nothing is ever fetched."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if part.type == "text" and part.text is not None:
            parts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            parts.append(part.refusal)
        elif part.type in ("text", "refusal"):
            raise InvalidInput(f"{param}[{index}]: {part.type} is missing", param=param)
        else:
            shown = part.type[:40]
            raise InvalidInput(
                f"{param}[{index}]: {shown} parts are not supported, this model reads text only",
                param=param,
                code="unsupported_content",
            )
    return "\n".join(parts)


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with ids of tool calls of nine letters and digits, for templates that take no others. Equal
    ids stay equal."""
    changed = []
    for message in messages:
        new = dict(message)
        if "tool_call_id" in new:
            new["tool_call_id"] = short_id(new["tool_call_id"])
        if "tool_calls" in new:
            new["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in new["tool_calls"]]
        changed.append(new)
    return changed


def short_id(ident: str) -> str:
    """An id of nine letters and digits: itself where it is one, else a digest."""
    if len(ident) == SHORT_ID and ident.isascii() and ident.isalnum():
        return ident
    return sha256(ident.encode()).hexdigest()[:SHORT_ID]


def _call(call: ToolCall, param: str) -> dict[str, Any]:
    """Templates want arguments as an object where they are one; text that is not stays as it is."""
    arguments: Any = raw(call.function.arguments, str | dict[str, Any], param)
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
