"""Responses in the content store: each with all of the conversation that it ends, so that it does not depend on whether
the turns before it are still stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from tailrace.api.content.keep import Keeper
from tailrace.api.content.pages import find, need_store
from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.api.responses.items import Item
from tailrace.api.service import Plan, Service
from tailrace.terms import InvalidInput

RUNNING = ("queued", "in_progress")


class Kept(msgspec.Struct, frozen=True):
    """What is stored: the response as the client got it, the items that it is an answer to, and where it runs, while it
    runs in the background."""

    response: Raw
    conversation: list[Item]
    owner: str = ""


def keeper(
    service: Service, exchange: Exchange, plan: Plan, conversation: Sequence[Item], head: dict[str, Any]
) -> Keeper:
    """Stores a response. Where that fails, the response says that it is not stored."""

    def make(data: bytes) -> bytes:
        return msgspec.json.encode(Kept(Raw(data), list(conversation)))

    return Keeper(
        need_store(service), "response", plan.name, exchange.tenant, make,
        created=float(plan.created), model=str(head["model"]), metadata=head["metadata"],
        failed=lambda: head.update(store=False),
    )  # fmt: skip


async def find_response(service: Service, exchange: Exchange, name: str) -> tuple[list[Item], bytes]:
    """A stored response and the items that it is an answer to. One that ran in the background of a server that has
    ended has failed. Raises HttpError 404, 503."""
    running = service.background.get(name)
    if running is not None and running.tenant == exchange.tenant:
        return running.conversation, running.shown()
    stored = await find(service, exchange, "response", name, "response")
    found = msgspec.json.decode(stored.body, type=Kept)
    response = bytes(found.response)
    store = need_store(service)
    if found.owner and not await store.alive(found.owner):
        response = lost(response)
        body = msgspec.json.encode(Kept(Raw(response), found.conversation))
        await store.run(lambda shelf: shelf.complete("response", name, exchange.tenant, body))
    return found.conversation, response


def lost(response: bytes) -> bytes:
    """A response whose server has ended before it was answered."""
    shown: dict[str, Any] = msgspec.json.decode(response)
    error = {"code": "server_error", "message": "the server that answered it has ended"}
    return msgspec.json.encode({**shown, "status": "failed", "error": error})


async def turns(service: Service, exchange: Exchange, name: str) -> list[Item]:
    """The conversation that a response ended, with its output. Raises HttpError 404 that names the parameter, or 400
    where the response has no answer."""
    try:
        conversation, data = await find_response(service, exchange, name)
    except HttpError as error:
        if error.status == 404:
            error.param = "previous_response_id"
            error.code = "previous_response_not_found"
        raise
    response: dict[str, Any] = msgspec.json.decode(data)
    if response["status"] in RUNNING:
        raise InvalidInput(f"{name} is not answered yet", param="previous_response_id")
    return [*conversation, *response["output"]]
