"""The response object, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.api.answers import new_call_id
from tailrace.api.errors import HttpError
from tailrace.api.generation import Choice, Delta
from tailrace.api.responses.writer import Writer

if TYPE_CHECKING:
    from tailrace.text import TokenBytes

encode = msgspec.json.Encoder().encode
INCOMPLETE = {"reason": "max_output_tokens"}
ERRORS = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""OpenAI's codes of errors of a response, by the status that they would have had; any other is server_error."""


@dataclass
class ResponseShape:
    """`response`, and its events. `head` is what is known of it before the answer. A shape serves one answer."""

    head: dict[str, Any]
    table: TokenBytes
    call_id: Callable[[], str] = new_call_id
    logprobs: bool = False
    done: bytes = b""  # the last event says that it is the last
    _fed: bool = False
    _finish: str | None = None
    _ended: int = 0
    _writer: Writer = field(init=False)

    def __post_init__(self) -> None:
        self._writer = Writer(self.table, self.call_id, logprobs=self.logprobs)

    def opening(self, choice: Choice) -> bytes:
        """The response as it begins."""
        begun = {"response": self.state("in_progress")}
        return self._writer.event("response.created", begun) + self._writer.event("response.in_progress", begun)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events of a delta."""
        self._fed = True
        if delta.finish is not None:
            self._finish = delta.finish
        return self._writer.take(delta)

    def closing(self, fields: Mapping[str, Any]) -> bytes:
        """The event with the whole response."""
        kind = "response.incomplete" if self._finish == "length" else "response.completed"
        return self._writer.event(kind, {"response": self._final(fields)})

    def failure(self, error: HttpError) -> bytes:
        """The events that end a stream whose answer cannot be completed."""
        return self._writer.stop() + self._writer.event("response.failed", {"response": self.failed(error)})

    def whole(
        self, choices: Sequence[Choice], deltas: Sequence[tuple[Choice, Delta]], fields: Mapping[str, Any]
    ) -> bytes:
        """The response. What has been streamed is not taken twice."""
        if not self._fed:
            for choice, delta in deltas:
                self.chunk(choice, delta)
        return encode(self._final(fields))

    def _final(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        self._ended = self._ended or int(time.time())
        more = {name: value for name, value in fields.items() if name != "usage"}
        if self._finish == "length":
            return {**self.state("incomplete"), "incomplete_details": INCOMPLETE, **self._told(fields), **more}
        return {**self.state("completed"), "completed_at": self._ended, **self._told(fields), **more}

    def _told(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"output": self._writer.output, "usage": usage(fields["usage"])}

    def state(self, status: str) -> dict[str, Any]:
        """The response without an answer."""
        return {**self.head, "status": status}

    def failed(self, error: HttpError) -> dict[str, Any]:
        """The response of a request that failed, with what there was of its answer."""
        self._writer.stop()
        told = {"code": ERRORS.get(error.status, "server_error"), "message": str(error)}
        return {**self.state("failed"), "error": told, "output": self._writer.output}

    def cancelled(self) -> dict[str, Any]:
        """The response of a request whose client has left, or which was cancelled."""
        self._writer.stop()
        return {**self.state("cancelled"), "output": self._writer.output}


def usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Usage in the words of responses, from that of chat completions. Where reasoning is not told apart it is 0."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    reasoning = counts.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": counts["total_tokens"],
    }
