"""The definitions: what is measured of one request. All in seconds; None where a metric is not defined.

What a server shows first and carries nothing (a role, an empty piece) is no token, and pieces are not taken for tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tailrace.measure.record import Outcome, Record

ALONE = 0.95
"""Share of the tokens that must come alone."""


def origin(record: Record) -> float | None:
    """When waiting began: due in an open loop, sent in a closed one."""
    return record.due if record.due is not None else record.sent


def ttft(record: Record) -> float | None:
    """The first piece that carries text, reasoning or tool arguments, minus the time at which it was due or sent."""
    begin = origin(record)
    return record.chunks[0] - begin if record.chunks and begin is not None else None


def e2e(record: Record) -> float | None:
    """The last token minus due or sent. Of complete answers only: another has no last token."""
    begin = origin(record)
    if record.outcome is not Outcome.OK or not record.chunks or begin is None:
        return None
    return record.chunks[-1] - begin


def tpot(record: Record) -> float | None:
    """(Last token - first visible one) / tokens after that one; not defined where there are none, or no usage."""
    if record.outcome is not Outcome.OK or not record.chunks or (record.output_tokens or 0) < 2:
        return None
    assert record.output_tokens is not None
    return (record.chunks[-1] - record.chunks[0]) / (record.output_tokens - 1)


def gaps(record: Record) -> list[float]:
    """Chunk gaps: between consecutive pieces, however many tokens each has."""
    return [after - before for before, after in pairwise(record.chunks)]


def by_token(records: Sequence[Record]) -> bool:
    """Whether pieces were tokens, so that chunk gaps are those between tokens: 95 of 100 tokens came as a piece of
    their own. (The others may have shown nothing: an end of text, a part of a character.)"""
    counted = [record for record in records if record.output_tokens is not None]
    tokens, pieces = sum(record.output_tokens or 0 for record in counted), sum(len(record.chunks) for record in counted)
    return bool(tokens) and ALONE * tokens <= pieces + 1 and pieces <= tokens


def dispatch_delay(record: Record) -> float | None:
    """How late the client was: written minus due, less the wait for a connection, which is the server's to give."""
    if record.due is None or record.sent is None:
        return None
    return max(0.0, record.sent - record.due - record.connecting)
