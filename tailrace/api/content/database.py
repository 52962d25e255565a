"""Two databases behind one small interface: SQLite for one server, PostgreSQL for several.

SQL is written once, with ? for parameters. A connection belongs to one thread.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tailrace.ledger import place
from tailrace.terms import InvalidInput, TailraceError

VERSION = 1
PAGE = 4096
BUSY_SECONDS = 1.0
CONNECT_SECONDS = 5
STATEMENT_SECONDS = 30


class StoreFull(TailraceError):
    """There is no room for more: the store's bound is reached, or the disk is full."""


class StoreDown(TailraceError):
    """The database cannot be reached or does not work."""


class Database(Protocol):
    """A connection that is opened when it is needed. Every method raises StoreFull or StoreDown."""

    blob: str
    """The type of a column of bytes."""
    exclusive: bool
    """No other server has it while this one does."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Runs a statement; its rows, if it has any."""

    def changed(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Runs a statement; how many rows it has changed."""

    def commit(self) -> None:
        """Makes what was done since the last commit last."""

    def rollback(self) -> None:
        """Undoes it. Never raises."""

    def tidy(self) -> None:
        """Gives back room that nothing needs."""

    def close(self) -> None:
        """Closes the connection. Never raises."""


def check(url: str) -> None:
    """Raises InvalidInput where a URL is none of a content store."""
    if place.sqlite_path(url) is not None or place.is_postgresql(url):
        return
    raise InvalidInput(
        "--content-store is sqlite:///FILE (sqlite:////FILE from the root), or postgresql://USER@HOST/DATABASE",
        param="content_store",
    )


def connect(url: str, most_bytes: int) -> Database:
    """The database of a URL; nothing is opened yet. Raises InvalidInput."""
    check(url)
    path = place.sqlite_path(url)
    return Postgres(url) if path is None else Sqlite(path, most_bytes)


class Sqlite:
    """A file for one server: it is locked for as long as the server runs, and only its owner may read it. What is
    deleted is overwritten."""

    blob = "BLOB"
    exclusive = True

    def __init__(self, path: Path, most_bytes: int) -> None:
        """`most_bytes`: of content. The file is held to twice as much, which its indexes and its slack fit into."""
        self._path = path
        self._pages = max(64, 2 * most_bytes // PAGE)
        self._connection: sqlite3.Connection | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        try:
            place.private_file(self._path)
        except OSError as error:
            raise StoreDown(f"{self._path} cannot be opened: {error.strerror}") from None
        try:
            connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            for pragma in (
                f"page_size={PAGE}",
                "auto_vacuum=INCREMENTAL",
                "locking_mode=EXCLUSIVE",
                "journal_mode=WAL",
                "synchronous=FULL",
                "secure_delete=ON",
                f"max_page_count={self._pages}",
            ):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("BEGIN IMMEDIATE")  # takes the lock, or finds that another server has it
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._explained(error) from None
        self._connection = connection
        return connection

    def _run(self, sql: str, values: Sequence[Any]) -> sqlite3.Cursor:
        connection = self._open()
        try:
            if not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")
            return connection.execute(sql, tuple(values))
        except sqlite3.Error as error:
            raise self._explained(error) from None

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Runs a statement; its rows, if it has any."""
        cursor = self._run(sql, values)
        try:
            return cursor.fetchall()
        except sqlite3.Error as error:
            raise self._explained(error) from None

    def changed(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Runs a statement; how many rows it has changed."""
        return self._run(sql, values).rowcount

    def commit(self) -> None:
        """Makes what was done since the last commit last."""
        try:
            if self._connection is not None and self._connection.in_transaction:
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._explained(error) from None

    def rollback(self) -> None:
        """Undoes it."""
        try:
            if self._connection is not None and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            self.close()

    def tidy(self) -> None:
        """Gives pages back to the disk, and empties the log of what is in the file."""
        connection = self._open()
        try:
            connection.execute("PRAGMA incremental_vacuum(4096)").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise self._explained(error) from None

    def close(self) -> None:
        """Closes the file."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _explained(self, error: sqlite3.Error) -> TailraceError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return StoreFull("the content store is full, or its disk is")
        if code == sqlite3.SQLITE_BUSY:
            return StoreDown(f"{self._path} is in use by another server: give each its own, or use PostgreSQL")
        return StoreDown(f"the content store {self._path} does not work: {error}")


class Postgres:
    """A server, through psycopg (the extra `postgres`), which is imported when it is connected to."""

    blob = "BYTEA"
    exclusive = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and not self._connection.closed

    def _open(self) -> Any:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        try:
            import psycopg
        except ImportError:
            raise StoreDown("a content store in PostgreSQL needs: pip install 'tailrace[postgres]'") from None
        try:
            self._connection = psycopg.connect(
                self._url,
                connect_timeout=CONNECT_SECONDS,
                options=f"-c statement_timeout={STATEMENT_SECONDS * 1000}",
                application_name="tailrace",
            )
        except psycopg.Error as error:
            raise StoreDown(f"PostgreSQL cannot be reached: {_first_line(error)}") from None
        return self._connection

    def _run(self, sql: str, values: Sequence[Any]) -> Any:
        import psycopg

        connection = self._open()
        try:
            return connection.execute(sql.replace("?", "%s"), tuple(values))
        except psycopg.Error as error:
            raise self._explained(error) from None

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Runs a statement; its rows, if it has any."""
        cursor = self._run(sql, values)
        return cursor.fetchall() if cursor.description is not None else []

    def changed(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Runs a statement; how many rows it has changed."""
        return int(self._run(sql, values).rowcount)

    def commit(self) -> None:
        """Makes what was done since the last commit last."""
        import psycopg

        if self._connection is None:
            return
        try:
            self._connection.commit()
        except psycopg.Error as error:
            raise self._explained(error) from None

    def rollback(self) -> None:
        """Undoes it."""
        if self._connection is None:
            return
        import psycopg

        try:
            self._connection.rollback()
        except psycopg.Error:
            self.close()

    def tidy(self) -> None:
        """The server does that by itself."""

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _explained(self, error: Exception) -> TailraceError:
        if getattr(error, "sqlstate", None) in ("53100", "54000"):
            return StoreFull("the content store's disk is full")
        if self._connection is not None and self._connection.broken:
            self.close()
        return StoreDown(f"PostgreSQL does not work: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
