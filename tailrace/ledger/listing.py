"""Requests of the ledger by the page, and how many there were of each shape.

A page goes on behind the last row of the one before (keyset paging): what ended meanwhile moves nothing, and the last
page costs no more than the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from tailrace.ledger.record import Record
from tailrace.ledger.schema import REQUESTS
from tailrace.ledger.store import MICRO, Ledger
from tailrace.ledger.usage import Span

Order = Literal["ended", "e2e_us", "ttft_us", "tpot_us"]
"""What comes first: what ended last, or what took longest."""
POWERS = 22
"""Shapes are told apart by powers of two, up to 2^21 tokens and what is beyond."""
LEFT_OUT = ("detail",)
"""Columns that only one request's own page needs."""


class Which(msgspec.Struct, frozen=True):
    """Which requests: `exact` values of columns, ranges of tokens (first, and one beyond the last), and when they
    ended."""

    span: Span = Span()
    exact: dict[str, str] = {}
    prompt: tuple[int, int] | None = None
    output: tuple[int, int] | None = None

    def conditions(self) -> list[Any]:
        """For a query."""
        table = REQUESTS.c
        found: list[Any] = [table[name] == value for name, value in self.exact.items()]
        for column, within in ((table.prompt_tokens, self.prompt), (table.output_tokens, self.output)):
            if within is not None:
                found += [column >= within[0], column < within[1]]
        if self.span.since is not None:
            found.append(table.ended >= round(self.span.since * MICRO))
        if self.span.until is not None:
            found.append(table.ended < round(self.span.until * MICRO))
        return found


class Page(msgspec.Struct, frozen=True):
    """`rows`: columns of each request by name, but for `LEFT_OUT`. `after`: what the next page begins behind, None at
    the end. `total`: of all pages, counted for the first one only."""

    rows: list[dict[str, Any]]
    after: tuple[int, int] | None
    total: int | None


def page(ledger: Ledger, size: int, which: Which, order: Order = "ended", after: tuple[int, int] | None = None) -> Page:
    """So many requests, in descending order, behind `after` (the last one's value and number). Raises LedgerDown."""
    names = [field for field in Record.__struct_fields__ if field not in LEFT_OUT]
    key, seq = REQUESTS.c[order], REQUESTS.c.seq
    conditions = which.conditions()
    if order != "ended":
        conditions += [key.is_not(None), REQUESTS.c.outcome != "refused"]
    query = sa.select(seq, *(REQUESTS.c[name] for name in names)).where(*conditions)
    if after is not None:
        value, number = after
        query = query.where((key < value) | ((key == value) & (seq < number)))
    with ledger.transaction() as connection:
        found = connection.execute(query.order_by(key.desc(), seq.desc()).limit(size + 1)).all()
        total = None
        if after is None:
            total = int(
                connection.execute(sa.select(sa.func.count()).where(*conditions).select_from(REQUESTS)).scalar_one()
            )
    shown = found[:size]
    rows = [dict(zip(names, row[1:], strict=True)) for row in shown]
    behind = (int(rows[-1][order]), int(shown[-1][0])) if len(found) > size else None
    return Page(rows, behind, total)


class Cell(msgspec.Struct, frozen=True):
    """Requests of like shapes: prompts of [2^(prompt-1), 2^prompt) tokens, answers likewise; 0 is none. Means in
    seconds, None where nothing has one."""

    prompt: int
    output: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    e2e: float | None
    ttft: float | None
    judged: int
    met: int


def shapes(ledger: Ledger, which: Which) -> list[Cell]:
    """How many requests that the engine had there were of each shape. Raises LedgerDown."""
    table = REQUESTS.c
    bins = [_power(table.prompt_tokens).label("prompt"), _power(table.output_tokens).label("output")]
    judged = sa.func.coalesce(sa.func.sum(sa.case((table.slo_met.is_not(None), table.requests), else_=0)), 0)
    met = sa.func.coalesce(sa.func.sum(sa.case((table.slo_met == 1, table.requests), else_=0)), 0)
    sums = [
        sa.func.sum(table[name]) for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "e2e_us")
    ]
    query = sa.select(*bins, *sums, sa.func.avg(table.ttft_us), judged, met).where(
        *which.conditions(), table.outcome != "refused"
    )
    with ledger.transaction() as connection:
        rows: Sequence[Any] = connection.execute(query.group_by("prompt", "output")).all()
    return [
        Cell(
            int(prompt), int(output), int(count), int(ins), int(cached), int(outs), int(e2e) / MICRO / int(count),
            None if ttft is None else float(ttft) / MICRO, int(ok), int(good),
        )
        for prompt, output, count, ins, cached, outs, e2e, ttft, ok, good in rows
    ]  # fmt: skip


def _power(column: Any) -> Any:
    return sa.case(*((column < 2**power, power) for power in range(POWERS)), else_=POWERS)
