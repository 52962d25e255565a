"""Sessions that were recorded: traces in Mooncake's format (shapes, times, what prompts share), and ShareGPT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tailrace.kv.trace import block_tokens, lines
from tailrace.workload import sharegpt
from tailrace.workload.session import Piece, Session, Turn
from tailrace.workload.spec import Trace


def read(trace: Trace, seed: int) -> Iterator[Session]:
    """The sessions of a trace, in its order. Raises InvalidInput, with the place, where it is not as it should be."""
    if trace.format == "sharegpt":
        return sharegpt.sessions(Path(trace.path), trace.turns)
    return _mooncake(trace, seed)


def _mooncake(trace: Trace, seed: int) -> Iterator[Session]:
    path = Path(trace.path)
    size = trace.block_tokens or block_tokens(path)
    for number, line in enumerate(lines(path, size)):
        lengths = [size] * (len(line.hash_ids) - 1)
        lengths.append(line.input_length - sum(lengths))
        pieces = tuple(Piece(f"{seed}/block/{block}", n) for block, n in zip(line.hash_ids, lengths, strict=True))
        yield Session(number, (Turn(pieces, max(1, line.output_length)),), line.timestamp / 1000)
