"""The ledger's database, through SQLAlchemy: SQLite in a file that several servers may share, or PostgreSQL.

Every run of a server numbers its records. What has been written of it stands beside it in the same transaction as the
rows and their sums, so that a batch which comes again, after whatever crash, is written once.
"""

from __future__ import annotations

import importlib.util
import operator
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import sqlalchemy as sa

from tailrace.ledger import place, schema
from tailrace.ledger.record import Record
from tailrace.ledger.run import Run
from tailrace.ledger.schema import BITS, DIMENSIONS, HOUR, LEDGER, REQUESTS, RUNS, SUMS, USAGE
from tailrace.terms import TailraceError

BUSY_SECONDS = 2.0
CONNECT_SECONDS = 3
STATEMENT_SECONDS = 10
PRUNE_ROWS = 2000
MICRO = 1_000_000


class LedgerDown(TailraceError):
    """The database cannot be reached or written now."""


class BadRows(TailraceError):
    """The database does not take these rows, now or ever."""


class Content(msgspec.Struct, frozen=True):
    """What a ledger has. Times are seconds since 1970, of requests' ends."""

    version: int
    runs: int
    rows: int
    oldest: float | None
    newest: float | None


Numbered = Sequence[tuple[int, Record]]


class Ledger:
    """One ledger, opened when it is needed. One thread at a time. Every method raises LedgerDown or LaterVersion."""

    def __init__(self, given: str, *, read_only: bool = False, patient: bool = False) -> None:
        """`given`: a path or a URL. `read_only` never makes one. `patient`: no bound on how long a statement takes."""
        self.shown = place.shown(given)
        self._path = place.ledger_file(given)
        self._given = given
        self._read_only = read_only
        self._patient = patient
        self._engine: sa.Engine | None = None

    def _open(self) -> sa.Engine:
        if self._engine is not None:
            return self._engine
        if self._path is None:
            engine = _postgresql(self._given, patient=self._patient)
        else:
            if self._read_only and not self._path.exists():
                raise LedgerDown(f"there is no ledger at {self._path} yet: `tailrace serve` writes one")
            try:
                place.private_file(self._path)
            except OSError as error:
                raise LedgerDown(f"the ledger {self._path} cannot be opened: {error.strerror}") from None
            engine = _sqlite(str(self._path), write=not self._read_only)
        try:
            with engine.begin() as connection:
                self._prepare(connection)
        except sa.exc.DBAPIError as error:
            engine.dispose()
            raise self._explained(error) from None
        except TailraceError:
            engine.dispose()
            raise
        self._engine = engine
        return engine

    def _prepare(self, connection: sa.Connection) -> None:
        if self._read_only and not sa.inspect(connection).has_table(LEDGER.name):
            raise LedgerDown(f"there is no ledger in {self.shown} yet: `tailrace serve` writes one")
        schema.prepare(connection)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """All of it, or nothing. Raises LedgerDown, or BadRows."""
        try:
            with self._open().begin() as connection:
                yield connection
        except (sa.exc.DataError, sa.exc.IntegrityError, sa.exc.StatementError) as error:
            if isinstance(error, sa.exc.DBAPIError) and not isinstance(error, sa.exc.DataError | sa.exc.IntegrityError):
                self.close()
                raise self._explained(error) from None
            raise BadRows(_first_line(error)) from None

    def close(self) -> None:
        """Closes the connection."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def write(self, run: Run, rows: Numbered, now: int) -> int:
        """Writes what has not been written of these rows, in the order of their numbers, with their sums. `now`: until
        when the run is known to have gone on, 0 where that is not known. Returns how many were new."""
        with self.transaction() as connection:
            number, written = self._run(connection, run)
            new = [(serial, record) for serial, record in rows if serial > written]
            if new:
                first = number << BITS
                rows = [(first | serial, *msgspec.structs.astuple(record)) for serial, record in new]
                _insert(connection, REQUESTS, rows)
                self._add(connection, [record for _, record in new])
            last = new[-1][0] if new else written
            seen = max([now, *(record.ended for _, record in new)])
            connection.execute(
                sa.update(RUNS)
                .where(RUNS.c.id == number)
                .values(written=last, rows=RUNS.c.rows + len(new), seen=_greatest(connection)(RUNS.c.seen, seen))
            )
            return len(new)

    def _run(self, connection: sa.Connection, run: Run) -> tuple[int, int]:
        """A run's number, and that of its last row; it is entered where it is new."""
        wanted = sa.select(RUNS.c.id, RUNS.c.written).where(RUNS.c.name == run.name).with_for_update()
        found = connection.execute(wanted).first()
        if found is None:
            values = msgspec.structs.asdict(run) | {"seen": run.started, "written": 0, "rows": 0}
            connection.execute(sa.insert(RUNS).values(**values))
            found = connection.execute(wanted).one()
        return int(found[0]), int(found[1])

    def _add(self, connection: sa.Connection, records: Sequence[Record]) -> None:
        """Adds records to the sums."""
        sums: dict[tuple[Any, ...], tuple[int, ...]] = {}
        for r in records:
            hour = r.ended // (MICRO * HOUR) * HOUR
            group = (hour, r.key, r.tenant, r.model, r.adapter, r.endpoint, r.workload)
            before, more = sums.get(group), schema.summed(r)
            sums[group] = more if before is None else tuple(map(operator.add, before, more))
        keys = ", ".join(f'"{name}"' for name in ("hour", *DIMENSIONS))
        added = ", ".join(f'"{name}" = {USAGE.name}."{name}" + excluded."{name}"' for name in SUMS)
        rows = [(*group, *sums[group]) for group in sorted(sums)]  # in one order for all servers
        _insert(connection, USAGE, rows, f" ON CONFLICT ({keys}) DO UPDATE SET {added}")

    def prune(self, before: int, most: int) -> int:
        """Deletes the oldest rows: those that ended before that (microseconds; 0: none), and those beyond so many (0:
        no bound), a piece at a time. The sums stay. Returns how many went; 0: there are no more to go."""
        with self.transaction() as connection:
            held = int(connection.execute(sa.select(sa.func.coalesce(sa.func.sum(RUNS.c.rows), 0))).scalar_one())
            beyond = max(0, held - most) if most else 0
            oldest = sa.select(REQUESTS.c.seq, REQUESTS.c.ended).order_by(REQUESTS.c.ended).limit(PRUNE_ROWS)
            going = [
                (seq, ended)
                for at, (seq, ended) in enumerate(connection.execute(oldest).all())
                if at < beyond or ended < before
            ]
            if not going:
                return 0
            connection.execute(sa.delete(REQUESTS).where(REQUESTS.c.seq.in_([seq for seq, _ in going])))
            gone: dict[int, int] = {}
            for seq, _ in going:
                gone[seq >> BITS] = gone.get(seq >> BITS, 0) + 1
            for number in sorted(gone):
                fewer = sa.update(RUNS).where(RUNS.c.id == number)
                connection.execute(fewer.values(rows=RUNS.c.rows - gone[number]))
            kept = _greatest(connection)(LEDGER.c.kept_since, going[-1][1] + 1)
            connection.execute(sa.update(LEDGER).values(kept_since=kept))
        if self._path is not None:
            raw: Any = self._open().raw_connection()
            with suppress(sqlite3.Error):  # another server writes: the next time, then
                raw.driver_connection.execute("PRAGMA incremental_vacuum(2000)").fetchall()  # a page for each step
            raw.close()
        return len(going)

    def rebuild(self) -> int:
        """Sums the rows anew, for every hour whose rows are all there; the sums of earlier ones stay. Returns how many
        sums that gives."""
        with self.transaction() as connection:
            kept = int(connection.execute(sa.select(LEDGER.c.kept_since)).scalar_one())
            first = -(-kept // (MICRO * HOUR)) * HOUR
            connection.execute(sa.delete(USAGE).where(USAGE.c.hour >= first))
            hour = REQUESTS.c.ended // (MICRO * HOUR) * HOUR
            groups = [REQUESTS.c[name] for name in DIMENSIONS]
            summed = (
                sa.select(hour.label("hour"), *groups, *schema.sum_expressions())
                .where(REQUESTS.c.ended >= first * MICRO)
                .group_by(sa.text("1"), *groups)
            )
            connection.execute(sa.insert(USAGE).from_select(["hour", *DIMENSIONS, *SUMS], summed))
            count = sa.select(sa.func.count()).select_from(USAGE).where(USAGE.c.hour >= first)
            return int(connection.execute(count).scalar_one())

    def content(self) -> Content:
        """What is there."""
        with self.transaction() as connection:
            runs, rows = connection.execute(
                sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(RUNS.c.rows), 0)).select_from(RUNS)
            ).one()
            version = int(connection.execute(sa.select(LEDGER.c.version)).scalar_one())
            oldest, newest = (
                connection.execute(sa.select(REQUESTS.c.ended).order_by(order).limit(1)).scalar()
                for order in (REQUESTS.c.ended, REQUESTS.c.ended.desc())
            )
        times = [None if at is None else at / MICRO for at in (oldest, newest)]
        return Content(version, int(runs), int(rows), *times)

    def _explained(self, error: sa.exc.DBAPIError) -> LedgerDown:
        return LedgerDown(f"the ledger {self.shown} does not work: {_first_line(error)}")


def _greatest(connection: sa.Connection) -> Any:
    return sa.func.greatest if connection.dialect.name == "postgresql" else sa.func.max


def _insert(connection: sa.Connection, table: sa.Table, rows: list[tuple[Any, ...]], conflict: str = "") -> None:
    """Inserts rows that have a value for every column, in order: in a quarter of the time that naming each takes."""
    mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    marks = ", ".join([mark] * len(table.columns))
    connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({marks}){conflict}", rows)


def _first_line(error: sa.exc.SQLAlchemyError) -> str:
    said = str(getattr(error, "orig", None) or error).strip().split("\n")[0]
    return re.sub(r"://[^@/]*@", "://", said)


def _sqlite(path: str, *, write: bool) -> sa.Engine:
    """`write`: a transaction takes the lock when it begins, since one that finds out later cannot wait for it."""
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=path), connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False}
    )

    @sa.event.listens_for(engine, "connect")
    def opened(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        pragmas = ("page_size=4096", "auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL",
                   "cache_size=-16384", "journal_size_limit=67108864")  # fmt: skip
        for pragma in pragmas if write else ("cache_size=-65536",):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _postgresql(url: str, *, patient: bool) -> sa.Engine:
    if importlib.util.find_spec("psycopg") is None:
        raise LedgerDown("a ledger in PostgreSQL needs: pip install 'tailrace[postgres]'")
    bound = 0 if patient else STATEMENT_SECONDS * 1000
    return sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg"),
        pool_size=1,
        max_overflow=1,
        connect_args={
            "connect_timeout": CONNECT_SECONDS,
            "options": f"-c statement_timeout={bound} -c lock_timeout={bound}",
            "application_name": "tailrace ledger",
        },
    )
