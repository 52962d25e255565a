"""What the commands that read a ledger have in common: where it is, and from when to when."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.ledger.store import Ledger
    from tailrace.ledger.usage import Span

Place = Annotated[
    str | None,
    typer.Option("--ledger", metavar="PLACE", help="A file or postgresql://... Default: where `serve` writes it."),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Requests that ended since: 24h, 7d, 30m ago, or 2026-11-30, or with 14:30."),
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="And before: likewise.")]
By = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="key, tenant, model, adapter, endpoint, workload, day, hour; several with commas; empty for all together.",
    ),
]
WIDE = 240
"""Columns of a table that goes to a file or a program."""
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "s": 1.0}


def opened(given: str | None, *, read_only: bool = True) -> Ledger:
    """The ledger that is meant. Raises InvalidInput."""
    from tailrace.ledger.store import Ledger

    return Ledger(place_of(given), read_only=read_only, patient=True)


def place_of(given: str | None) -> str:
    """Where it is: what is said, else where `serve` writes it. Raises InvalidInput where none is kept."""
    from tailrace.ledger import place

    meant = place.default() if given is None else given
    if meant == place.OFF:
        raise InvalidInput("no ledger is kept where nothing is said: name one with --ledger", param="ledger")
    return meant


def span(since: str | None, until: str | None) -> Span:
    """From when to when. Raises InvalidInput."""
    from tailrace.ledger.usage import Span

    first = None if since is None else moment(since, "--since")
    last = None if until is None else moment(until, "--until")
    if first is not None and last is not None and first >= last:
        raise InvalidInput("--since is not before --until", param="since")
    return Span(first, last)


def names(by: str) -> list[str]:
    """What sums are to be told apart by. Raises InvalidInput."""
    from tailrace.ledger import usage

    return usage.check([name.strip() for name in by.split(",") if name.strip()])


def seconds(text: str, flag: str) -> float:
    """Of "90s", "30m", "24h" or "7d". Raises InvalidInput."""
    number, unit = text[:-1], text[-1:]
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if unit not in UNITS or not 0 < value < 1e6:
        raise InvalidInput(f"{flag} is a time such as 30m, 24h or 7d, not {text}", param=flag.removeprefix("--"))
    return value * UNITS[unit]


def moment(text: str, flag: str) -> float:
    """Seconds since 1970: so long ago, or a date (and time) here. Raises InvalidInput."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return time.time() - seconds(text, flag)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> None:
    """Prints a table; the first `left` columns are words, the rest numbers."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for at, head in enumerate(heads):
        made.add_column(head, justify="left" if at < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    console.print(made)


def rows_as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """CSV with a head."""
    import csv
    import io

    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def as_json(value: object) -> str:
    """JSON for programs."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def only_one(*given: bool) -> None:
    """Raises InvalidInput where two ways to print are asked for."""
    if sum(given) > 1:
        raise InvalidInput("--json and --csv: choose one", param="csv")
