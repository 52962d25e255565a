"""Traces of requests in the format that Mooncake published: JSON lines, read and checked.

A line has `timestamp` (milliseconds), `input_length` and `output_length` (tokens), and `hash_ids`, one number for each
block of the prompt (the last may be partial). Prompts that have a number in common are alike up to the end of its
block. How many tokens a block has follows from the lines: Mooncake's have 512, those of a ledger fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from tailrace.terms import InvalidInput

BLOCK_TOKENS = 512
"""Of Mooncake, and where the lines leave it open."""
SIZES = (512, 256, 128, 64, 32, 16, 1024, 2048, 4096)
"""Blocks that are looked for, the likeliest first."""

Count = Annotated[int, msgspec.Meta(ge=0)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Line(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Count
    hash_ids: list[BlockId]


def lines(path: Path, block: int) -> Iterator[Line]:
    """The lines of a file whose blocks have so many tokens. Raises InvalidInput, naming the line, where one is not as
    it should be."""
    decode = msgspec.json.Decoder(Line).decode
    last, number = 0.0, 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = decode(text)
                    _check(line, last, block)
                except (msgspec.DecodeError, ValueError) as error:
                    raise InvalidInput(f"{path}, line {number}: {error}", param="trace") from error
                last = line.timestamp
                yield line
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", param="trace") from error
    if not number:
        raise InvalidInput(f"{path} has no requests in it", param="trace")


def block_tokens(path: Path) -> int:
    """Tokens of a block: the first of `SIZES` that fits every line, read until only one is left. Where none fits,
    `BLOCK_TOKENS`, which `lines` then refuses with the line that is wrong."""
    decode = msgspec.json.Decoder(Line).decode
    left = list(SIZES)
    try:
        with path.open("rb") as file:
            for text in file:
                line = decode(text)
                left = [size for size in left if -(-line.input_length // size) == len(line.hash_ids)]
                if len(left) <= 1:
                    break
    except (OSError, msgspec.DecodeError):  # `lines` says it
        return BLOCK_TOKENS
    return left[0] if left else BLOCK_TOKENS


def _check(line: Line, last: float, block: int) -> None:
    """ValueError where a line contradicts itself or the one before it."""
    if line.timestamp < last:
        raise ValueError(f"the timestamp {line.timestamp:g} is before that of the line above ({last:g})")
    blocks = -(-line.input_length // block)
    if len(line.hash_ids) != blocks:
        raise ValueError(
            f"{line.input_length} tokens are {blocks} blocks of {block}, but there are {len(line.hash_ids)} hash_ids"
        )
