"""The ledger's tables, and how an older ledger becomes this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from tailrace.ledger.record import Record
from tailrace.terms import TailraceError

META = sa.MetaData()
HOUR = 3600
BITS = 32
"""A row's number is its run's, so many bits up, and its own within that: rows are stored in the order they come in."""

LEDGER = sa.Table(
    "tailrace_ledger",
    META,
    sa.Column("one", sa.Integer, primary_key=True),  # always 1: there is one row
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("kept_since", sa.BigInteger, nullable=False),  # microseconds; rows that ended before may be deleted
)
RUNS = sa.Table(
    "tailrace_runs",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("hardware", sa.Text, nullable=False),  # kernels and threads
    sa.Column("usd_per_hour", sa.Double),
    sa.Column("started", sa.BigInteger, nullable=False),  # microseconds
    sa.Column("seen", sa.BigInteger, nullable=False),  # and when it was last known to run
    sa.Column("written", sa.BigInteger, nullable=False),  # its last row's number: what comes again is known by it
    sa.Column("rows", sa.BigInteger, nullable=False),  # of it that are there
)


def _columns() -> list[sa.Column[Any]]:
    """A column for each field of a record."""
    kinds: dict[Any, type[Any]] = {str: sa.Text, int: sa.BigInteger, int | None: sa.BigInteger}
    fields = msgspec.structs.fields(Record)
    return [sa.Column(field.name, kinds[field.type], nullable=field.type == int | None) for field in fields]


REQUESTS = sa.Table(
    "tailrace_requests",
    META,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    *_columns(),
)
sa.Index("tailrace_requests_ended", REQUESTS.c.ended)
sa.Index("tailrace_requests_request", REQUESTS.c.request)

DIMENSIONS = ("key", "tenant", "model", "adapter", "endpoint", "workload")
SUMS = (
    "requests", "ok", "failed", "refused", "gone", "prompt_tokens", "cached_tokens", "output_tokens",
    "good_prompt_tokens", "good_output_tokens", "device_us", "device_prefill_us", "e2e_us", "queue_us", "ttft_us",
    "first_tokens", "judged", "met",
)  # fmt: skip
"""What is summed over the requests of an hour that have the same dimensions (`summed`)."""
USAGE = sa.Table(
    "tailrace_usage",
    META,
    sa.Column("hour", sa.BigInteger, primary_key=True),  # in which they ended: seconds since 1970
    *(sa.Column(name, sa.Text, primary_key=True) for name in DIMENSIONS),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in SUMS),
    sqlite_with_rowid=False,
)


def summed(record: Record) -> tuple[int, ...]:
    """What a record adds to each of `SUMS`."""
    requests, outcome, met = record.requests, record.outcome, record.slo_met
    good = met == 1
    return (
        requests,
        requests if outcome == "ok" else 0,
        requests if outcome == "failed" else 0,
        requests if outcome == "refused" else 0,
        requests if outcome == "gone" else 0,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        record.prompt_tokens if good else 0,
        record.output_tokens if good else 0,
        record.device_us,
        record.device_prefill_us,
        record.e2e_us,
        record.queue_us,
        record.ttft_us or 0,
        0 if record.ttft_us is None else 1,
        0 if met is None else requests,
        requests if good else 0,
    )


def sum_expressions() -> list[Any]:
    """The same in SQL, over rows."""
    table = REQUESTS.c
    one: Any = sa.literal_column("1")
    zero: Any = sa.literal_column("0")

    def when(condition: Any, value: Any) -> Any:
        return sa.case((condition, value), else_=zero)

    special: dict[str, Any] = {
        **{name: when(table.outcome == name, table.requests) for name in ("ok", "failed", "refused", "gone")},
        "good_prompt_tokens": when(table.slo_met == 1, table.prompt_tokens),
        "good_output_tokens": when(table.slo_met == 1, table.output_tokens),
        "ttft_us": sa.func.coalesce(table.ttft_us, zero),
        "first_tokens": when(table.ttft_us.is_not(None), one),
        "judged": when(table.slo_met.is_not(None), table.requests),
        "met": when(table.slo_met == 1, table.requests),
    }
    sums = {name: sa.func.sum(special[name] if name in special else table[name]) for name in SUMS}
    return [sa.cast(value, sa.BigInteger).label(name) for name, value in sums.items()]


class LaterVersion(TailraceError):
    """The ledger was made by a Tailrace that came after this one."""


def _first(connection: sa.Connection) -> None:
    META.create_all(connection)


MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (_first,)
"""Each makes of a ledger of the version that is its place the one after."""


def prepare(connection: sa.Connection, migrations: Sequence[Callable[[sa.Connection], None]] = MIGRATIONS) -> None:
    """Makes the tables, or brings them up to date, in the running transaction. Raises LaterVersion."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(7234981230)"))  # one server at a time
    there = sa.inspect(connection).has_table(LEDGER.name)
    version = connection.execute(sa.select(LEDGER.c.version)).scalar() if there else None
    found = int(version or 0)
    if found > len(migrations):
        raise LaterVersion(
            f"the ledger has version {found}, this Tailrace knows versions up to {len(migrations)}: use the later one"
        )
    for migrate in migrations[found:]:
        migrate(connection)
    if version is None:
        connection.execute(sa.insert(LEDGER).values(one=1, version=len(migrations), kept_since=0))
    elif found < len(migrations):
        connection.execute(sa.update(LEDGER).values(version=len(migrations)))
