"""An answer, as it comes, as output items and as the events that tell of them.

The items of a stream and of a whole answer are the same, since both come out of this one state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.api.generation import Delta
from tailrace.api.logprobs import chat_content
from tailrace.api.responses.items import Item, new_id
from tailrace.text.answer.parts import Arguments, Call, Content, Part, Reasoning

if TYPE_CHECKING:
    from tailrace.text import TokenBytes

encode = msgspec.json.Encoder().encode
NO_ROWS = b',"logprobs":[]'
PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class Writer:
    """One answer. `take` every delta in order; `output` is what has become of them."""

    def __init__(self, table: TokenBytes, call_id: Callable[[], str], *, logprobs: bool) -> None:
        """`logprobs`: text is told with the log-probabilities of its tokens."""
        self.output: list[Item] = []
        self._table = table
        self._call_id = call_id
        self._logprobs = logprobs
        self._sequence = 0
        self._open: Item | None = None
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._rows: list[dict[str, Any]] = []  # log-probabilities of the open text
        self._pending: list[dict[str, Any]] = []  # and of tokens whose text has not come yet
        self._delta_head = b""
        self._plain = False  # a text is open, and nothing but the text of its deltas is told

    # Events

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """A server-sent event with the next sequence number."""
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def take(self, delta: Delta) -> bytes:
        """The events of a delta; empty where it shows nothing."""
        if self._plain and delta.finish is None and not delta.parts:  # most of all deltas are more of a text
            return self._more("", delta.text, NO_ROWS) if delta.text else b""
        parts: Sequence[Part] = delta.parts or ([Content(delta.text)] if delta.text else ())
        if self._logprobs and delta.tokens:
            self._pending += chat_content(self._table, delta.tokens, delta.logprobs)
        data = b"".join([self._part(part) for part in parts])
        if delta.finish is not None:
            data += self._finish(delta.finish)
        return data

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._text("message", text)
            case Reasoning(text):
                return self._text("reasoning", text)
            case Call(_, name):
                self._pending = []
                data = self._close("completed")
                item = {"id": new_id("fc_"), "type": "function_call", "status": "in_progress", "name": name}
                return data + self._begin({**item, "call_id": self._call_id(), "arguments": ""})
            case Arguments(_, text):
                self._pending = []
                return self._more("response.function_call_arguments.delta", text)

    def _text(self, kind: str, text: str) -> bytes:
        data = b""
        if self._open is None or self._open["type"] != kind:
            data = self._close("completed") + self._begin_text(kind)
        if kind == "reasoning":
            self._pending = []
            return data + self._more("response.reasoning_text.delta", text)
        rows, self._pending = self._pending, []
        self._rows += rows
        shown = [{name: row[name] for name in ("token", "logprob", "top_logprobs")} for row in rows]
        data += self._more("response.output_text.delta", text, b',"logprobs":' + encode(shown))
        self._plain = not self._logprobs
        return data

    # Items

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output)}

    def _begin(self, item: Item) -> bytes:
        self._open, self._pieces, self._rows, self._delta_head = item, [], [], b""
        return self.event("response.output_item.added", {"output_index": len(self.output), "item": item})

    def _begin_text(self, kind: str) -> bytes:
        item: Item
        if kind == "message":
            item = {"id": new_id("msg_"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs_"), "type": kind, "status": "in_progress", "summary": [], "content": []}
        data = self._begin(item)
        part = self._whole_part("", [])
        return data + self.event("response.content_part.added", {**self._place, "content_index": 0, "part": part})

    def _whole_part(self, text: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._open is not None
        kind = PART_TYPES[self._open["type"]]
        part: dict[str, Any] = {"type": kind, "text": text}
        return {**part, "annotations": [], "logprobs": rows} if kind == "output_text" else part

    def _more(self, kind: str, text: str, tail: bytes = b"") -> bytes:
        """A delta's event, of the kind that the open item's first one had. What is the same for all is encoded once."""
        if not self._delta_head:
            assert self._open is not None
            place = self._place if self._open["type"] == "function_call" else {**self._place, "content_index": 0}
            head = b"event: " + kind.encode() + b'\ndata: {"type":"' + kind.encode() + b'",' + encode(place)[1:-1]
            self._delta_head = head + b',"sequence_number":'
        self._pieces.append(text)
        number = self._sequence
        self._sequence = number + 1
        return b'%b%d,"delta":%b%b}\n\n' % (self._delta_head, number, encode(text), tail)

    def _close(self, status: str) -> bytes:
        """The end of the open item, if there is one."""
        item, self._plain = self._open, False
        if item is None:
            return b""
        text = "".join(self._pieces)
        place = self._place
        if item["type"] == "function_call":
            item = {**item, "status": status, "arguments": text}
            data = self.event(
                "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": text}
            )
        else:
            part = self._whole_part(text, self._rows)
            place = {**place, "content_index": 0}
            kind = "response.output_text.done" if item["type"] == "message" else "response.reasoning_text.done"
            more = {"logprobs": self._rows} if item["type"] == "message" else {}
            data = self.event(kind, {**place, "text": text, **more})
            data += self.event("response.content_part.done", {**place, "part": part})
            item = {**item, "status": status, "content": [part]}
        data += self.event("response.output_item.done", {"output_index": len(self.output), "item": item})
        self.output.append(item)
        self._open = None
        return data

    def _finish(self, finish: str) -> bytes:
        """The end of the answer. One that says nothing is an empty message."""
        data = b""
        if self._open is None and not self.output:
            data = self._begin_text("message")
        if self._open is not None and self._open["type"] == "message":
            self._rows += self._pending
        return data + self._close("incomplete" if finish == "length" else "completed")

    def stop(self) -> bytes:
        """The answer was cut off: what is open is an item that is not complete."""
        return self._close("incomplete")
