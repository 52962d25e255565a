"""One batch that runs: its lines, one after the other and several at a time, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from tailrace.api.batches import lines, shelf, state
from tailrace.api.batches.files import new_file, new_name
from tailrace.api.batches.offline import Answer, Offline
from tailrace.api.batches.state import Batch, Status
from tailrace.api.content.database import StoreFull
from tailrace.api.content.shelf import Shelf, Stored
from tailrace.api.content.store import ContentStore
from tailrace.api.errors import HttpError
from tailrace.api.service import Service
from tailrace.terms import InvalidInput

T = TypeVar("T")
P = ParamSpec("P")
PRIORITY = 1000
"""Behind every request that somebody waits for."""
AGAIN_SECONDS = 2.0
"""After which something that failed is tried again, at the latest."""
TRIES = 3
"""How often a request that the server fails is asked."""
Slot = Callable[[Callable[[], bool]], AbstractAsyncContextManager[bool]]
"""A place among the lines that run, waited for unless it is told that nobody wants it any more: it is False then."""


class Job:
    """Belongs to one task, which `runner` begins and ends. What it must not lose is in the store."""

    def __init__(self, service: Service, store: ContentStore, stored: Stored, slot: Slot, most: int) -> None:
        """`most`: lines at a time, if there are slots for them."""
        self.batch = state.decode(stored.body)
        self.tenant = stored.tenant
        self._service = service
        self._store = store
        self._slot = slot
        self._most = most
        self._running: set[asyncio.Task[None]] = set()
        self._asking: dict[Offline, None] = {}  # in the order in which they began
        self._stop = asyncio.Event()  # no further line begins, and those that run are given up
        self._ended: Status = "completed"

    def give_way(self) -> bool:
        """Gives up the line that began last, to be asked again later. False where none runs."""
        if not self._asking:
            return False
        self._asking.popitem()[0].stop()
        return True

    def stop(self, status: Status) -> None:
        """Gives up what is not done: the batch was cancelled, or has expired."""
        if not self._stopped:
            self._ended = status
            self._stop.set()
            for offline in list(self._asking):
                offline.stop()

    async def run(self) -> None:
        """To the end of the batch. Cancelled, it can be run again, by whoever has the batch then."""
        try:
            await self._all()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _all(self) -> None:
        if self.batch.status == "validating" and not await self._validated():
            return
        if self.batch.status == "cancelling":
            self.stop("cancelled")
        elif self.batch.status == "in_progress":
            await self._lines()
        await self._finish()

    # The store, whatever it takes

    async def _stored(self, work: Callable[Concatenate[Shelf, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Does something in the store; tries until it is done, since what is not stored would be lost."""
        while True:
            try:
                return await self._store.run(work, *args, **named)
            except HttpError:
                await self._news(AGAIN_SECONDS)

    async def _news(self, seconds: float) -> None:
        """Waits so long, or until the job is stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (self._stop.wait() if not self._stopped else asyncio.sleep(seconds))

    # The input

    async def _input(self) -> AsyncIterator[tuple[int, bytes]]:
        """The lines with their numbers, from 1; those that are blank are none."""
        held, part, number = b"", 0, 0
        while True:
            piece = await self._stored(Shelf.piece, self.batch.input_file_id, part)
            part += 1
            *whole, held = (held + (piece or b"\n")).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    yield number, line.strip()
            if piece is None:
                return

    async def _validated(self) -> bool:
        """Counts the lines; False where the batch has failed for it."""
        batch, most = self.batch, self._service.settings.limits.batch_lines
        total = 0
        async for _ in self._input():
            total += 1
            if total > most:
                break
        now = self._store.clock()
        if not 0 < total <= most:
            message = "the input file has no lines" if total == 0 else f"the input file has more than {most} lines"
            error = {"code": "empty_file" if total == 0 else "too_many_lines", "message": message, "line": None,
                     "param": "input_file_id"}  # fmt: skip
            self.batch = state.moved(batch, "failed", now, error=error)
            await self._stored(lambda one: shelf.save(one, self.batch, self.tenant))
            return False
        self.batch = state.moved(batch, "in_progress", now, total=total)
        if not await self._stored(lambda one: shelf.begin(one, self.batch, self.tenant)):
            self.batch = msgspec.structs.replace(batch, status="cancelling", total=total)
        return True

    async def _lines(self) -> None:
        """Answers every line that has no result."""
        done = await self._stored(lambda one: shelf.done(one, self.batch.id))
        seen: set[str] = set()
        async for number, data in self._input():
            if self._stopped:
                break
            try:
                line = lines.read(data, self.batch.endpoint, seen)
            except InvalidInput as error:
                if number not in done:
                    await self._record(number, self._wrong(number, data, error), failed=True)
                continue
            seen.add(line.custom_id)
            if number in done:
                continue
            while len(self._running) >= self._most:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._answer(number, line))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        while self._running:
            await asyncio.gather(*self._running)
        if self._stopped and self._ended == "expired":
            await self._expire()

    @staticmethod
    def _wrong(number: int, data: bytes, error: InvalidInput) -> bytes:
        return lines.unanswered(lines.custom_id(data), number, error.code, str(error), error.param)

    async def _expire(self) -> None:
        """Every line without a result gets the error that says why."""
        done = await self._stored(lambda one: shelf.done(one, self.batch.id))
        message = "the batch's completion window ended before this request was answered"
        async for number, data in self._input():
            if number not in done:
                entry = lines.unanswered(lines.custom_id(data), number, "batch_expired", message)
                await self._record(number, entry, failed=True)

    # One line

    async def _answer(self, number: int, line: lines.Line) -> None:
        """Until it has a result, or the job is stopped. What a limit refuses for now is asked again for as long as the
        batch runs; what the server fails, a few times: it may be the request that brings the engine down."""
        tries = 0
        while True:
            async with self._slot(lambda: self._stopped) as granted:
                name = lines.new_id()
                found = await self._asked(name, line) if granted else None
            if not granted or (found is None and self._stopped):
                return
            if found is None or (found.status == 503 and (self._service.paused or self._service.slept != "awake")):
                continue  # it gave way to others, or the server's operator has ended it with all others
            tries += found.status != 429
            if found.retry_after is None or tries == TRIES:
                await self._record(number, lines.answered(name, line, found), failed=found.status != 200)
                return
            await self._news(min(found.retry_after, AGAIN_SECONDS))

    async def _asked(self, name: str, line: lines.Line) -> Answer | None:
        from tailrace.api.front import route_of

        endpoint = self.batch.endpoint
        try:
            caller = self._service.guard.again(self.batch.key, self.tenant)
            route = route_of(endpoint, "POST")
        except HttpError as error:
            return Answer(error.status, error.body())
        offline = Offline(caller, endpoint, line.body, name, PRIORITY)
        self._asking[offline] = None
        try:
            return await offline.run(self._service, route.endpoint)
        finally:
            self._asking.pop(offline, None)

    async def _record(self, number: int, data: bytes, *, failed: bool) -> None:
        """Where there is no room it waits for some; of a batch that was cancelled the answer is dropped then."""

        def work(one: Shelf) -> None:
            try:
                shelf.record(one, self.batch.id, number, data, failed=failed)
            except StoreFull:
                if not self._cancelled:
                    raise

        await self._stored(work)

    @property
    def _stopped(self) -> bool:
        return self._stop.is_set()

    @property
    def _cancelled(self) -> bool:
        return self._stopped and self._ended == "cancelled"

    # The end

    async def _finish(self) -> None:
        now, batch = self._store.clock(), self.batch
        expires = self._store.expiry(now)
        if batch.output_seconds is not None:
            expires = min(expires, now + batch.output_seconds)
        names = new_name(), new_name()

        def file(which: int) -> shelf.MakeFile:
            filename = f"{batch.id}_{('output', 'error')[which]}.jsonl"
            return lambda size: new_file(names[which], size, filename, "batch_output", self.tenant, now, expires)

        def end(one: Shelf) -> Batch:
            completed, failed = shelf.counts(one, batch.id)
            cancelled = shelf.status(one, batch.id, self.tenant) == "cancelling"
            told: Batch = state.moved(
                batch,
                "cancelled" if cancelled else self._ended,
                now,
                completed=completed,
                failed=failed,
                output_file_id=names[0] if completed else None,
                error_file_id=names[1] if failed else None,
                finalizing_at=None if cancelled else int(now),
            )
            shelf.finish(one, told, self.tenant, (file(0), file(1)))
            return told

        self.batch = await self._stored(end)
