"""The content store by itself, over SQLite and over PostgreSQL."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.api.content.database import Sqlite, StoreDown, StoreFull, check
from tailrace.api.content.shelf import NEVER, Filter, Stored, pieces_of
from tailrace.api.content.store import ContentStore
from tailrace.api.errors import HttpError
from tailrace.terms import InvalidInput
from tests import postgres

ONE = Stored("r1", "response", "ada", 100.0, NEVER, b'{"a":1}', "stand", {"k": "v"})


def within(url: str, work: Callable[[ContentStore], Awaitable[None]], **options: object) -> None:
    """Does something with an open store."""

    async def main() -> None:
        store = ContentStore(url, **options)  # type: ignore[arg-type]
        try:
            await store.open()
            await work(store)
        finally:
            await store.close()

    asyncio.run(main())


def test_what_is_put_is_found_by_its_tenant_alone_and_after_a_restart(store_url: str) -> None:
    async def put(store: ContentStore) -> None:
        await store.run(lambda shelf: shelf.put(ONE))

    async def look(store: ContentStore) -> None:
        assert store.used == ONE.size
        assert await store.run(lambda shelf: shelf.get("response", "r1", "ada", 200.0)) == ONE
        for kind, name, tenant in (("response", "r1", "bob"), ("chat", "r1", "ada"), ("response", "r2", "ada")):
            assert await store.run(lambda shelf, k=kind, n=name, t=tenant: shelf.get(k, n, t, 200.0)) is None
        assert not await store.run(lambda shelf: shelf.delete("response", "r1", "bob", 200.0))
        assert await store.run(lambda shelf: shelf.delete("response", "r1", "ada", 200.0))
        assert await store.run(lambda shelf: shelf.get("response", "r1", "ada", 200.0)) is None
        assert store.used == 0

    within(store_url, put)
    within(store_url, look)


def test_a_transaction_is_all_or_nothing(store_url: str) -> None:
    async def work(store: ContentStore) -> None:
        def fail(shelf: object) -> None:
            shelf.put(ONE)  # type: ignore[attr-defined]
            raise ValueError

        with pytest.raises(ValueError):  # noqa: PT011 - ours
            await store.run(fail)
        assert store.used == 0
        assert await store.run(lambda shelf: shelf.get("response", "r1", "ada", 0.0)) is None

    within(store_url, work)


def test_what_has_expired_is_not_found_and_is_deleted(store_url: str) -> None:
    now = [100.0]

    async def work(store: ContentStore) -> None:
        assert store.expiry(100.0) == 160.0
        for index in range(450):
            one = replace(ONE, id=f"f{index}", kind="file", expires=store.expiry(100.0 + index % 2 * 1000))
            await store.run(lambda shelf, one=one: (shelf.put(one), shelf.write(one.id, pieces_of(b"x"))))
        assert await store.sweep() == 0
        now[0] = 161.0
        assert await store.run(lambda shelf: shelf.get("file", "f0", "ada", now[0])) is None
        assert await store.sweep() == 225
        assert store.used == 225 * ONE.size
        assert await store.run(lambda shelf: shelf.piece("f0", 0)) is None
        assert await store.run(lambda shelf: shelf.piece("f1", 0)) == b"x"

    within(store_url, work, retention=60.0, clock=lambda: now[0])


def test_pages_go_both_ways_and_filter(store_url: str) -> None:
    async def work(store: ContentStore) -> None:
        for index in range(25):
            labels = {"odd": str(index % 2)}
            one = replace(ONE, id=f"r{index:02}", created=100.0 + index // 3, metadata=labels, model=f"m{index % 3}")
            await store.run(lambda shelf, one=one: shelf.put(one))
        await store.run(lambda shelf: shelf.put(replace(ONE, id="r99", tenant="bob")))

        async def ids(wanted: Filter) -> list[str]:
            found: list[str] = []
            while True:
                page = await store.run(lambda shelf: shelf.page(wanted_now, 0.0)) if (wanted_now := wanted) else None
                assert page is not None
                found += [row.id for row in page[0]]
                assert len(page[0]) == wanted.limit or not page[1]
                if not page[1]:
                    return found
                wanted = replace(wanted, after=found[-1])

        everything = [f"r{index:02}" for index in range(25)]
        for limit in (1, 7, 25, 100):
            assert await ids(Filter("response", "ada", limit, order="asc")) == everything
            assert await ids(Filter("response", "ada", limit)) == everything[::-1]
        assert await ids(Filter("response", "ada", 3, order="asc", metadata={"odd": "1"})) == everything[1::2]
        assert await ids(Filter("response", "ada", 3, order="asc", model="m2")) == everything[2::3]
        assert await store.run(lambda shelf: shelf.page(Filter("response", "ada", 3, after="r99"), 0.0)) is None

    within(store_url, work)


def test_a_page_of_large_objects_is_short(store_url: str) -> None:
    async def work(store: ContentStore) -> None:
        for index in range(5):
            one = replace(ONE, id=f"r{index}", body=b"x" * (3 << 20))
            await store.run(lambda shelf, one=one: shelf.put(one))
        first = await store.run(lambda shelf: shelf.page(Filter("response", "ada", 9, order="asc"), 0.0))
        assert first is not None
        assert ([one.id for one in first[0]], first[1]) == (["r0", "r1"], True)
        rest = await store.run(lambda shelf: shelf.page(Filter("response", "ada", 9, "r3", "asc"), 0.0))
        assert rest is not None
        assert ([one.id for one in rest[0]], rest[1]) == (["r4"], False)

    within(store_url, work)


def test_the_bound_is_kept_and_room_comes_back(store_url: str) -> None:
    async def work(store: ContentStore) -> None:
        big = replace(ONE, body=b"x" * 40_000)
        await store.run(lambda shelf: shelf.put(big))
        with pytest.raises(HttpError) as full:
            await store.run(lambda shelf: shelf.put(replace(big, id="r2")))
        assert (full.value.status, full.value.code) == (507, "content_store_full")
        assert store.used == big.size
        with pytest.raises(HttpError):
            store.need_room(40_000)
        store.need_room(1000)
        await store.run(lambda shelf: shelf.delete("response", "r1", "ada", 0.0))
        await store.run(lambda shelf: shelf.put(replace(big, id="r2")))

    within(store_url, work, most_bytes=70_000)


def test_the_loop_goes_on_while_the_database_works(store_url: str) -> None:
    async def work(store: ContentStore) -> None:
        from threading import Event

        held, ticks = Event(), 0
        waiting = asyncio.create_task(store.run(lambda _shelf: held.wait(20.0)))
        for _ in range(50):
            await asyncio.sleep(0)
            ticks += 1
        assert not waiting.done()
        held.set()
        assert await waiting
        assert ticks == 50

    within(store_url, work)


def test_an_answer_that_was_committed_survives_the_end_of_the_process(tmp_path: Path) -> None:
    code = f"""
import asyncio, os
from tests.api.content.test_store import ONE, ContentStore
async def main():
    store = ContentStore("sqlite:////{tmp_path}/c.db")
    await store.open()
    await store.run(lambda shelf: shelf.put(ONE))
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr

    async def look(store: ContentStore) -> None:
        assert await store.run(lambda shelf: shelf.get("response", "r1", "ada", 0.0)) == ONE

    within(f"sqlite:////{tmp_path}/c.db", look)


def test_a_full_disk_is_full_and_nothing_is_half_written(tmp_path: Path) -> None:
    database = Sqlite(tmp_path / "c.db", 1)  # the smallest file that there is: 64 pages
    database.execute("CREATE TABLE t (data BLOB)")
    database.commit()
    database.execute("INSERT INTO t VALUES (?)", (b"x",))
    with pytest.raises(StoreFull):
        database.execute("INSERT INTO t VALUES (?)", (b"x" * 500_000,))
    database.rollback()
    assert database.execute("SELECT COUNT(*) FROM t") == [(0,)]
    database.rollback()
    database.close()


def test_the_file_is_the_owners_and_one_servers_and_forgets(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.db"
    secret = b"a secret that nobody should find " * 50

    async def work(store: ContentStore) -> None:
        assert path.stat().st_mode & 0o777 == 0o600
        await store.run(lambda shelf: shelf.put(replace(ONE, body=secret)))
        other = ContentStore(f"sqlite:////{path}")
        with pytest.raises(StoreDown, match="in use by another server"):
            await other.open()
        await other.close()
        await store.run(lambda shelf: shelf.delete("response", "r1", "ada", 0.0))
        await store.run(lambda shelf: shelf.database.tidy())

    within(f"sqlite:////{path}", work)
    assert all(secret[:30] not in file.read_bytes() for file in path.parent.iterdir())


def test_a_later_versions_store_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "later.db") as later:
        later.execute("CREATE TABLE tailrace_content (version INTEGER NOT NULL)")
        later.execute("INSERT INTO tailrace_content VALUES (99)")
    later.close()
    (tmp_path / "broken.db").write_bytes(b"no database" * 1000)
    for name, why in (("later", "later version"), ("broken", "does not work")):
        with pytest.raises(StoreDown, match=why):
            within(f"sqlite:////{tmp_path}/{name}.db", lambda _store: asyncio.sleep(0))
    with pytest.raises(StoreDown, match="cannot be opened"):
        within(f"sqlite:////{tmp_path}/later.db/x/c.db", lambda _store: asyncio.sleep(0))


def test_a_postgresql_that_comes_back_is_used_again(postgresql: postgres.Server) -> None:
    server = postgresql

    async def work(store: ContentStore) -> None:
        one = replace(ONE, id="again")
        await store.run(lambda shelf: shelf.put(one))
        server.stop()
        server.start()
        assert await store.run(lambda shelf: shelf.get("response", "again", "ada", 0.0)) == one  # a connection was lost
        server.stop()
        with pytest.raises(HttpError) as down:
            await store.run(lambda shelf: shelf.get("response", "again", "ada", 0.0))
        assert (down.value.status, down.value.code) == (503, "content_store_unavailable")
        server.start()
        assert await store.run(lambda shelf: shelf.get("response", "again", "ada", 0.0)) == one

    within(server.url, work)


@pytest.mark.parametrize("url", ["", "c.db", "mysql://x/y", "sqlite://c.db", "sqlite:///", "sqlite:///dir/"])
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(url)
    assert refused.value.param == "content_store"


def test_a_server_without_a_store_imports_nothing_of_it() -> None:
    code = (
        "import sys, tailrace.api.front, tailrace.api.connection; print([m for m in sys.modules if 'sqlite3' in m or "
    )
    code += "m.startswith(('tailrace.api.content', 'tailrace.api.batches', 'tailrace.api.responses', 'psycopg'))])"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == "[]"
