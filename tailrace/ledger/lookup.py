"""Requests of the ledger with what is known of them, and who was there at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from tailrace.ledger.record import Detail, Record
from tailrace.ledger.schema import BITS, REQUESTS, RUNS
from tailrace.ledger.store import MICRO, Ledger
from tailrace.ledger.usage import Span

MOST_AHEAD = 500
"""Requests that are looked at for who was before one."""


LONGEST = 900
"""Seconds; one that ran on for longer after the other's admission is not looked for."""


class Neighbour(msgspec.Struct, frozen=True):
    """Another request of the same server. Seconds; `overlap` of its run with the other's wait."""

    request: str
    key: str
    prompt_tokens: int
    output_tokens: int
    overlap: float
    ended: float  # since the other was received


class Story(msgspec.Struct, frozen=True):
    """All that the ledger knows of a request. `ahead`: who ran while it waited for the engine, longest first."""

    record: Record
    detail: Detail
    hardware: str
    ahead: list[Neighbour] = []


def find(ledger: Ledger, name: str) -> list[Story]:
    """The requests of an answer's id (one a choice), or of an x-request-id, latest first. Raises LedgerDown."""
    own = (REQUESTS.c.request == name) | (
        (REQUESTS.c.request >= f"{name}.")
        & (REQUESTS.c.request < f"{name}/")  # those of its choices: "." is before "/"
    )
    with ledger.transaction() as connection:
        query = sa.select(REQUESTS).limit(128)
        rows = connection.execute(query.where(own).order_by(REQUESTS.c.request)).all()
        if not rows:
            same = query.where(REQUESTS.c.http_request == name).order_by(REQUESTS.c.ended.desc())
            rows = connection.execute(same).all()
        return [_story(connection, row) for row in rows]


def slowest(ledger: Ledger, count: int, span: Span, *, by: str = "e2e_us") -> list[Story]:
    """The requests that took longest. `by`: "e2e_us", "ttft_us" or "tpot_us"."""
    column = REQUESTS.c[by]
    query = sa.select(REQUESTS).where(REQUESTS.c.outcome != "refused", column.is_not(None), *within(span))
    with ledger.transaction() as connection:
        rows = connection.execute(query.order_by(column.desc()).limit(count)).all()
        return [_story(connection, row) for row in rows]


def window(ledger: Ledger, count: int, span: Span) -> tuple[list[Record], int]:
    """The latest requests that ended within it, in the order in which they came, and how many there were in all."""
    chosen = sa.select(REQUESTS).where(REQUESTS.c.outcome != "refused", *within(span))
    with ledger.transaction() as connection:
        rows = connection.execute(chosen.order_by(REQUESTS.c.ended.desc()).limit(count)).all()
        total = connection.execute(sa.select(sa.func.count()).select_from(chosen.subquery())).scalar_one()
    return sorted((_record(row) for row in rows), key=lambda record: record.received), int(total)


def within(span: Span) -> list[Any]:
    """Conditions of a query for the rows of a span."""
    bounds = []
    if span.since is not None:
        bounds.append(REQUESTS.c.ended >= round(span.since * MICRO))
    if span.until is not None:
        bounds.append(REQUESTS.c.ended < round(span.until * MICRO))
    return bounds


def _record(row: Any) -> Record:
    return Record(*row[1:])


def _story(connection: sa.Connection, row: Any) -> Story:
    record = _record(row)
    run = row[0] >> BITS
    hardware = connection.execute(sa.select(RUNS.c.hardware).where(RUNS.c.id == run)).scalar() or ""
    detail = msgspec.json.decode(record.detail, type=Detail)
    return Story(record, detail, hardware, _ahead(connection, run, record))


def _ahead(connection: sa.Connection, run: int, record: Record) -> list[Neighbour]:
    """Who ran between its being handed to the engine and its admission, and was admitted before it."""
    begun = record.received + record.prepare_us
    until = record.ended if record.queued_us is None else record.received + record.queued_us
    if until - begun < 1000:
        return []
    table = REQUESTS.c
    query = (
        sa.select(table.request, table.key, table.prompt_tokens, table.output_tokens, table.received, table.queued_us,
                  table.ended)
        .where(table.seq >= run << BITS, table.seq < (run + 1) << BITS, table.ended > begun,
               table.ended < until + LONGEST * MICRO,
               table.queued_us.is_not(None), table.received + table.queued_us < until, table.request != record.request)
        .order_by(table.ended)
        .limit(MOST_AHEAD)
    )  # fmt: skip
    found = []
    for other in connection.execute(query).all():
        overlap = (min(other.ended, until) - max(other.received + other.queued_us, begun)) / MICRO
        ended = (other.ended - record.received) / MICRO
        if overlap > 0:
            found.append(Neighbour(other.request, other.key, other.prompt_tokens, other.output_tokens, overlap, ended))
    return sorted(found, key=lambda one: -one.overlap)


def phases(record: Record) -> Sequence[tuple[str, float]]:
    """Seconds of each phase, in the order in which they come; what took no time is left out but for `other`."""
    names = ("prepare", "queue", "kv_lookup", "kv_load", "prefill", "decode", "stall", "stream", "other")
    spent = [(name, getattr(record, f"{name}_us") / MICRO) for name in names]
    return [(name, seconds) for name, seconds in spent if seconds or name == "other"]
