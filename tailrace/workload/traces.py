"""Sessions that were recorded: Mooncake's traces (shapes, times, and which blocks prompts share), ShareGPT's texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.kv.trace import lines
from tailrace.terms import InvalidInput
from tailrace.workload.session import Piece, Role, Session, Turn
from tailrace.workload.spec import Trace

CHARS_PER_TOKEN = 4
"""Of ordinary English in most tokenizers; what a recorded answer's length is planned with."""


def read(trace: Trace, seed: int) -> Iterator[Session]:
    """The sessions of a trace, in its order. Raises InvalidInput, with the place, where it is not as it should be."""
    if trace.format == "sharegpt":
        return _sharegpt(Path(trace.path), trace.turns)
    return _mooncake(trace, seed)


def _mooncake(trace: Trace, seed: int) -> Iterator[Session]:
    size = trace.block_tokens
    for number, line in enumerate(lines(Path(trace.path), size)):
        lengths = [size] * (len(line.hash_ids) - 1)
        lengths.append(line.input_length - sum(lengths))
        pieces = tuple(Piece(f"{seed}/block/{block}", n) for block, n in zip(line.hash_ids, lengths, strict=True))
        yield Session(number, (Turn(pieces, max(1, line.output_length)),), line.timestamp / 1000)


class _Said(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Talk(msgspec.Struct):
    conversations: list[_Said] = []


def _sharegpt(path: Path, most: int) -> Iterator[Session]:
    try:
        talks = msgspec.json.decode(path.read_bytes(), type=list[_Talk])
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", param="trace") from error
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{path} is no ShareGPT file: {error}", param="trace") from error
    made = filter(None, (_turns(talk, f"sharegpt/{place}", most) for place, talk in enumerate(talks)))
    empty = True
    for number, turns in enumerate(made):
        empty = False
        yield Session(number, turns)
    if empty:
        raise InvalidInput(f"{path} has no conversation in which a question is answered", param="trace")


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
