"""How the model's answers are taken apart: which formats it writes in, and the parser for one answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tailrace.api.params import unsupported
from tailrace.api.settings import Settings

if TYPE_CHECKING:
    from tailrace.api.tools import Tools
    from tailrace.text import Text
    from tailrace.text.answer.formats import ReasoningFormat, ToolFormat
    from tailrace.text.answer.parser import AnswerParser
    from tailrace.text.answer.reasoning import Opened

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_call_id(size: int = 24, prefix: str = "call_") -> str:
    """An id of a tool call; of the usual length it is unique for ever."""
    number = int.from_bytes(os.urandom(24))
    digits = []
    for _ in range(size):
        number, digit = divmod(number, len(LETTERS))
        digits.append(LETTERS[digit])
    return prefix + "".join(digits)


def call_ids(*, short: bool) -> Callable[[], str]:
    """Makes ids of tool calls; short ones for templates that take no others."""
    return partial(new_call_id, 9, "") if short else new_call_id


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are taken apart. `shown`: control tokens that their text needs."""

    reasoning: ReasoningFormat | None
    opened: Opened
    tools: ToolFormat | None
    names: frozenset[str]
    most: int | None
    shown: tuple[int, ...]

    @property
    def tags(self) -> list[str]:
        """What has to be seen of the text even where the tokenizer has control tokens for it."""
        return _tags(self.reasoning, self.tools)

    def parser(self) -> AnswerParser:
        """For one answer."""
        from tailrace.text.answer.parser import AnswerParser
        from tailrace.text.answer.reasoning import ReasoningParser
        from tailrace.text.answer.tools import ToolParser

        return AnswerParser(
            None if self.reasoning is None else ReasoningParser(self.reasoning, self.opened),
            None if self.tools is None else ToolParser(self.tools, self.names, self.most),
        )


def _tags(reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> list[str]:
    return [tag for form in (reasoning, tools) if form is not None for tag in form.tags]


class Answers:
    """The model's formats: those that the server was told, else those that its chat template shows."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def tools(self, text: Text, tools: Tools) -> ToolFormat | None:
        """The format of the calls that may come; None where none are offered. The template is looked at when it is
        first needed, for the ids of calls too, and beside everything else. Raises InvalidInput where tools are offered
        in vain."""
        if tools.offered is None:
            return None
        named = self._settings.tool_parser
        if named == "none":
            raise unsupported("tools", 'need tool_choice "none": this model is served without a tool parser')
        if not text.supports_tools:
            raise unsupported(
                "tools",
                'cannot be shown to this model: its chat template has none. Leave them out, or give tool_choice "none"',
            )
        form, _ = await asyncio.to_thread(lambda: (text.tool_format if named == "auto" else None, text.short_call_ids))
        if named != "auto":
            from tailrace.text.answer.formats import TOOL_FORMATS

            return TOOL_FORMATS[named]
        if form is None:
            raise unsupported(
                "tools",
                'need tool_choice "none": the chat template of this model shows no format of calls that is known here '
                "(the server's --tool-parser can name one)",
            )
        return form

    def reading(self, text: Text, prompt: list[int], tools: Tools, writes: ToolFormat | None) -> Reading | None:
        """How the answers to a prompt are taken apart; None where they are all text."""
        reasoning = self.reasoning(text)
        if reasoning is None and writes is None:
            return None
        from tailrace.text.answer.reasoning import Opened

        return Reading(
            reasoning,
            Opened.NO if reasoning is None else text.reasoning_opened(prompt, reasoning),
            writes,
            tools.names,
            None if tools.parallel else 1,
            tuple(text.control_tags(_tags(reasoning, writes)).values()),
        )

    def reasoning(self, text: Text) -> ReasoningFormat | None:
        """How the model marks its reasoning; None where it does not reason."""
        named = self._settings.reasoning_parser
        if named == "none":
            return None
        if named == "auto":
            return text.reasoning_format
        from tailrace.text.answer.formats import REASONING_FORMATS

        return REASONING_FORMATS[named]
