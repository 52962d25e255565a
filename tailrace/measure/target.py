"""A server under load: how a turn of a workload becomes a request to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec

from tailrace.workload import content
from tailrace.workload.session import Piece, Turn

Api = Literal["chat", "completions"]
Form = Literal["text", "ids"]

PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Fit(msgspec.Struct, frozen=True):
    """How words become tokens at a server, found by asking it: tokens = `offset` + `slope` x words."""

    slope: float = 1.0
    offset: float = 0.0

    def words(self, tokens: float) -> int:
        return max(1, round(tokens / self.slope))


class Target(msgspec.Struct, frozen=True):
    """`extra` are parameters that every request has, and wins over what is sent otherwise. `vocabulary`: token ids of
    prompts lie below it. `marked`: its streams end with [DONE]; where they do not, a finish reason is the end."""

    model: str
    api: Api = "chat"
    form: Form = "text"
    extra: dict[str, Any] = {}
    fit: Fit = Fit()
    vocabulary: int = 30_000
    marked: bool = True

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, turn: Turn, answers: Mapping[int, str]) -> bytes:
        """The JSON of a turn. `answers` has what the turns before it were answered, by their numbers."""
        made: dict[str, Any] = {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": turn.output,
        }  # fmt: skip
        if self.form == "ids":
            made["prompt"] = [token for piece in turn.pieces for token in _ids(piece, self.vocabulary)]
        else:
            said = self._said(turn, answers)
            if self.api == "completions":
                made["prompt"] = "\n".join(text for _, text in said)
            else:
                made["messages"] = [{"role": role, "content": text} for role, text in said]
        return msgspec.json.encode(made | self.extra)

    def _said(self, turn: Turn, answers: Mapping[int, str]) -> list[tuple[str, str]]:
        """Role and text; pieces of the same role that follow each other are one."""
        said: list[tuple[str, str]] = []
        last = len(turn.pieces) - 1
        for place, piece in enumerate(turn.pieces):
            text = answers.get(piece.answer_of) if piece.answer_of is not None else piece.text
            if not text:
                text = _words(piece, self.fit.words(piece.tokens - (self.fit.offset if place == last else 0.0)))
            if said and said[-1][0] == piece.role:
                said[-1] = (piece.role, f"{said[-1][1]} {text}")
            else:
                said.append((piece.role, text))
        return said


@lru_cache(128)
def _ids(piece: Piece, below: int) -> list[int]:
    return content.ids(piece, below)


@lru_cache(128)
def _words(piece: Piece, count: int) -> str:
    return content.words(piece, count)
