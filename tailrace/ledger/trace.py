"""Requests of the ledger as a trace that can be sent again: when they came, how long they were, what they shared.

The lines are Mooncake's (`kv.trace`), so that whatever reads these reads one's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
import sqlalchemy as sa

from tailrace.kv.trace import Line
from tailrace.ledger import fingerprints
from tailrace.ledger.fingerprints import BLOCK_TOKENS
from tailrace.ledger.lookup import within
from tailrace.ledger.record import Detail
from tailrace.ledger.schema import REQUESTS
from tailrace.ledger.store import Ledger
from tailrace.ledger.usage import Span
from tailrace.terms import InvalidInput

GENERATING = ("chat", "completions", "messages", "responses")
CHUNK = 1000


def lines(ledger: Ledger, span: Span, *, workload: str | None = None, tenant: str | None = None) -> Iterator[Line]:
    """A line for each request that was answered, or was being answered, in the order in which they came: blocks of
    `BLOCK_TOKENS`. Those that were refused are not in it, since nobody knows how long they were. Raises LedgerDown."""
    table = REQUESTS.c
    wanted = [table.endpoint.in_(GENERATING), table.outcome != "refused", table.prompt_tokens > 0, *within(span)]
    only = {table.workload: workload, table.tenant: tenant}
    wanted += [column == value for column, value in only.items() if value is not None]
    query = sa.select(table.received, table.prompt_tokens, table.output_tokens, table.detail).where(*wanted)
    numbers = _Numbers()
    first: int | None = None
    with ledger.transaction() as connection:
        rows = connection.execution_options(yield_per=CHUNK).execute(query.order_by(table.received, table.seq))
        for received, prompt, output, detail in rows:
            first = received if first is None else first
            known = _known(detail)
            ids = numbers.of(known, -(-prompt // BLOCK_TOKENS))
            yield Line((received - first) / 1000, prompt, output, ids)


def save(path: Path, requests: Iterable[Line]) -> int:
    """Writes them as JSON lines and says how many there are; the file is there when all of it is, and where there is
    any. Raises InvalidInput where it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    encode = msgspec.json.Encoder().encode
    written = 0
    try:
        with part.open("wb") as file:
            for line in requests:
                file.write(encode(line) + b"\n")
                written += 1
        if written:
            part.replace(path)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", param="out") from error
    finally:
        part.unlink(missing_ok=True)
    return written


class _Numbers:
    """A number for each different beginning of a prompt, counted from 0."""

    def __init__(self) -> None:
        self._next = count()
        self._seen: dict[tuple[int, int], int] = {}

    def of(self, prints: Sequence[int], blocks: int) -> list[int]:
        """The numbers of a prompt's blocks; each that has no fingerprint is like no other."""
        ids: list[int] = []
        before = -1
        for block in prints[:blocks]:
            found = self._seen.get((before, block))
            if found is None:
                found = self._seen[before, block] = next(self._next)
            ids.append(found)
            before = found
        return ids + [next(self._next) for _ in range(blocks - len(ids))]


def _known(detail: str) -> list[int]:
    with contextlib.suppress(msgspec.DecodeError, ValueError):
        return fingerprints.blocks(msgspec.json.decode(detail, type=Detail).prompt)
    return []
