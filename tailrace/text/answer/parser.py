"""Reasoning first, then tool calls in what follows it."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.text.answer.parts import Content, Part, merged
from tailrace.text.answer.reasoning import ReasoningParser
from tailrace.text.answer.tools import ToolParser


class AnswerParser:
    """Takes an answer's text in pieces and gives its parts. Their sequence (neighbours joined, see `parts.merged`)
    depends on the text alone, not on the pieces."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart."""
        return self._reasoning is not None

    @property
    def reasoning(self) -> bool:
        """Whether reasoning goes on."""
        return self._reasoning is not None and self._reasoning.inside

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._tools is None else self._tools.calls

    def push(self, text: str) -> list[Part]:
        """The next piece; what is certain of it."""
        parts: list[Part] = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return merged(self._called(parts))

    def finish(self) -> list[Part]:
        """The end of the answer; whatever was held back."""
        parts = self._called([] if self._reasoning is None else self._reasoning.finish())
        return merged(parts if self._tools is None else [*parts, *self._tools.finish()])

    def _called(self, parts: Iterable[Part]) -> list[Part]:
        if self._tools is None:
            return list(parts)
        found: list[Part] = []
        for part in parts:
            found += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return found
