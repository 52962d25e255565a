"""Requests by the page and by shape, in both kinds of database."""

from __future__ import annotations

import random
from typing import Any

from tailrace.ledger import listing
from tailrace.ledger.listing import Which
from tailrace.ledger.store import Ledger
from tailrace.ledger.usage import Span
from tests.ledger.rows import NOW, RUN, record


def filled(where: str, count: int, **values: Any) -> tuple[Ledger, list[Any]]:
    """A ledger with requests of many shapes, several of which ended at the same microsecond."""
    draw = random.Random(5)
    rows = [
        record(
            f"r{at}",
            ended=NOW + at // 4,
            prompt_tokens=draw.choice([0, 1, 2, 3, 31, 32, 5000, 3_000_000]),
            output_tokens=draw.choice([0, 1, 7, 8, 900]),
            tpot_us=draw.choice([None, 1000, 1000, 2000]),
            workload=draw.choice(["a", "b"]),
            **values,
        )
        for at in range(count)
    ]
    ledger = Ledger(where)
    ledger.write(RUN, list(enumerate(rows, 1)), 0)
    return ledger, rows


def every(ledger: Ledger, size: int, which: Which, order: listing.Order) -> list[str]:
    names: list[str] = []
    after = None
    while True:
        page = listing.page(ledger, size, which, order, after)
        names += [row["request"] for row in page.rows]
        after = page.after
        if after is None:
            return names


def test_pages_have_each_request_once_and_in_order_also_where_many_are_alike(where: str) -> None:
    ledger, rows = filled(where, 50)
    names = every(ledger, 7, Which(), "ended")
    assert names == [f"r{at}" for at in reversed(range(50))]
    known = [row for row in rows if row.tpot_us is not None]
    slow = every(ledger, 7, Which(), "tpot_us")
    assert sorted(slow) == sorted(row.request for row in known)
    by_name = {row.request: row.tpot_us for row in rows}
    assert [by_name[name] for name in slow] == sorted((row.tpot_us for row in known), reverse=True)
    ledger.close()


def test_what_ends_meanwhile_moves_no_page(where: str) -> None:
    ledger, _ = filled(where, 20)
    first = listing.page(ledger, 10, Which())
    ledger.write(RUN, [(21, record("later", ended=NOW + 100))], 0)
    second = listing.page(ledger, 10, Which(), after=first.after)
    assert [row["request"] for row in second.rows] == [f"r{at}" for at in reversed(range(10))]
    assert second.after is None
    ledger.close()


def test_a_list_is_narrowed_by_time_names_and_tokens(where: str) -> None:
    ledger, rows = filled(where, 40)
    span = Span(NOW + 2, NOW + 5)
    wanted = [
        row for row in rows if row.workload == "a" and row.prompt_tokens < 32 and NOW + 2 <= row.ended / 1e6 < NOW + 5
    ]
    page = listing.page(ledger, 40, Which(span, {"workload": "a"}, prompt=(0, 32)))
    assert [row["request"] for row in page.rows] == [row.request for row in reversed(wanted)]
    assert page.total == len(wanted) > 0
    ledger.close()


def test_shapes_are_powers_of_two_and_miss_nobody(where: str) -> None:
    ledger, rows = filled(where, 60)
    cells = {(cell.prompt, cell.output): cell for cell in listing.shapes(ledger, Which())}
    assert sum(cell.requests for cell in cells.values()) == 60
    for row in rows:
        power = min(row.prompt_tokens.bit_length(), listing.POWERS), row.output_tokens.bit_length()
        cell = cells[power]
        same = [
            one
            for one in rows
            if (min(one.prompt_tokens.bit_length(), listing.POWERS), one.output_tokens.bit_length()) == power
        ]
        assert (cell.requests, cell.output_tokens) == (len(same), sum(one.output_tokens for one in same))
        assert cell.e2e is not None
        assert abs(cell.e2e - sum(one.e2e_us for one in same) / len(same) / 1e6) < 1e-6
    ledger.close()
