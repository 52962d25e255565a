"""Input items: checked, and as the chat messages that they stand for.

Items are what a client sends, or what this server once answered. What one turn of an assistant is made of (reasoning,
text, calls of tools) are several items, and one message.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api import schema
from tailrace.api.schema import FunctionCall, Message, ToolCall
from tailrace.api.settings import Limits
from tailrace.terms import InvalidInput

T = TypeVar("T")
Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
SHOWN = 64


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Kind(msgspec.Struct, frozen=True):
    type: str | None = None
    role: str | None = None


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: None = None  # an index of OpenAI's own models


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None


class _CallOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: None = None
    namespace: None = None


class _Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    summary: list[_Part] = []
    content: list[_Part] | None = None
    encrypted_content: Raw | UnsetType = UNSET
    id: str | None = None
    status: Status | None = None


KINDS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "message": (_Message, "msg_"),
    "function_call": (_Call, "fc_"),
    "function_call_output": (_CallOutput, "fco_"),
    "reasoning": (_Reasoning, "rs_"),
}
"""Types of items, and what their ids begin with."""


def new_id(prefix: str) -> str:
    """An id that no other item has, ever."""
    return prefix + os.urandom(24).hex()


def read(value: Raw | UnsetType, limits: Limits) -> list[Item]:
    """The `input` of a request as plain items, each with an id. Raises InvalidInput that names the item."""
    data = b"" if isinstance(value, UnsetType) else bytes(value)
    if data in (b"", b"null"):
        raise InvalidInput("input is missing", param="input", code="missing_required_parameter")
    if data[:1] != b"[":
        text: str = schema.raw(Raw(data), str, "input")
        return [_spelled({"role": "user", "content": text}, "message")]
    rows: list[Raw] = schema.raw(Raw(data), list[Raw], "input")
    if not rows:
        raise InvalidInput("input cannot be empty", param="input")
    if len(rows) > limits.messages:
        raise InvalidInput(f"input has {len(rows)} items; at most {limits.messages} are possible", param="input")
    return [_item(row, f"input[{index}]") for index, row in enumerate(rows)]


def _item(row: Raw, where: str) -> Item:
    kind = _decode(row, _Kind, where)
    name = kind.type or ("message" if kind.role is not None else "")
    if name not in KINDS:
        if not name:
            raise InvalidInput(f"{where}.type is missing", param=f"{where}.type", code="missing_required_parameter")
        raise InvalidInput(
            f"{where}.type {name[:SHOWN]!r} is not supported: items are of the types {', '.join(KINDS)}",
            param=f"{where}.type",
            code="unsupported_content",
        )
    item = _decode(row, KINDS[name][0], where)
    match item:
        case _Message():
            _text(item.content, f"{where}.content")
        case _CallOutput():
            _text(item.output, f"{where}.output")
        case _Reasoning():
            _text(item.content or item.summary, f"{where}.content")
            hidden = item.encrypted_content
            if not isinstance(hidden, UnsetType) and bytes(hidden) != b"null":
                raise InvalidInput(
                    f"{where}.encrypted_content is not supported: reasoning is sent back as content",
                    param=f"{where}.encrypted_content",
                    code="unsupported_parameter",
                )
    return _spelled(msgspec.json.decode(row), name)


def _spelled(item: Item, kind: str) -> Item:
    """With its type, an id and a status, and a message's text as parts: what an item is when it is shown again."""
    plain = {name: value for name, value in item.items() if value is not None}
    plain = {"id": new_id(KINDS[kind][1]), **plain, "type": kind}
    if kind != "reasoning":
        plain.setdefault("status", "completed")
    if kind == "message" and isinstance(plain["content"], str):
        if plain["role"] == "assistant":
            plain["content"] = [{"type": "output_text", "text": plain["content"], "annotations": []}]
        else:
            plain["content"] = [{"type": "input_text", "text": plain["content"]}]
    if kind == "reasoning":
        plain.setdefault("summary", [])
    return plain


def _decode(row: Raw, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(row, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        inner = schema.explain(error)
        param = where if inner.param is None else f"{where}.{inner.param}"
        raise InvalidInput(f"{where}: {inner}", param=param, code=inner.code) from None


def _text(content: str | Sequence[_Part], where: str) -> str:
    """The text of parts; nothing else is read, and nothing is ever fetched."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*TEXTS, "refusal"):
            raise InvalidInput(
                f"{where}[{index}]: {part.type[:SHOWN]} parts are not supported, this model reads text only",
                param=f"{where}[{index}]",
                code="unsupported_content",
            )
        if text is None:
            raise InvalidInput(
                f"{where}[{index}].text is missing", param=f"{where}[{index}]", code="missing_required_parameter"
            )
        texts.append(text)
    return "\n".join(texts)


def _said(content: Any) -> str:
    """The text of a checked item's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


class _Turn:
    """An assistant's message that is being put together."""

    def __init__(self) -> None:
        self.reasoning: str | None = None
        self.content: str | None = None
        self.calls: list[ToolCall] = []

    def message(self) -> Message:
        """What has come together."""
        return Message(
            role="assistant", content=self.content, reasoning_content=self.reasoning, tool_calls=self.calls or None
        )


def messages(items: Sequence[Item], instructions: str | None) -> list[Message]:
    """Checked items as chat messages. Raises InvalidInput where an output has no call."""
    made: list[Message] = []
    if instructions is not None:
        made.append(Message(role="system", content=instructions))
    turn: _Turn | None = None
    called: set[str] = set()
    for item in items:
        kind = item["type"]
        assistant = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        full = turn is not None and (turn.content is not None or turn.calls)
        if turn is not None and (not assistant or (full and kind != "function_call")):
            made.append(turn.message())
            turn = None
        if assistant:
            turn = turn or _Turn()
            _add(turn, item)
            called.add(item.get("call_id", ""))
        elif kind == "function_call_output":
            made.append(_output(item, called))
        else:
            made.append(Message(role=item["role"], content=_said(item["content"])))
    return made if turn is None else [*made, turn.message()]


def _add(turn: _Turn, item: Item) -> None:
    match item["type"]:
        case "reasoning":
            said = _said(item.get("content") or item["summary"])
            turn.reasoning = said if turn.reasoning is None else f"{turn.reasoning}\n{said}"
        case "function_call":
            arguments = Raw(msgspec.json.encode(item["arguments"]))
            turn.calls.append(ToolCall(FunctionCall(item["name"], arguments), item["call_id"]))
        case _:
            turn.content = _said(item["content"])


def _output(item: Item, called: set[str]) -> Message:
    if item["call_id"] not in called:
        raise InvalidInput(
            f"input: there is no function_call with the call_id {item['call_id'][:SHOWN]!r} before its output",
            param="input",
        )
    return Message(role="tool", content=_said(item["output"]), tool_call_id=item["call_id"])
