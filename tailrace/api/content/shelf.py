"""What is asked of the database, in SQL that SQLite and PostgreSQL both read. Every method is one part of a transaction
that `store.ContentStore` begins and ends; none commits.

An *object* is a response, a chat completion, a file or a batch: JSON (`body`) with an id, a kind, a tenant and an end.
A file's content is in pieces; a batch's results are a row for each line of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tailrace.api.content.database import VERSION, Database, StoreDown, StoreFull

Kind = Literal["response", "chat", "file", "batch"]
Order = Literal["asc", "desc"]
PIECE = 256 << 10
"""Bytes of a file in one row."""
OVERHEAD = 512
"""Bytes that a row is counted as beside its content."""
NEVER = 1e18
SCANNED = 500
"""Rows that a list looks at a time."""
PAGE_BYTES = 8 << 20
"""Bytes of bodies from which on a page of a list takes no further object."""


@dataclass(frozen=True)
class Stored:
    """An object. Times are seconds since the epoch; `expires` NEVER is never."""

    id: str
    kind: Kind
    tenant: str
    created: float
    expires: float
    body: bytes
    model: str = ""
    metadata: Mapping[str, str] | None = None
    content: int = 0
    """Bytes of a file's content."""

    @property
    def size(self) -> int:
        """Bytes that it counts as."""
        return len(self.body) + self.content + OVERHEAD


@dataclass(frozen=True)
class Filter:
    """Which objects a list is of, and where it goes on."""

    kind: Kind
    tenant: str
    limit: int
    after: str | None = None
    order: Order = "desc"
    model: str | None = None
    metadata: Mapping[str, str] | None = None


COLUMNS = "id, kind, tenant, created, expires, body, model, metadata"


class Shelf:
    """The tables. `used` is what all objects count as, in bytes, as far as this process knows."""

    def __init__(self, database: Database, most_bytes: int) -> None:
        self.database = database
        self.most_bytes = most_bytes
        self.used = 0

    def prepare(self) -> None:
        """Makes the tables where there are none. Raises StoreDown where they are of a later version."""
        run, blob = self.database.execute, self.database.blob
        run("CREATE TABLE IF NOT EXISTS tailrace_content (version INTEGER NOT NULL)")
        found = run("SELECT version FROM tailrace_content")
        if found and found[0][0] > VERSION:
            raise StoreDown("the content store was made by a later version of Tailrace: serve with that one")
        if not found:
            run("INSERT INTO tailrace_content VALUES (?)", (VERSION,))
        run(
            "CREATE TABLE IF NOT EXISTS tailrace_objects (id TEXT PRIMARY KEY, kind TEXT NOT NULL, tenant TEXT NOT "
            "NULL, created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION NOT NULL, model TEXT NOT NULL, "
            f"metadata {blob}, body {blob} NOT NULL, bytes BIGINT NOT NULL)"
        )
        run("CREATE INDEX IF NOT EXISTS tailrace_objects_of ON tailrace_objects (kind, tenant, created, id)")
        run("CREATE INDEX IF NOT EXISTS tailrace_objects_end ON tailrace_objects (expires)")
        run(
            "CREATE TABLE IF NOT EXISTS tailrace_pieces (file TEXT NOT NULL, part INTEGER NOT NULL, data "
            f"{blob} NOT NULL, PRIMARY KEY (file, part))"
        )
        run(
            "CREATE TABLE IF NOT EXISTS tailrace_batches (id TEXT PRIMARY KEY, open INTEGER NOT NULL, owner TEXT NOT "
            "NULL, lease DOUBLE PRECISION NOT NULL)"
        )
        run(
            "CREATE TABLE IF NOT EXISTS tailrace_results (batch TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER "
            f"NOT NULL, data {blob} NOT NULL, PRIMARY KEY (batch, line))"
        )
        run("CREATE TABLE IF NOT EXISTS tailrace_servers (owner TEXT PRIMARY KEY, seen DOUBLE PRECISION NOT NULL)")
        self.measure()

    def measure(self) -> None:
        """Counts what there is."""
        self.used = int(self.database.execute("SELECT COALESCE(SUM(bytes), 0) FROM tailrace_objects")[0][0])

    # Servers that share the store

    def beat(self, owner: str, now: float, forget: float) -> None:
        """A server says that it runs; those that have not since `forget` are forgotten."""
        self.database.execute(
            "INSERT INTO tailrace_servers VALUES (?, ?) ON CONFLICT (owner) DO UPDATE SET seen = excluded.seen",
            (owner, now),
        )
        self.database.execute("DELETE FROM tailrace_servers WHERE seen < ?", (forget,))

    def heard(self, owner: str, since: float) -> bool:
        """Whether a server has said so since then."""
        return bool(
            self.database.execute("SELECT 1 FROM tailrace_servers WHERE owner = ? AND seen >= ?", (owner, since))
        )

    # Objects

    def put(self, stored: Stored, *, moved: bool = False) -> None:
        """Stores a new object. `moved`: its room is that of something that goes. Raises StoreFull, with nothing
        stored."""
        if not moved:
            self.room(stored.size)
        metadata = None if stored.metadata is None else msgspec.json.encode(stored.metadata)
        row = (stored.id, stored.kind, stored.tenant, stored.created, stored.expires, stored.model, metadata)
        self.database.execute(
            "INSERT INTO tailrace_objects (id, kind, tenant, created, expires, model, metadata, body, bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, stored.body, stored.size),
        )
        self.used += stored.size

    def room(self, size: int) -> None:
        """Raises StoreFull unless there is room for so many bytes more."""
        if self.used + size > self.most_bytes:
            raise StoreFull(
                f"the content store is full ({self.used} of {self.most_bytes} bytes are used): delete what is not "
                "needed, or wait until it expires"
            )

    def get(self, kind: Kind, name: str, tenant: str, now: float) -> Stored | None:
        """An object, if the tenant has it and it has not expired."""
        rows = self.database.execute(
            f"SELECT {COLUMNS} FROM tailrace_objects WHERE id = ? AND kind = ? AND tenant = ? AND expires > ?",
            (name, kind, tenant, now),
        )
        return _stored(rows[0]) if rows else None

    def replace(self, kind: Kind, name: str, tenant: str, body: bytes) -> bool:
        """Puts another body in the place of an object's; whether there is one. Changes no size that matters."""
        return bool(
            self.database.changed(
                "UPDATE tailrace_objects SET body = ? WHERE id = ? AND kind = ? AND tenant = ?",
                (body, name, kind, tenant),
            )
        )

    def complete(self, kind: Kind, name: str, tenant: str, body: bytes) -> bool:
        """Puts the final body in the place of an object's; whether there is one. Raises StoreFull."""
        rows = self.database.execute(
            "SELECT bytes FROM tailrace_objects WHERE id = ? AND kind = ? AND tenant = ?", (name, kind, tenant)
        )
        if not rows:
            return False
        more = len(body) + OVERHEAD - int(rows[0][0])
        self.room(more)
        self.database.execute(
            "UPDATE tailrace_objects SET body = ?, bytes = ? WHERE id = ?", (body, len(body) + OVERHEAD, name)
        )
        self.used += more
        return True

    def relabel(self, kind: Kind, name: str, tenant: str, metadata: Mapping[str, str]) -> None:
        """Puts other metadata in the place of an object's."""
        self.database.execute(
            "UPDATE tailrace_objects SET metadata = ? WHERE id = ? AND kind = ? AND tenant = ?",
            (msgspec.json.encode(metadata), name, kind, tenant),
        )

    def delete(self, kind: Kind, name: str, tenant: str, now: float) -> bool:
        """Deletes an object and all that belongs to it; whether there was one."""
        rows = self.database.execute(
            "SELECT bytes FROM tailrace_objects WHERE id = ? AND kind = ? AND tenant = ? AND expires > ?",
            (name, kind, tenant, now),
        )
        if rows:
            self._drop([name])
            self.used -= int(rows[0][0])
        return bool(rows)

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.database.execute("DELETE FROM tailrace_objects WHERE id = ?", (name,))
            self.database.execute("DELETE FROM tailrace_pieces WHERE file = ?", (name,))
            self.database.execute("DELETE FROM tailrace_results WHERE batch = ?", (name,))
            self.database.execute("DELETE FROM tailrace_batches WHERE id = ?", (name,))

    def expire(self, now: float, most: int = 200) -> int:
        """Deletes objects that have expired, at most so many; how many."""
        rows = self.database.execute(
            "SELECT id FROM tailrace_objects WHERE expires <= ? ORDER BY expires LIMIT ?", (now, most)
        )
        self._drop([row[0] for row in rows])
        return len(rows)

    def page(self, wanted: Filter, now: float) -> tuple[list[Stored], bool] | None:
        """Objects in the order of their making, and whether more follow; None where `after` is none of them."""
        place: tuple[float, str] | None = None
        if wanted.after is not None:
            after = self.get(wanted.kind, wanted.after, wanted.tenant, now)
            if after is None:
                return None
            place = after.created, after.id
        found: list[Stored] = []
        size = 0
        for name, labels, length in self._scan(wanted, place, now):
            if wanted.metadata and not wanted.metadata.items() <= (labels or {}).items():
                continue
            if len(found) == wanted.limit or (found and size + length > PAGE_BYTES):
                return found, True
            stored = self.get(wanted.kind, name, wanted.tenant, now)
            if stored is not None:
                found.append(stored)
                size += length
        return found, False

    def _scan(
        self, wanted: Filter, place: tuple[float, str] | None, now: float
    ) -> Iterator[tuple[str, dict[str, str] | None, int]]:
        """Id, metadata and bytes of the body of everything from there on."""
        beyond, order = (">", "ASC") if wanted.order == "asc" else ("<", "DESC")
        while True:
            sql = (
                "SELECT id, created, metadata, LENGTH(body) FROM tailrace_objects WHERE kind = ? AND tenant = ? AND "
                "expires > ?"
            )
            values: list[object] = [wanted.kind, wanted.tenant, now]
            if wanted.model is not None:
                sql += " AND model = ?"
                values.append(wanted.model)
            if place is not None:
                sql += f" AND (created, id) {beyond} (?, ?)"
                values += place
            rows = self.database.execute(f"{sql} ORDER BY created {order}, id {order} LIMIT ?", [*values, SCANNED])
            for name, _, metadata, length in rows:
                yield name, _labels(metadata), length
            if len(rows) < SCANNED:
                return
            place = rows[-1][1], rows[-1][0]

    # Files

    def write(self, file: str, pieces: Iterator[bytes]) -> None:
        """The content of a file that was put."""
        for part, data in enumerate(pieces):
            self.database.execute("INSERT INTO tailrace_pieces VALUES (?, ?, ?)", (file, part, data))

    def piece(self, file: str, part: int) -> bytes | None:
        """One piece of a file's content; None behind the last."""
        rows = self.database.execute("SELECT data FROM tailrace_pieces WHERE file = ? AND part = ?", (file, part))
        return bytes(rows[0][0]) if rows else None


def pieces_of(data: bytes) -> Iterator[bytes]:
    """A file's content, cut."""
    return (data[at : at + PIECE] for at in range(0, len(data), PIECE))


def _stored(row: tuple[Any, ...]) -> Stored:
    name, kind, tenant, created, expires, body, model, metadata = row
    return Stored(name, kind, tenant, created, expires, bytes(body), model, _labels(metadata))


def _labels(metadata: Any) -> dict[str, str] | None:
    return None if metadata is None else msgspec.json.decode(bytes(metadata), type=dict[str, str])
