"""Responses that run in the background: answered while nobody waits, and found in the content store then."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from tailrace.api.batches.offline import Offline
from tailrace.api.content.pages import need_store
from tailrace.api.content.shelf import Shelf, Stored
from tailrace.api.errors import HttpError, as_http
from tailrace.api.exchange import Exchange
from tailrace.api.responses.items import Item
from tailrace.api.responses.kept import Kept
from tailrace.api.responses.shape import ResponseShape
from tailrace.api.service import Plan, Service
from tailrace.terms import TailraceError

AGAIN_SECONDS = 5.0
"""After which it is tried again to store what could not be stored."""


class Background:
    """One that runs. Whoever asks for it gets it from here, until it is stored as it has ended."""

    def __init__(
        self, service: Service, plan: Plan, shape: ResponseShape, conversation: list[Item], offline: Offline
    ) -> None:
        self.tenant = offline.exchange.tenant
        self.conversation = conversation
        self.offline = offline
        self.name = plan.name
        self._service = service
        self._plan = plan
        self._shape = shape
        self._final = b""
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def shown(self) -> bytes:
        """The response as it is now."""
        status = "in_progress" if self._plan.generation.accepted else "queued"
        return self._final or msgspec.json.encode(self._shape.state(status))

    async def answered(self, data: bytes) -> str:
        """Its answer is here; it is stored by `run`."""
        self._final = data
        return ""

    async def run(self) -> None:
        """To its end, whatever that is, and into the store."""
        error: list[HttpError] = []

        async def respond(service: Service, exchange: Exchange) -> None:
            try:
                await service.respond(self._plan, exchange, self._shape, self)
            except TailraceError as found:
                error.append(as_http(found))
                raise

        answer = await self.offline.run(self._service, respond)
        if not self._final:
            if answer is None:
                told = self._shape.cancelled()
            else:
                told = self._shape.failed(error[0] if error else HttpError(500, "an internal error"))
            self._final = msgspec.json.encode(told)
        self.ended.set()
        await self._store()
        del self._service.background[self.name]

    async def _store(self) -> None:
        body = msgspec.json.encode(Kept(Raw(self._final), self.conversation))
        told = False
        while True:
            try:
                await need_store(self._service).run(
                    lambda shelf: shelf.complete("response", self.name, self.tenant, body)
                )
                return
            except HttpError as error:
                if not told:
                    print(f"tailrace: {self.name} is not stored yet: {error}", file=sys.stderr, flush=True)
                told = True
                await asyncio.sleep(AGAIN_SECONDS)


async def begin(
    service: Service, exchange: Exchange, plan: Plan, shape: ResponseShape, conversation: list[Item]
) -> None:
    """Submits it, and answers that it is queued. Raises HttpError, with nothing left behind."""
    store, head = need_store(service), shape.state("queued")
    body = msgspec.json.encode(Kept(Raw(msgspec.json.encode(head)), conversation, store.owner))
    created = float(plan.created)
    stored = Stored(
        plan.name, "response", exchange.tenant, created, store.expiry(created), body,
        model=str(head["model"]), metadata=head["metadata"],
    )  # fmt: skip
    await store.run(lambda shelf: shelf.put(stored))
    assert exchange.caller is not None
    offline = Offline(exchange.caller, exchange.path, b"", exchange.id, None, exchange.lease)
    made = Background(service, plan, shape, conversation, offline)
    try:
        service.submit(plan, offline.exchange, "responses", stored=True)
    except TailraceError:
        await store.run(_deletion(plan.name, exchange.tenant))
        raise
    service.background[plan.name] = made
    service.stay()
    made.task = asyncio.create_task(made.run(), name=plan.name)
    made.task.add_done_callback(lambda _: service.leave())
    try:
        await exchange.answer(200, msgspec.json.encode(head))
    finally:
        exchange.lease = None  # it is the response's own now


def _deletion(name: str, tenant: str) -> Callable[[Shelf], Any]:
    return lambda shelf: shelf.delete("response", name, tenant, 0.0)


async def cancel(service: Service, exchange: Exchange, name: str) -> None:
    """Ends one of the caller's that runs here; returns when it has ended."""
    running = service.background.get(name)
    if running is not None and running.tenant == exchange.tenant:
        running.offline.stop()
        await running.ended.wait()
