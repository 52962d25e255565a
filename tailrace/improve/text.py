"""Real text to measure quality with: a file of the user's, or the Python language reference.

The latter is what `help()` shows, and comes with every interpreter, so nothing has to be fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.text import Text

CHARACTERS = 6
"""Most characters of an average token that are reckoned with."""
FEWEST = 16
"""Tokens of the shortest passage that tells anything."""


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of one text."""

    name: str
    ids: list[int]


def passages(text: Text, path: Path | None, *, tokens: int, count: int) -> list[Passage]:
    """Up to `count` passages of up to `tokens` tokens. A file is cut into that many, evenly over its length; without
    one they are the beginnings of topics of the Python language reference. Raises InvalidInput where there is no text
    to be had."""
    return _of_file(text, path, tokens, count) if path is not None else _of_reference(text, tokens, count)


def _of_file(text: Text, path: Path, tokens: int, count: int) -> list[Passage]:
    try:
        ids = text.encode(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--text {path} cannot be read as text: {error}", param="text") from error
    if len(ids) < FEWEST:
        raise InvalidInput(f"--text {path} has {len(ids)} tokens; at least {FEWEST} are needed", param="text")
    fitting = max(1, min(count, len(ids) // tokens))
    apart = len(ids) // fitting
    return [Passage(f"{path.name} at {at}", ids[at : at + tokens]) for at in range(0, fitting * apart, apart)]


def _of_reference(text: Text, tokens: int, count: int) -> list[Passage]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InvalidInput(
            "this Python has no language reference to measure with (pydoc_data); name a text: --text FILE", param="text"
        ) from error
    by_length = sorted(topics, key=lambda name: (-len(topics[name]), name))
    names = sorted(name for name in topics if len(topics[name]) > CHARACTERS * tokens)[:count] or by_length[:count]
    return [Passage(name, text.encode(topics[name])[:tokens]) for name in names]
