"""Conversations in ShareGPT's format: a JSON array, read a conversation at a time, as far as somebody asks."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from tailrace.terms import InvalidInput
from tailrace.workload.session import Piece, Role, Session, Turn

CHARS_PER_TOKEN = 4
"""Of ordinary English in most tokenizers; what a recorded answer's length is planned with."""
READ_BYTES = 1 << 20
BETWEEN = " \t\r\n,"
NEAR_END = 16
"""Characters: an error so near to the end of what was read may be of what was not read yet."""


class _Said(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Talk(msgspec.Struct):
    conversations: list[_Said] = []


def sessions(path: Path, most: int) -> Iterator[Session]:
    """A session for each conversation that begins with a question and its answer: so many of these pairs at most. Where
    the file is cut off in the middle of a conversation, as copies of ShareGPT that go around are, those before it are
    taken. Raises InvalidInput where it cannot be read, is of another form, or has none."""
    made = filter(None, (_turns(talk, f"sharegpt/{place}", most) for place, talk in enumerate(_talks(path))))
    empty = True
    for number, turns in enumerate(made):
        empty = False
        yield Session(number, turns)
    if empty:
        raise InvalidInput(f"{path} has no conversation in which a question is answered", param="trace")


def _talks(path: Path) -> Iterator[_Talk]:
    try:
        for item in _items(path):
            yield msgspec.convert(item, _Talk)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", param="trace") from error
    except ValueError as error:  # of JSON, UTF-8, or another shape
        raise InvalidInput(f"{path} is no ShareGPT file: {error}", param="trace") from error


def _items(path: Path) -> Iterator[Any]:
    """The items of a JSON array, one after the other, of which never more than some are in memory. Ends where the file
    is cut off within an item. ValueError where it is no array."""
    decode = json.JSONDecoder().raw_decode
    with path.open("rb") as file:
        pieces = codecs.iterdecode(iter(lambda: file.read(READ_BYTES), b""), "utf-8", "replace")
        text, at, wanted = next(pieces, "").lstrip("\ufeff \t\r\n"), 1, 1
        if not text.startswith("["):
            raise ValueError("it does not begin with an array")
        while True:
            while text[at : at + 1] in BETWEEN and at < len(text):
                at += 1
            if text[at : at + 1] == "]":
                return
            try:
                item, at = decode(text, at)
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated") and error.pos < len(text) - NEAR_END:
                    raise
                more = "".join(islice(pieces, wanted))
                if not more:
                    return
                text, at, wanted = text[at:] + more, 0, 2 * wanted  # it is decoded anew from its beginning
            else:
                wanted = 1
                yield item


def _turns(talk: _Talk, source: str, most: int) -> tuple[Turn, ...]:
    """Pairs of a question and its answer, from the first question on; each carries those before it."""
    said = talk.conversations
    while said and said[0].speaker not in ("human", "user"):
        said = said[1:]
    turns: list[Turn] = []
    transcript: tuple[Piece, ...] = ()
    for place in range(0, min(len(said) - 1, 2 * most), 2):
        question, answer = said[place], said[place + 1]
        if question.speaker not in ("human", "user") or answer.speaker not in ("gpt", "assistant", "chatgpt"):
            break
        if not question.value.strip() or not answer.value.strip():
            break
        transcript = (*transcript, _piece(f"{source}/{place}", question.value, "user"))
        number, length = len(turns), estimate(answer.value)
        turns.append(Turn(transcript, length, (number - 1,) if turns else ()))
        transcript = (*transcript, Piece(f"{source}/{place}/answer", length, "assistant", answer_of=number))
    return tuple(turns)


def _piece(source: str, text: str, role: Role) -> Piece:
    return Piece(source, estimate(text), role, text)


def estimate(text: str) -> int:
    """About how many tokens a text is."""
    return max(1, math.ceil(len(text) / CHARS_PER_TOKEN))
