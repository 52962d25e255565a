"""How much was used, by whom and what for: sums of the ledger.

Whole hours come from the sums that the writer keeps; what `since` or `until` cuts off an hour comes from the rows.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from tailrace.ledger import schema
from tailrace.ledger.schema import DIMENSIONS, HOUR, LEDGER, REQUESTS, RUNS, SUMS, USAGE
from tailrace.ledger.store import MICRO, Ledger
from tailrace.terms import InvalidInput

TIMES = {"day": 24 * HOUR, "hour": HOUR}
BY = (*DIMENSIONS, *TIMES)
"""What usage can be told apart by."""


class Span(msgspec.Struct, frozen=True):
    """Requests that ended within [since, until): seconds since 1970; None is no bound."""

    since: float | None = None
    until: float | None = None


ALWAYS = Span()


class Usage(msgspec.Struct, frozen=True):
    """One line: `group` has a value for each of what was asked by. Times are seconds."""

    group: dict[str, str]
    requests: int
    ok: int
    failed: int
    refused: int
    gone: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    good_prompt_tokens: int
    good_output_tokens: int
    device_seconds: float
    device_prefill_seconds: float
    e2e: float | None  # mean of the requests that the engine had
    queue: float | None
    ttft: float | None  # mean of those that got a token
    judged: int
    met: int


def check(by: list[str]) -> list[str]:
    """Raises InvalidInput where usage cannot be told apart by one of these."""
    for name in by:
        if name not in BY:
            raise InvalidInput(f"--by is any of {', '.join(BY)}, with commas between; not {name!r}", param="by")
    return by


def usage(ledger: Ledger, by: list[str], span: Span = ALWAYS) -> list[Usage]:
    """The sums, largest device time first; by time in its order where that comes first. Raises InvalidInput,
    LedgerDown."""
    check(by)
    with ledger.transaction() as connection:
        rows = _rows(connection, by, span)
    times = [at for at, name in enumerate(by) if name in TIMES]
    made = [_line(by, row) for row in rows]
    made.sort(key=lambda one: (tuple(one.group[by[at]] for at in times if at == 0), -one.device_seconds))
    return made


def _rows(connection: sa.Connection, by: list[str], span: Span) -> list[Any]:
    parts = _pieces(span, _kept_since(connection))
    selects = []
    for table, first, last in parts:
        at = USAGE.c.hour if table is USAGE else REQUESTS.c.ended // (MICRO * HOUR) * HOUR
        columns = [(at // TIMES[name] * TIMES[name] if name in TIMES else table.c[name]).label(name) for name in by]
        sums = (
            [sa.cast(sa.func.sum(USAGE.c[name]), sa.BigInteger).label(name) for name in SUMS]
            if table is USAGE
            else schema.sum_expressions()
        )
        moment, scale = (USAGE.c.hour, 1) if table is USAGE else (REQUESTS.c.ended, MICRO)
        query = sa.select(*columns, *sums)
        if first is not None:
            query = query.where(moment >= round(first * scale))
        if last is not None:
            query = query.where(moment < round(last * scale))
        selects.append(query.group_by(*columns) if columns else query)
    sums = [sa.cast(sa.func.sum(sa.literal_column(f'"{name}"')), sa.BigInteger).label(name) for name in SUMS]
    whole = sa.union_all(*selects).subquery()
    names = [whole.c[name] for name in by]
    query = sa.select(*names, *sums).select_from(whole)
    found = connection.execute(query.group_by(*names) if names else query).all()
    return [row for row in found if row.requests]


Piece = tuple[sa.Table, float | None, float | None]


def _pieces(span: Span, kept: float) -> list[Piece]:
    """Which table tells of which part of a span: rows where it begins or ends within an hour, or that hour's sum where
    its rows are not all there any more."""

    def within(begin: float, end: float) -> Piece:
        hour = begin // HOUR * HOUR
        return (REQUESTS, begin, end) if begin >= kept else (USAGE, hour, hour + HOUR)

    since, until = span.since, span.until
    first = since if since is None else -(-since // HOUR) * HOUR
    last = until if until is None else until // HOUR * HOUR
    if since is not None and until is not None and since // HOUR == until // HOUR:
        return [within(since, until)]
    pieces: list[Piece] = []
    if first is None or last is None or first < last:
        pieces.append((USAGE, first, last))
    if since is not None and first is not None and first != since:
        pieces.append(within(since, first))
    if until is not None and last is not None and last != until:
        pieces.append(within(last, until))
    return pieces


def _kept_since(connection: sa.Connection) -> float:
    return int(connection.execute(sa.select(LEDGER.c.kept_since)).scalar_one()) / MICRO


def _line(by: list[str], row: Any) -> Usage:
    import datetime

    def shown(name: str) -> str:
        value = getattr(row, name)
        if name not in TIMES:
            return str(value)
        at = datetime.datetime.fromtimestamp(value, datetime.UTC)
        return at.strftime("%Y-%m-%d" if name == "day" else "%Y-%m-%d %H:00")

    had = row.requests - row.refused
    plain = ("requests", "ok", "failed", "refused", "gone", "prompt_tokens", "cached_tokens", "output_tokens",
             "good_prompt_tokens", "good_output_tokens", "judged", "met")  # fmt: skip
    return Usage(
        group={name: shown(name) for name in by},
        **{name: int(getattr(row, name)) for name in plain},
        device_seconds=row.device_us / MICRO,
        device_prefill_seconds=row.device_prefill_us / MICRO,
        e2e=row.e2e_us / MICRO / had if had else None,
        queue=row.queue_us / MICRO / had if had else None,
        ttft=row.ttft_us / MICRO / row.first_tokens if row.first_tokens else None,
    )


class Paid(msgspec.Struct, frozen=True):
    """Servers, and the seconds for which they ran, within a span."""

    servers: int
    seconds: float
    usd: float | None  # for that, where each one's price an hour is known
    models: list[str]


def paid(ledger: Ledger, span: Span = ALWAYS, usd_per_hour: float | None = None) -> Paid:
    """What was paid for: the wall-clock time of every server that ran. `usd_per_hour` stands for what the ledger knows
    of each. Raises LedgerDown."""
    since = (span.since or 0.0) * MICRO
    until = span.until * MICRO if span.until is not None else float("inf")
    wanted = sa.select(RUNS.c.started, RUNS.c.seen, RUNS.c.usd_per_hour, RUNS.c.model)
    with ledger.transaction() as connection:
        runs = connection.execute(wanted.where(RUNS.c.seen > since)).all()
    seconds, usd, servers, known, models = 0.0, 0.0, 0, True, set()
    for started, seen, price, model in runs:
        ran = (min(seen, until) - max(started, since)) / MICRO
        if ran <= 0:
            continue
        servers += 1
        seconds += ran
        models.add(str(model))
        price = price if usd_per_hour is None else usd_per_hour
        known = known and price is not None
        usd += ran / 3600 * (price or 0.0)
    return Paid(servers, seconds, usd if known and servers else None, sorted(models))
