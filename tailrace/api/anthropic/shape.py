"""Messages and their events. A stream and a whole answer are made of the same blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.api.errors import HttpError
from tailrace.api.generation import Choice, Delta
from tailrace.api.shapes import Facts, encode, reasons
from tailrace.text.answer.parts import Arguments, Call, Content, Part, Reasoning, merged

LONE = re.compile("[\ud800-\udfff]")
ATTEMPTS = 8
"""Ends of arguments that were cut off that are tried; what is complete of valid JSON ends at one of the last few."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def event(fields: Mapping[str, Any]) -> bytes:
    """One server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (str(fields["type"]).encode(), encode(fields))


def usage_of(choice: Choice) -> dict[str, Any]:
    """Tokens so far. Those of the prompt that were cached are counted apart from the others."""
    cached = min(choice.cached, len(choice.prompt))
    counts: dict[str, Any] = {
        "input_tokens": len(choice.prompt) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": choice.output_tokens,
    }
    if reasons(choice):
        counts["output_tokens_details"] = {"thinking_tokens": choice.reasoning_tokens}
    return counts


def stop_of(choice: Choice) -> dict[str, Any]:
    """Why an answer ended."""
    reason = STOPS.get(choice.finish or "", choice.finish)
    if reason == "end_turn" and choice.matched is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.matched if reason == "stop_sequence" else None}


@dataclass
class MessageShape:
    """A `message`, whole or as events. There is one choice."""

    facts: Facts
    call_id: Callable[[], str]
    failed: Callable[[HttpError], bytes]
    done: bytes = b""
    _block: int = -1  # the number of the last block that was begun
    _kind: str = ""  # of the block that is open
    _begun: bool = False
    _ids: dict[int, str] = field(default_factory=dict)

    def opening(self, choice: Choice) -> bytes:
        """Nothing: the first event says how much of the prompt was cached, which is known with the first token."""
        return b""

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one step."""
        return b"".join(self._events(choice, delta))

    def _events(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield event({"type": "message_start", "message": {**self._head(choice), "content": [], **NOT_ENDED}})
        for part in delta.parts if choice.answer is not None else merged([Content(delta.text)]):
            yield from self._part(part)
        if delta.finish is not None:
            yield from self._close()
            self.done = event({"type": "message_delta", "delta": stop_of(choice), "usage": usage_of(choice)}) + event(
                {"type": "message_stop"}
            )

    def _head(self, choice: Choice) -> dict[str, Any]:
        facts = self.facts
        head = {"id": facts.id, "type": "message", "role": "assistant", "model": facts.model}
        return {**head, "usage": {**usage_of(choice), "service_tier": "standard"}}

    def _part(self, part: Part) -> Iterator[bytes]:
        match part:
            case Content(text):
                yield from self._grow("text", {"type": "text_delta", "text": text}, {"text": ""})
            case Reasoning(text):
                grown = {"type": "thinking_delta", "thinking": text}
                yield from self._grow("thinking", grown, {"thinking": "", "signature": ""})
            case Call(index, name):
                yield from self._close()
                yield from self._open("tool_use", {"id": self._id(index), "name": name, "input": {}})
            case Arguments(_, text):
                yield from self._grow("tool_use", {"type": "input_json_delta", "partial_json": text}, {})

    def _grow(self, kind: str, delta: Mapping[str, Any], empty: Mapping[str, Any]) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind, empty)
        yield event({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _open(self, kind: str, fields: Mapping[str, Any]) -> Iterator[bytes]:
        self._block += 1
        self._kind = kind
        block = {"type": kind, **fields}
        yield event({"type": "content_block_start", "index": self._block, "content_block": block})
        if self._block == 0:
            yield PING

    def _close(self) -> Iterator[bytes]:
        if self._kind:
            self._kind = ""
            yield event({"type": "content_block_stop", "index": self._block})

    def _id(self, index: int) -> str:
        """The id of a call, the same whenever it is shown."""
        return self._ids.setdefault(index, self.call_id())

    def closing(self, fields: Mapping[str, Any]) -> bytes:
        """The timeline, where it was asked for; usage has its own event."""
        told = {name: value for name, value in fields.items() if name != "usage"}
        return event({"type": "tailrace", **told}) if told else b""

    def failure(self, error: HttpError) -> bytes:
        """What ends a stream whose answer cannot be completed."""
        return b"event: error\ndata: " + self.failed(error) + b"\n\n"

    def whole(
        self, choices: Sequence[Choice], deltas: Sequence[tuple[Choice, Delta]], fields: Mapping[str, Any]
    ) -> bytes:
        """One `message`."""
        choice = choices[0]
        plain = [Content(delta.text) for _, delta in deltas] if choice.answer is None else None
        parts = merged(plain if plain is not None else (part for _, delta in deltas for part in delta.parts))
        told = {name: value for name, value in fields.items() if name != "usage"}
        return encode({**self._head(choice), "content": self._content(parts), **stop_of(choice), **told})

    def _content(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for at, part in enumerate(parts):
            match part:
                case Content(text):
                    blocks.append({"type": "text", "text": text})
                case Reasoning(text):
                    blocks.append({"type": "thinking", "thinking": text, "signature": ""})
                case Call(index, name):
                    following = parts[at + 1] if at + 1 < len(parts) else None
                    written = following.text if isinstance(following, Arguments) else ""
                    blocks.append({"type": "tool_use", "id": self._id(index), "name": name, "input": told_of(written)})
                case Arguments():
                    pass
        return blocks


NOT_ENDED = {"stop_reason": None, "stop_sequence": None}


def told_of(text: str) -> dict[str, Any]:
    """The object that arguments are; of arguments that were cut off, what of them is complete."""
    try:
        value = json.loads(text)
    except ValueError:
        value = _complete(text)
    return _encodable(value) if isinstance(value, dict) else {}


def _encodable(value: Any) -> Any:
    """The same without halves of surrogate pairs, which an escape can spell and JSON's own encoding cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if LONE.search(value) else value
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return value


def _complete(text: str) -> Any:
    """The value of the longest beginning that brackets can be closed behind; None where there is none."""
    closers: list[str] = []
    inside = escaped = False
    ends: list[tuple[int, str]] = []  # where a member or an item has just ended, and what closes the rest
    for at, char in enumerate(text):
        if inside:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                inside = False
        elif char == '"':
            inside = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            ends.append((at + 1, "".join(reversed(closers))))
        elif char in "}]" and closers:
            closers.pop()
            ends.append((at + 1, "".join(reversed(closers))))
        elif char == ",":
            ends.append((at, "".join(reversed(closers))))
    whole = [(len(text), "".join(reversed(closers)))] if not inside else []
    for end, rest in [*whole, *reversed(ends[-ATTEMPTS:])]:
        try:
            return json.loads(text[:end] + rest)
        except ValueError:
            continue
    return None
