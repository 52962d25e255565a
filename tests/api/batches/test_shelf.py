"""What several servers do with the batches of one store, over SQLite and over PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tailrace.api.batches import shelf, state
from tailrace.api.batches.files import new_file
from tailrace.api.batches.state import Batch
from tailrace.api.content.database import StoreFull, connect
from tailrace.api.content.shelf import NEVER, PIECE, Shelf, Stored

NAMES = ("file-out", "file-err")


@pytest.fixture
def store(store_url: str) -> Iterator[Shelf]:
    database = connect(store_url, 1 << 22)
    made = Shelf(database, 1 << 22)
    made.prepare()
    yield made
    database.rollback()
    database.close()


def make(store: Shelf, name: str, tenant: str = "ada", created: float = 100.0) -> Batch:
    batch = Batch(
        id=name, endpoint="/v1/completions", input_file_id="in", completion_window="24h", created_at=100, expires_at=200
    )
    assert shelf.create(store, Stored(name, "batch", tenant, created, NEVER, state.encode(batch)), 3)
    return batch


def files(batch: Batch) -> tuple[shelf.MakeFile, shelf.MakeFile]:
    def one(name: str) -> shelf.MakeFile:
        return lambda size: new_file(name, size, "x", "batch_output", "ada", 1.0, NEVER)

    return one(NAMES[0]), one(NAMES[1])


def test_a_batch_is_one_servers_until_that_says_nothing_more(store: Shelf) -> None:
    make(store, "b1", created=2.0)
    make(store, "b0", created=1.0)
    assert [one.id for one in shelf.claim(store, "first", 1000.0, 9)] == ["b0", "b1"]
    assert shelf.claim(store, "second", 1010.0, 9) == []
    assert len(shelf.claim(store, "first", 1010.0, 9)) == 2  # renewed
    assert shelf.claim(store, "second", 1024.0, 9) == []
    assert [one.id for one in shelf.claim(store, "second", 1026.0, 1)] == ["b0"]
    assert [one.id for one in shelf.claim(store, "first", 1026.0, 9)] == ["b1"]
    shelf.release(store, "first")
    assert [one.id for one in shelf.claim(store, "second", 1026.0, 9)] == ["b0", "b1"]
    shelf.release(store, None)
    assert len(shelf.claim(store, "third", 0.5, 9)) == 2


def test_a_tenant_has_only_so_many_open_ones(store: Shelf) -> None:
    made = [make(store, f"b{index}") for index in range(3)]
    extra = Stored("b9", "batch", "ada", 1.0, NEVER, state.encode(made[0]))
    assert not shelf.create(store, extra, 3)
    make(store, "of-bob", "bob")
    shelf.save(store, state.moved(made[0], "failed", 5.0), "ada")
    assert shelf.create(store, extra, 3)


def test_a_line_has_one_result_whoever_says_so(store: Shelf) -> None:
    batch = make(store, "b")
    used = store.used
    shelf.record(store, "b", 1, b"first", failed=False)
    shelf.record(store, "b", 1, b"second", failed=True)
    shelf.record(store, "b", 2, b"wrong", failed=True)
    shelf.record(store, "none", 1, b"nobody's", failed=True)
    assert (shelf.done(store, "b"), shelf.counts(store, "b")) == ({1, 2}, (1, 1))
    assert store.used > used
    before = store.used
    store.measure()
    assert store.used == before
    shelf.finish(store, state.moved(batch, "completed", 5.0), "ada", files(batch))
    assert (store.piece("file-out", 0), store.piece("file-err", 0)) == (b"first\n", b"wrong\n")
    assert shelf.claim(store, "first", 1e9, 9) == []
    shelf.record(store, "b", 3, b"late", failed=False)
    assert shelf.done(store, "b") == set()


def test_output_of_any_size_is_whole_and_in_order_and_counts_as_what_it_is(store: Shelf) -> None:
    batch = make(store, "b")
    rows = [json.dumps({"n": number, "x": "y" * 9000}).encode() for number in range(150)]
    for number in reversed(range(150)):
        shelf.record(store, "b", number, rows[number], failed=False)
    shelf.finish(store, state.moved(batch, "completed", 5.0), "ada", files(batch))
    parts = []
    while (piece := store.piece("file-out", len(parts))) is not None:
        parts.append(piece)
    assert b"".join(parts) == b"".join(row + b"\n" for row in rows)
    assert [len(part) for part in parts[:-1]] == [PIECE] * (len(parts) - 1)
    assert store.get("file", "file-err", "ada", 0.0) is None
    found = store.get("file", "file-out", "ada", 0.0)
    assert found is not None
    assert json.loads(found.body)["bytes"] == len(b"".join(parts))
    assert len(b"".join(parts)) < store.used < len(b"".join(parts)) + 4000


def test_a_full_store_takes_no_result_and_still_ends_a_batch(store: Shelf) -> None:
    batch = make(store, "b")
    shelf.record(store, "b", 1, b"x" * 3_000_000, failed=False)
    with pytest.raises(StoreFull):
        shelf.record(store, "b", 2, b"x" * 2_000_000, failed=False)
    shelf.finish(store, state.moved(batch, "completed", 5.0), "ada", files(batch))
    assert store.get("file", "file-out", "ada", 0.0) is not None


def test_cancelling_is_seen_by_whoever_begins_it(store: Shelf) -> None:
    batch = make(store, "b")
    told = shelf.cancel(store, "b", "ada", 7.0)
    assert told is not None
    assert (told.status, told.cancelling_at) == ("cancelling", 7)
    assert not shelf.begin(store, state.moved(batch, "in_progress", 8.0), "ada")
    assert shelf.status(store, "b", "ada") == "cancelling"
    assert shelf.cancel(store, "b", "bob", 7.0) is None
