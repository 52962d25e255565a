"""All batches of one server: which of them are its own, and when another line of theirs may begin.

Several servers may share a content store. A batch belongs to the one that says so every few seconds, and to another one
when it says nothing more.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from tailrace.api.batches import shelf, state
from tailrace.api.batches.job import Job
from tailrace.api.content.shelf import Shelf, Stored
from tailrace.api.content.store import ContentStore
from tailrace.api.errors import HttpError
from tailrace.api.service import Service

RENEW_SECONDS = shelf.LEASE_SECONDS / 3
LOOK_SECONDS = 0.02
"""Between two looks at whether the server is idle, while a line waits for that."""
GIVE_WAY_SECONDS = 0.1
"""Between two looks at whether others lack what lines hold; what they lack at two of them they get."""
MOST_JOBS = 16
"""Batches that run at a time, in turns; further ones wait."""


class Runner:
    """Belongs to the server's loop."""

    def __init__(self, service: Service, store: ContentStore) -> None:
        self._service = service
        self._store = store
        self._owner = store.owner
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()  # whoever waits longest goes first, so that batches take turns
        self.lines = 0
        """Lines that run."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def parallel(self) -> int:
        """Requests that may run, whosever they are, when a line begins beside them."""
        return max(1, min(self._service.settings.limits.batch_parallel, self._service.settings.max_running // 2))

    def start(self) -> None:
        """Goes on with what there is to do."""
        self._tasks = [
            asyncio.create_task(self._run(), name="batches"),
            asyncio.create_task(self._give_way(), name="batches give way"),
        ]

    def poke(self) -> None:
        """Something has changed in the store."""
        self._news.set()

    def cancel(self, name: str) -> None:
        """A batch was marked as one to be cancelled."""
        if name in self._jobs:
            self._jobs[name][0].stop("cancelled")
        self.poke()

    async def stop(self) -> None:
        """Gives up all lines that run, and leaves the batches to whoever comes next."""
        if not self._tasks:
            return
        tasks = [*self._tasks, *(task for _, task in self._jobs.values())]
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(HttpError):
            await self._store.run(lambda one: shelf.release(one, self._owner))

    async def _run(self) -> None:
        if self._store.exclusive:
            await self._try(lambda one: shelf.release(one, None))  # whoever had them has ended
        while True:
            now = self._store.clock()
            mine = await self._try(partial(shelf.claim, owner=self._owner, now=now, most=MOST_JOBS))
            if mine is not None:
                self._follow(mine)
            for job, _ in self._jobs.values():
                if now >= job.batch.expires_at:
                    job.stop("expired")
            ends = [job.batch.expires_at - now for job, _ in self._jobs.values() if job.batch.expires_at > now]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min([RENEW_SECONDS, *ends]))):
                    await self._news.wait()
            self._news.clear()

    async def _try(self, work: Callable[[Shelf], list[Stored] | None]) -> list[Stored] | None:
        """What the store says; None while it does not work, which its own sweep reports."""
        try:
            return await self._store.run(work)
        except HttpError:
            return None

    def _follow(self, mine: list[Stored]) -> None:
        """Begins those that are new, and gives up those that another server has taken."""
        names = {stored.id for stored in mine}
        for name, (_, task) in list(self._jobs.items()):
            if name not in names:
                task.cancel()
        for stored in mine:
            if stored.id not in self._jobs:
                job = Job(self._service, self._store, stored, self._slot, self.parallel)
                task = asyncio.create_task(job.run(), name=stored.id)
                self._jobs[stored.id] = (job, task)
                task.add_done_callback(partial(self._ended, stored.id))
            elif state.decode(stored.body).status == "cancelling":
                self._jobs[stored.id][0].stop("cancelled")

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._jobs[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error, file=sys.stderr)  # a fault of ours; it is tried again
        else:
            self.poke()

    @asynccontextmanager
    async def _slot(self, unwanted: Callable[[], bool]) -> AsyncIterator[bool]:
        async with self._turn:
            while not unwanted() and not self._idle:
                await asyncio.sleep(LOOK_SECONDS)
            granted = not unwanted()
            self.lines += granted
        try:
            yield granted
        finally:
            self.lines -= granted

    async def _give_way(self) -> None:
        """Gives up lines, one after the other, while a request that somebody waits for finds no pages or no slot beside
        them: the engine takes neither from a request that runs."""
        before: set[str] = set()
        while True:
            await asyncio.sleep(GIVE_WAY_SECONDS)
            waiting = self._pressed() if self.lines else set()
            if waiting & before:
                for job, _ in reversed(self._jobs.values()):
                    if job.give_way():
                        break
            before = waiting

    def _pressed(self) -> set[str]:
        """Requests of others that lack pages or a slot, as far as can be told from here."""
        service, gauges = self._service, self._service.client.gauges
        ready = service.client.ready
        if ready is None:
            return set()
        service.settle()
        free = gauges.pages - gauges.used_pages - gauges.pinned_pages - gauges.running
        full = gauges.running >= ready.max_running
        return {
            choice.request
            for exchange, plan in service.exchanges.items()
            for choice in plan.generation.choices
            if exchange.priority is None
            and choice.finish is None
            and not service.admitted(choice)
            and (full or len(choice.prompt) // ready.page_size + 1 > free)
        }

    @property
    def _idle(self) -> bool:
        """Whether there is room for a line beside the requests that somebody waits for."""
        service = self._service
        if not service.ready:
            return False
        others = sum(exchange.priority is None for exchange in service.exchanges)
        return self.lines + others < self.parallel and not self._pressed()
