"""What of batches is asked of the content store: each function is a part of one of its transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tailrace.api.batches import state
from tailrace.api.batches.state import Batch
from tailrace.api.content.shelf import OVERHEAD, PIECE, Shelf, Stored

MakeFile = Callable[[int], Stored]
"""A file with a given number of bytes, and always the same id."""
LEASE_SECONDS = 15.0
"""How long a batch belongs to a server that says nothing more."""
RESULTS_A_TIME = 100


def create(shelf: Shelf, stored: Stored, most_open: int) -> bool:
    """A new batch, which belongs to nobody yet; False where its tenant has as many open ones as it may. Raises
    StoreFull."""
    rows = shelf.database.execute(
        "SELECT COUNT(*) FROM tailrace_batches b JOIN tailrace_objects o ON o.id = b.id WHERE b.open = 1 AND "
        "o.tenant = ?",
        (stored.tenant,),
    )
    if int(rows[0][0]) >= most_open:
        return False
    shelf.put(stored)
    shelf.database.execute("INSERT INTO tailrace_batches VALUES (?, 1, '', 0)", (stored.id,))
    return True


def claim(shelf: Shelf, owner: str, now: float, most: int) -> list[Stored]:
    """Open batches that are this server's from now on, the oldest first: those that it had, and those nobody has."""
    run = shelf.database
    rows = run.execute(
        "SELECT b.id, o.tenant FROM tailrace_batches b JOIN tailrace_objects o ON o.id = b.id WHERE b.open = 1 AND "
        "(b.owner = ? OR b.lease < ?) ORDER BY o.created, o.id LIMIT ?",
        (owner, now, most),
    )
    mine = [
        (name, tenant)
        for name, tenant in rows
        if run.changed(
            "UPDATE tailrace_batches SET owner = ?, lease = ? WHERE id = ? AND open = 1 AND (owner = ? OR lease < ?)",
            (owner, now + LEASE_SECONDS, name, owner, now),
        )
    ]
    found = [shelf.get("batch", name, tenant, 0.0) for name, tenant in mine]
    return [one for one in found if one is not None]


def release(shelf: Shelf, owner: str | None) -> None:
    """What belongs to a server (None: to any) belongs to nobody."""
    if owner is None:
        shelf.database.execute("UPDATE tailrace_batches SET owner = '', lease = 0")
    else:
        shelf.database.execute("UPDATE tailrace_batches SET owner = '', lease = 0 WHERE owner = ?", (owner,))


def save(shelf: Shelf, batch: Batch, tenant: str) -> bool:
    """Puts a state in the place of the one before; False where the batch is not there any more."""
    if not batch.open:
        shelf.database.execute("UPDATE tailrace_batches SET open = 0 WHERE id = ?", (batch.id,))
    return shelf.replace("batch", batch.id, tenant, state.encode(batch))


def begin(shelf: Shelf, batch: Batch, tenant: str) -> bool:
    """Saves that a batch runs, unless it was cancelled since it was read; whether it runs."""
    return status(shelf, batch.id, tenant) == "validating" and save(shelf, batch, tenant)


def status(shelf: Shelf, name: str, tenant: str) -> str | None:
    """The state in which a batch is now; None where it is not there."""
    found = shelf.get("batch", name, tenant, 0.0)
    return None if found is None else state.decode(found.body).status


def cancel(shelf: Shelf, name: str, tenant: str, now: float) -> Batch | None:
    """Marks an open batch as one that is to be cancelled. Its state then; None where it is not there."""
    found = shelf.get("batch", name, tenant, now)
    if found is None:
        return None
    batch = state.decode(found.body)
    if batch.status in ("validating", "in_progress"):
        batch = state.moved(batch, "cancelling", now)
        save(shelf, batch, tenant)
    return batch


def record(shelf: Shelf, batch: str, line: int, data: bytes, *, failed: bool) -> None:
    """The result of a line, unless it has one. Raises StoreFull."""
    size = len(data) + OVERHEAD
    shelf.room(size)
    inserted = shelf.database.changed(
        "INSERT INTO tailrace_results (batch, line, failed, data) SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM "
        "tailrace_batches WHERE id = ? AND open = 1) ON CONFLICT DO NOTHING",
        (batch, line, int(failed), data, batch),
    )
    if inserted > 0:
        shelf.database.execute("UPDATE tailrace_objects SET bytes = bytes + ? WHERE id = ?", (size, batch))
        shelf.used += size


def done(shelf: Shelf, batch: str) -> set[int]:
    """The lines that have a result."""
    return {row[0] for row in shelf.database.execute("SELECT line FROM tailrace_results WHERE batch = ?", (batch,))}


def counts(shelf: Shelf, batch: str) -> tuple[int, int]:
    """How many lines were answered, and how many failed."""
    rows = dict(
        shelf.database.execute(
            "SELECT failed, COUNT(*) FROM tailrace_results WHERE batch = ? GROUP BY failed", (batch,)
        )
    )
    return int(rows.get(0, 0)), int(rows.get(1, 0))


def reader_of(shelf: Shelf, file: str, tenant: str) -> str | None:
    """The open batch that reads a file."""
    rows = shelf.database.execute(
        "SELECT o.body FROM tailrace_batches b JOIN tailrace_objects o ON o.id = b.id WHERE b.open = 1 AND "
        "o.tenant = ?",
        (tenant,),
    )
    readers = (state.decode(bytes(row[0])) for row in rows)
    return next((batch.id for batch in readers if batch.input_file_id == file), None)


def finish(shelf: Shelf, batch: Batch, tenant: str, files: tuple[MakeFile, MakeFile]) -> None:
    """The end of a batch, in one: results become the content of files (of answers, and of errors), which are there only
    where there are any, and the state is saved. What they count as is moved, so this needs no room."""
    for kind, make in enumerate(files):
        name, size = make(0).id, 0
        for part, piece in enumerate(_pieces(shelf, batch.id, kind)):
            size += len(piece)
            shelf.database.execute("INSERT INTO tailrace_pieces VALUES (?, ?, ?)", (name, part, piece))
        if size:
            shelf.put(make(size), moved=True)
    shelf.database.execute("DELETE FROM tailrace_results WHERE batch = ?", (batch.id,))
    save(shelf, batch, tenant)
    own = len(state.encode(batch)) + OVERHEAD
    shelf.database.execute("UPDATE tailrace_objects SET bytes = ? WHERE id = ?", (own, batch.id))
    shelf.measure()


def _pieces(shelf: Shelf, batch: str, failed: int) -> Iterator[bytes]:
    """The results as lines of a file, cut into its pieces."""
    held, after = b"", -1
    while True:
        rows = shelf.database.execute(
            "SELECT line, data FROM tailrace_results WHERE batch = ? AND failed = ? AND line > ? ORDER BY line LIMIT ?",
            (batch, failed, after, RESULTS_A_TIME),
        )
        if not rows:
            break
        after = rows[-1][0]
        held += b"".join(bytes(row[1]) + b"\n" for row in rows)
        while len(held) >= PIECE:
            yield held[:PIECE]
            held = held[PIECE:]
    if held:
        yield held
