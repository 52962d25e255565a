"""The parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote while it reasoned."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call begins: its number in this answer, from 0, and the tool's name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON text, as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | Call | Arguments


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbours of one kind joined, and empty pieces left out (an empty piece of arguments too)."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if not isinstance(part, Call) and not part.text:
            continue
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments) and part.index == last.index:
            joined[-1] = Arguments(last.index, last.text + part.text)
        else:
            joined.append(part)
    return joined
