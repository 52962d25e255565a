"""What is in the ledger's database, and that it is there once."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from tailrace.ledger import schema
from tailrace.ledger.record import Record
from tailrace.ledger.schema import LEDGER, REQUESTS, RUNS, SUMS, USAGE
from tailrace.ledger.store import BadRows, Ledger, LedgerDown
from tailrace.terms import InvalidInput
from tests.ledger.rows import DAY, NOW, RUN, record


def rows(ledger: Ledger, table: sa.Table) -> list[dict[str, Any]]:
    with ledger.transaction() as connection:
        found = connection.execute(sa.select(table).order_by(*table.primary_key.columns))
        return [dict(row._mapping) for row in found]


def several(count: int, **values: Any) -> list[tuple[int, Record]]:
    return [(at + 1, record(f"r{at + 1}", ended=NOW + 7 * at, **values)) for at in range(count)]


def test_a_record_is_a_row(where: str) -> None:
    ledger = Ledger(where)
    assert ledger.write(RUN, [(1, record())], 0) == 1
    [row] = rows(ledger, REQUESTS)
    row.pop("seq")
    assert row == msgspec.structs.asdict(record())
    assert row["cost_nusd"] == 1_300_000_000 * 3.6 / 3.6 / 1000  # 1.3 s of device time at 3.6 USD an hour
    assert row["slo_met"] == 1
    ledger.close()


def test_what_comes_again_is_there_once(where: str) -> None:
    ledger = Ledger(where)
    batch = several(10)
    assert ledger.write(RUN, batch[:6], 0) == 6
    assert ledger.write(RUN, batch[:6], 0) == 0
    assert ledger.write(RUN, batch[4:], 0) == 4
    other = msgspec.structs.replace(RUN, name="run-2")
    assert ledger.write(other, batch[:2], 0) == 2
    assert len(rows(ledger, REQUESTS)) == 12
    assert sum(row["requests"] for row in rows(ledger, USAGE)) == 12
    assert [row["rows"] for row in rows(ledger, RUNS)] == [10, 2]
    ledger.close()


def test_the_sums_are_those_of_the_rows(where: str) -> None:
    ledger = Ledger(where)
    batch = several(20, usd=None)
    changed = [
        msgspec.structs.replace(one, key=f"k{at % 3}", workload="" if at % 2 else "w", outcome=outcome, slo_met=met)
        for at, ((_, one), outcome, met) in enumerate(
            zip(batch, ["ok", "failed", "gone", "refused"] * 5, [1, 0, None, 0] * 5, strict=True)
        )
    ]
    changed[3] = msgspec.structs.replace(changed[3], requests=17, ttft_us=None)
    ledger.write(RUN, [(at + 1, one) for at, one in enumerate(changed)], 0)
    before = rows(ledger, USAGE)
    assert sum(row["requests"] for row in before) == 36
    assert sum(row["refused"] for row in before) == 21
    assert sum(row["first_tokens"] for row in before) == 19
    assert ledger.rebuild() == len(before)
    assert rows(ledger, USAGE) == before
    for row in before:
        mine = [
            schema.summed(one) for one in changed
            if all(row[name] == getattr(one, name) for name in schema.DIMENSIONS)
            and row["hour"] == one.ended // 3_600_000_000 * 3600
        ]  # fmt: skip
        assert [row[name] for name in SUMS] == [sum(column) for column in zip(*mine, strict=True)]
    ledger.close()


def test_old_rows_go_and_their_sums_stay(where: str) -> None:
    ledger = Ledger(where)
    batch = [(at + 1, record(f"r{at}", ended=NOW + at * DAY)) for at in range(6)]
    ledger.write(RUN, batch, 0)
    before = rows(ledger, USAGE)
    assert ledger.prune(0, 0) == 0
    assert ledger.prune((NOW + 2 * DAY) * 1_000_000, 0) == 2
    assert ledger.prune((NOW + 2 * DAY) * 1_000_000, 3) == 1
    assert ledger.prune((NOW + 2 * DAY) * 1_000_000, 3) == 0
    assert [row["request"] for row in rows(ledger, REQUESTS)] == ["r3", "r4", "r5"]
    assert [row["rows"] for row in rows(ledger, RUNS)] == [3]
    ledger.rebuild()
    assert rows(ledger, USAGE) == before
    ledger.close()


def test_two_servers_write_one_ledger(where: str) -> None:
    first = Ledger(where)
    first.write(RUN, [], 0)
    first.close()

    def write(number: int) -> None:
        ledger = Ledger(where)
        run = msgspec.structs.replace(RUN, name=f"run-{number}")
        batch = [(at + 1, record(f"r{number}-{at}", key=f"k{at % 5}")) for at in range(100)]
        for at in range(0, 100, 10):
            ledger.write(run, batch[at : at + 10], 0)
        ledger.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    ledger = Ledger(where)
    assert sorted(row["requests"] for row in rows(ledger, USAGE)) == [60] * 5
    assert len(rows(ledger, REQUESTS)) == 300
    ledger.close()


def test_an_older_ledger_is_brought_up_to_date_and_a_later_one_left_alone(where: str) -> None:
    def second(connection: sa.Connection) -> None:
        connection.execute(sa.text("ALTER TABLE tailrace_runs ADD COLUMN more TEXT"))

    ledger = Ledger(where)
    ledger.write(RUN, [(1, record())], 0)
    with ledger.transaction() as connection:
        schema.prepare(connection, (*schema.MIGRATIONS, second))
        schema.prepare(connection, (*schema.MIGRATIONS, second))
        assert connection.execute(sa.select(LEDGER.c.version)).scalar_one() == 2
        assert connection.execute(sa.text("SELECT more FROM tailrace_runs")).all() == [(None,)]
    ledger.close()
    with pytest.raises(schema.LaterVersion, match="use the later one"):
        ledger.write(RUN, [(2, record())], 0)


def test_rows_that_no_database_takes_are_told_from_a_database_that_takes_none(where: str, tmp_path: Path) -> None:
    ledger = Ledger(where)
    with pytest.raises(BadRows):
        ledger.write(RUN, [(1, record(key=None))], 0)
    assert ledger.write(RUN, [(1, record())], 0) == 1
    ledger.close()
    (tmp_path / "none.db").write_bytes(b"no database" * 1000)
    with pytest.raises(LedgerDown, match="does not work"):
        Ledger(str(tmp_path / "none.db")).write(RUN, [], 0)
    with pytest.raises(LedgerDown, match="cannot be opened"):
        Ledger(str(tmp_path / "none.db" / "x.db")).write(RUN, [], 0)


def test_only_its_owner_may_read_the_file_and_reading_makes_none(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "l.db"))
    ledger.write(RUN, [(1, record())], 0)
    assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in tmp_path.iterdir())
    ledger.close()
    with pytest.raises(LedgerDown, match="there is no ledger"):
        rows(Ledger(str(tmp_path / "other.db"), read_only=True), RUNS)
    assert not (tmp_path / "other.db").exists()
    assert len(rows(Ledger(str(tmp_path / "l.db"), read_only=True), RUNS)) == 1


@pytest.mark.parametrize("given", ["", "sqlite://", "sqlite:///", "mysql://x/y", "postgresql://", "somewhere/"])
def test_a_place_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(InvalidInput, match="--ledger is a file"):
        Ledger(given)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(LedgerDown) as down:
        Ledger("postgresql://ada:secret@127.0.0.1:1/db").write(RUN, [], 0)
    assert "secret" not in str(down.value)
    assert "127.0.0.1" in str(down.value)
