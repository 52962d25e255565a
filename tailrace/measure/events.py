"""A streamed answer, read as its bytes come: server-sent events, cut anywhere, down to what carries something."""

from __future__ import annotations

from typing import Any

import msgspec


class _Function(msgspec.Struct):
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timeline(msgspec.Struct):
    phases_ms: dict[str, float] = {}


class _Own(msgspec.Struct):
    timeline: _Timeline | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None
    tailrace: _Own | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Reader:
    """Reads one answer. `chunks` are the times at which pieces that carry something came, in the clock that `feed` was
    given; `text` is what they say, where that is kept."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self.chunks: list[float] = []
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.error: str | None = None
        self.malformed: str | None = None
        self.done = False
        self.phases: dict[str, float] = {}
        self.text: list[str] | None = [] if keep_text else None
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes, at: float) -> None:
        """Some more bytes of the body, which came at `at`."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                self._event(at)
            elif line.startswith(b"data:"):
                self._data.append(line[5:])

    def end(self, at: float) -> None:
        """The body is complete; a last event need not be followed by an empty line."""
        if self._rest:
            self.feed(b"\n", at)
        self._event(at)

    def _event(self, at: float) -> None:
        if not self._data:
            return
        data = b"\n".join(self._data).strip()
        self._data = []
        if data == b"[DONE]":
            self.done = True
        elif data:
            try:
                self._chunk(_decode(data), at)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.malformed = self.malformed or f"{error}: {data[:200].decode(errors='replace')}"

    def _chunk(self, chunk: _Chunk, at: float) -> None:
        if chunk.error is not None:
            self.error = message(chunk.error)
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.tailrace is not None and chunk.tailrace.timeline is not None:
            self.phases = {name: spent / 1000 for name, spent in chunk.tailrace.timeline.phases_ms.items()}
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason
            said = choice.text if choice.delta is None else choice.delta.content
            if said or (choice.delta is not None and _carries(choice.delta)):
                self.chunks.append(at)
                if self.text is not None and said:
                    self.text.append(said)


def _carries(delta: _Delta) -> bool:
    """Whether there is reasoning, or a part of a call's arguments."""
    if delta.reasoning_content or delta.reasoning:
        return True
    return any(call.function is not None and call.function.arguments for call in delta.tool_calls or ())


def message(error: Any) -> str:
    """The text of an error in OpenAI's shape, or of what stands in its place."""
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
