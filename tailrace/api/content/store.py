"""The event loop's side of the content store: one thread does all that touches the database, so nothing else waits.

What fails in the database is an error of the request that needed it: 507 where there is no room, 503 where it does not
work. What expires is deleted within a minute.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from tailrace.api.content.database import Database, StoreDown, StoreFull, connect
from tailrace.api.content.shelf import NEVER, Shelf
from tailrace.api.errors import HttpError

T = TypeVar("T")
P = ParamSpec("P")
SWEEP_SECONDS = 30.0
BEAT_SECONDS = 5.0
GONE_SECONDS = 20.0
"""After which a server that has said nothing is taken to have ended."""
LOTS = 50
"""Lots of objects that one sweep deletes at most, so that others get their turn between them."""


class ContentStore:
    """Opened once, before anything is served from it. All methods belong to the loop's thread."""

    def __init__(
        self,
        url: str,
        *,
        retention: float = 30 * 86400.0,
        most_bytes: int = 1 << 30,
        report: Callable[[str], object] = lambda _line: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`retention`: seconds after which what is stored is deleted; 0 is never. `report` hears of what fails beside
        any request."""
        self.owner = os.urandom(12).hex()
        """What this server calls itself where several share the store."""
        self.retention = retention
        self.clock = clock
        self._report = report
        self._database: Database = connect(url, most_bytes)
        self._shelf = Shelf(self._database, most_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="content")
        self._tasks: list[asyncio.Task[None]] = []
        self._failing = False
        self._failures = 0

    async def open(self) -> None:
        """Makes ready. Raises StoreDown or StoreFull."""
        await self._in_thread(lambda shelf: shelf.prepare())
        self._tasks = [asyncio.create_task(self._sweep_for_ever(), name="content")]
        if not self.exclusive:
            self._tasks.append(asyncio.create_task(self._beat_for_ever(), name="content beat"))

    async def close(self) -> None:
        """Lets what has begun end, and closes the database."""
        for task in self._tasks:
            task.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        self._thread.shutdown(wait=False)

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._shelf.used

    def numbers(self) -> dict[str, int]:
        """For metrics."""
        return {"bytes": self._shelf.used, "limit_bytes": self._shelf.most_bytes, "failures": self._failures}

    @property
    def exclusive(self) -> bool:
        """Whether no other server has it."""
        return self._database.exclusive

    def expiry(self, created: float) -> float:
        """When what was made then is to be deleted."""
        return created + self.retention if self.retention else NEVER

    def need_room(self, size: int = 0) -> None:
        """Raises HttpError 507 where there is certainly no room for so many bytes."""
        try:
            self._shelf.room(size)
        except StoreFull as error:
            self._failures += 1
            raise _http(error) from None

    async def run(self, work: Callable[Concatenate[Shelf, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Does something in one transaction: all of it or nothing. Raises HttpError 507 or 503. What has begun goes on
        to its end, whatever becomes of who waits for it."""
        try:
            return await self._in_thread(lambda shelf: work(shelf, *args, **named))
        except (StoreFull, StoreDown) as error:
            self._failures += 1
            raise _http(error) from None

    async def _in_thread(self, work: Callable[[Shelf], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[Shelf], T]) -> T:
        """Once more where a connection that had worked before was lost."""
        connected = self._database.connected
        try:
            return self._once(work)
        except StoreDown:
            if not connected or self._database.connected:
                raise
            return self._once(work)

    def _once(self, work: Callable[[Shelf], T]) -> T:
        used = self._shelf.used
        try:
            result = work(self._shelf)
            self._database.commit()
        except BaseException:
            self._shelf.used = used
            self._database.rollback()
            raise
        return result

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                await self.sweep()
                self._failing = False
            except HttpError as error:
                if not self._failing:
                    self._report(f"tailrace: {error}")
                self._failing = True
            await asyncio.sleep(SWEEP_SECONDS)

    async def _beat_for_ever(self) -> None:
        while True:
            now = self.clock()
            with suppress(HttpError):  # the sweep reports it
                await self.run(Shelf.beat, self.owner, now, now - 10 * GONE_SECONDS)
            await asyncio.sleep(BEAT_SECONDS)

    async def alive(self, owner: str) -> bool:
        """Whether a server of this store still runs, as far as can be told. Raises HttpError."""
        if owner == self.owner or self.exclusive:
            return owner == self.owner
        since = self.clock() - GONE_SECONDS
        return await self.run(lambda shelf: shelf.heard(owner, since))

    async def sweep(self) -> int:
        """Deletes what has expired, and counts what there is. Returns how many objects that were."""
        gone = 0
        for _ in range(LOTS):
            now = self.clock()
            lot = await self.run(Shelf.expire, now)
            gone += lot
            if not lot:
                break
        await self.run(lambda shelf: shelf.measure())
        if gone:
            await self.run(lambda shelf: shelf.database.tidy())
        return gone


def _http(error: StoreFull | StoreDown) -> HttpError:
    if isinstance(error, StoreFull):
        return HttpError(507, str(error), kind="server_error", code="content_store_full", retry=False)
    return HttpError(503, str(error), kind="service_unavailable", code="content_store_unavailable", retry_after=5.0)
