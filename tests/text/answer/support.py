"""Answers taken apart in tests: by format, whole or in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from tailrace.text.answer.formats import REASONING_FORMATS, TOOL_FORMATS
from tailrace.text.answer.parser import AnswerParser
from tailrace.text.answer.parts import Arguments, Call, Content, Part, Reasoning, merged
from tailrace.text.answer.reasoning import Opened, ReasoningParser
from tailrace.text.answer.tools import ToolParser

KNOWN = frozenset({"f", "get_weather", "größe"})


class Message(NamedTuple):
    """What is left of the parts: content, reasoning, and each call's name and arguments."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def parser(
    tools: str | None, reasoning: str | None = None, opened: Opened = Opened.NO, most: int | None = None
) -> AnswerParser:
    return AnswerParser(
        None if reasoning is None else ReasoningParser(REASONING_FORMATS[reasoning], opened),
        None if tools is None else ToolParser(TOOL_FORMATS[tools], KNOWN, most),
    )


def run(made: AnswerParser, pieces: Iterable[str]) -> list[Part]:
    """All parts, neighbours joined."""
    parts = [part for piece in pieces for part in made.push(piece)]
    return merged([*parts, *made.finish()])


def message(parts: Iterable[Part]) -> Message:
    """The message that a client puts together from the parts; fails where they come in an impossible order."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                assert not calls
                assert not content
                reasoning += text
            case Call(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return Message(content, reasoning, calls)


def cut(text: str, at: Iterable[int]) -> list[str]:
    """The text, cut at these places."""
    places = sorted({0, len(text), *(place for place in at if place <= len(text))})
    return [text[start:end] for start, end in itertools.pairwise(places)]
