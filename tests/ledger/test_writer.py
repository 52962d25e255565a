"""Whatever happens to the database, the disk and the process, what was handed over is in the ledger once."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tailrace.ledger.record import Record, Refusal
from tailrace.ledger.run import Run
from tailrace.ledger.schema import REQUESTS, USAGE
from tailrace.ledger.spool import Spool, SpoolFull, left_behind
from tailrace.ledger.store import Ledger
from tailrace.ledger.writer import Writer
from tests import postgres
from tests.ledger.rows import RUN, note, record, timeline, until

ROOT = Path(__file__).parents[2]


def writer(where: str, spool: Path, **options: Any) -> Writer:
    made = Writer(lambda: Ledger(where), options.pop("run", RUN), spool, first_retry=0.05, **options)
    made.start()
    return made


def names(where: str) -> list[str]:
    ledger = Ledger(where)
    with ledger.transaction() as connection:
        found = [str(name) for name in connection.execute(sa.select(REQUESTS.c.request)).scalars()]
    ledger.close()
    return sorted(found)


def test_what_is_handed_over_is_written(where: str, tmp_path: Path) -> None:
    one = writer(where, tmp_path / "spool")
    for at in range(2500):
        one.add(timeline(f"r{at}", output=1), note())
    until(lambda: one.written == 2500, "the rows")
    one.add(timeline("last"), note())
    one.close()
    assert one.numbers() == {"rows": 2501, "dropped": 0, "failures": 0, "waiting": 0}
    assert names(where) == sorted([*(f"r{at}" for at in range(2500)), "last"])
    assert not list((tmp_path / "spool").glob("*.spool"))


def test_refusals_that_are_alike_are_one_row(where: str, tmp_path: Path) -> None:
    one = writer(where, tmp_path / "spool")
    for at in range(100):
        one.refused(Refusal(note(http_request=f"h{at}"), 429 if at % 4 else 400, "code", 0.001))
    one.close()
    ledger = Ledger(where)
    with ledger.transaction() as connection:
        found = connection.execute(
            sa.select(REQUESTS.c.request, REQUESTS.c.status, REQUESTS.c.requests, REQUESTS.c.slo_met)
        ).all()
        sums = connection.execute(sa.select(USAGE.c.requests, USAGE.c.refused, USAGE.c.judged, USAGE.c.met)).one()
    ledger.close()
    assert sorted(map(tuple, found)) == [("h0", 400, 25, None), ("h1", 429, 75, 0)]
    assert tuple(sums) == (100, 100, 75, 0)


def test_while_the_database_is_away_everything_waits_on_disk(postgresql: postgres.Server, tmp_path: Path) -> None:
    told: list[str] = []
    one = writer(postgresql.url, tmp_path / "spool", report=told.append)
    one.add(timeline("before"), note())
    until(lambda: one.written == 1, "the first row")
    postgresql.stop()
    try:
        for at in range(50):
            one.add(timeline(f"away-{at}", output=1), note())
        until(lambda: one.failures >= 2 and not one._queue, "the database to be missed")
        [file] = (tmp_path / "spool").glob("*.spool")
        assert file.stat().st_size > 50 * 100
        one.add(timeline("later"), note())
    finally:
        postgresql.start()
    until(lambda: one.written == 52, "everything")
    one.close()
    assert names(postgresql.url) == sorted(["before", "later", *(f"away-{at}" for at in range(50))])
    assert len(told) == 2  # once that it is away, once that it is back
    assert "is written again" in told[1]
    assert one.dropped == 0


def test_a_locked_database_is_waited_for(tmp_path: Path) -> None:
    where = str(tmp_path / "ledger.db")
    one = writer(where, tmp_path / "spool")
    one.add(timeline("a"), note())
    until(lambda: one.written == 1, "the first row")
    other = sqlite3.connect(where, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    one.add(timeline("b"), note())
    until(lambda: one.failures, "the lock to be noticed")
    other.execute("COMMIT")
    other.close()
    until(lambda: one.written == 2, "the second row")
    one.close()


class Full(Ledger):
    """A database on a full disk, while `full` is set."""

    def __init__(self, where: str, full: threading.Event) -> None:
        super().__init__(where)
        self._is_full = full

    def write(self, run: Run, rows: Any, now: int) -> int:
        if self._is_full.is_set():
            with self.transaction() as connection:
                connection.exec_driver_sql("PRAGMA max_page_count = 1")
        with self.transaction() as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {40 if self._is_full.is_set() else 1 << 20}")
        return super().write(run, rows, now)


def test_on_a_full_disk_as_much_is_held_as_was_promised_and_the_rest_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, told = threading.Event(), list[str]()
    where = str(tmp_path / "ledger.db")
    real = os.write

    def write(file: int, data: bytes) -> int:
        if full.is_set() and ".spool" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    one = Writer(
        lambda: Full(where, full), RUN, tmp_path / "spool", report=told.append, most_held=200, first_retry=0.05
    )
    one.start()
    one.add(timeline("before"), note())
    until(lambda: one.written == 1, "the first row")
    full.set()
    for at in range(100):
        one.add(timeline(f"full-{at}", output=1), note(workload="w" * 64, http_request="h" * 3000))
    until(lambda: one.failures >= 2 and not one._queue, "the disk to be full")
    for at in range(150):
        one.add(timeline(f"more-{at}", output=1), note())
    assert one.dropped == 50
    until(lambda: not one._queue, "them to be taken in")
    assert one.numbers()["waiting"] == 200
    full.clear()
    until(lambda: one.written == 201, "what was held")
    one.close()
    assert names(where) == sorted(
        ["before", *(f"full-{at}" for at in range(100)), *(f"more-{at}" for at in range(100))]
    )
    assert any("No space left" in line for line in told)


def test_one_row_that_no_database_takes_keeps_no_other_out(where: str, tmp_path: Path) -> None:
    one = writer(where, tmp_path / "spool")
    for at in range(20):
        one.add(timeline(f"r{at}", output=1), note(key=None if at == 7 else "ada"))
    until(lambda: one.written + one.dropped == 20, "the rows")
    one.close()
    assert one.dropped == 1
    assert names(where) == sorted(f"r{at}" for at in range(20) if at != 7)


KILLED = """
import itertools, sys, time
from pathlib import Path
from tailrace.ledger.run import Run
from tailrace.ledger.store import Ledger
from tailrace.ledger.writer import Writer
from tests.ledger.rows import note, timeline
where, spool, name = sys.argv[1:]
writer = Writer(lambda: Ledger(where), Run(name, 1), Path(spool), first_retry=0.05)
writer.start()
for at in itertools.count():
    writer.add(timeline(f"{name}-{at:06}", output=1), note())
    if at % 50 == 49:
        print(at, writer.safe, flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("away", [False, True], ids=["database there", "database away"])
def test_a_killed_server_loses_only_what_came_last_and_nothing_comes_twice(tmp_path: Path, away: bool) -> None:
    where = str(tmp_path / "ledger.db")
    spool = tmp_path / "spool"
    acknowledged = {}
    for number in range(3):
        target = f"{tmp_path}/none.db/ledger.db" if away else where
        (tmp_path / "none.db").touch()
        name = f"run{number}"
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, target, str(spool), name], stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged[name] = int(line.split()[1])
            if acknowledged[name] > 1500 + 100 * number:
                break
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait()
    last = writer(where, spool, run=Run("last", 1))
    last.add(timeline("last"), note())
    until(lambda: last.written and not last.numbers()["waiting"], "what was left behind", 60)
    last.close()
    found = names(where)
    assert len(found) == len(set(found))
    for name, count in acknowledged.items():
        mine = [one for one in found if one.startswith(f"{name}-")]
        assert len(mine) >= count
        assert mine == [f"{name}-{at:06}" for at in range(len(mine))]  # all up to the one where it was killed
    assert not list(spool.glob("*.spool"))


def spooled(folder: Path) -> list[tuple[str, list[tuple[int, Record]]]]:
    return [(run.name, [row for batch in batches for row in batch]) for _, run, batches in left_behind(folder)]


def abandon(folder: Path, rows: list[tuple[int, Record]], most: int = 1 << 20) -> Path:
    """A spool that a server which is no more has left."""
    spool = Spool(folder, RUN, most)
    spool.append(rows)
    os.close(spool._file)
    return spool.path


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_torn_end_is_cut_off(tmp_path: Path, cut: int) -> None:
    rows = [(at, record(f"r{at}")) for at in range(1, 6)]
    path = abandon(tmp_path, rows)
    assert spooled(tmp_path) == [(RUN.name, rows)]
    os.truncate(path, path.stat().st_size - cut)
    assert spooled(tmp_path) == [(RUN.name, rows[:4])]


def test_a_flipped_bit_ends_what_is_read(tmp_path: Path) -> None:
    rows = [(at, record(f"r{at}")) for at in range(1, 6)]
    path = abandon(tmp_path, rows)
    data = bytearray(path.read_bytes())
    data[-300] ^= 16
    path.write_bytes(data)
    assert len(spooled(tmp_path)[0][1]) < 5
    path.write_bytes(b"\xff" * 100)
    assert spooled(tmp_path) == []
    assert not path.exists()


def test_the_spool_of_a_server_that_lives_is_its_own(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RUN, 1 << 20)
    spool.append([(1, record())])
    assert spooled(tmp_path) == []
    with pytest.raises(SpoolFull, match="its 1048576 bytes"):
        spool.append([(2, record("r" * (1 << 20)))])
    assert [row for batch in spool.read(10) for row in batch] == [(1, record())]
    spool.close()
    assert len(spooled(tmp_path)) == 1
