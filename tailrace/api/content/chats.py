"""Chat completions that were asked to be stored (`store: true`), and the endpoints that find them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, UnsetType

from tailrace.api.content.keep import Keeper
from tailrace.api.content.pages import find, listed, missing, name_in, need_store, page, sliced
from tailrace.api.content.query import Query
from tailrace.api.content.shelf import Stored
from tailrace.api.endpoints import read
from tailrace.api.exchange import Exchange
from tailrace.api.messages import text_size
from tailrace.api.params import given
from tailrace.api.schema import Body, Chat, Message
from tailrace.api.service import Plan, Service
from tailrace.terms import InvalidInput

WHAT = "chat completion"
PAGE = ("after", "limit", "order")
LISTING = (*PAGE, "model")
LEAST = 1000
"""Bytes of an answer without text."""
ECHOED = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "tools", "tool_choice", "response_format",
)  # fmt: skip
"""What a stored completion says of its request, where it was given."""


class Update(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions/{id}."""

    metadata: dict[str, str]


UPDATE = msgspec.json.Decoder(Update)


class Kept(msgspec.Struct, frozen=True):
    """What is stored: the answer as the client got it, what was asked beside the messages, and these."""

    completion: Raw
    asked: dict[str, Any]
    messages: list[dict[str, Any]]


def keeper(service: Service, exchange: Exchange, plan: Plan, body: Chat) -> Keeper:
    """Stores the answer of a chat. Raises HttpError 507 where there is no room."""
    store = need_store(service)
    asked = {name: _plain(getattr(body, name)) for name in ECHOED}
    messages = [_message(message, f"{plan.name}-{index}") for index, message in enumerate(body.messages)]
    store.need_room(text_size(body.messages) + LEAST)

    def make(data: bytes) -> bytes:
        kept = Kept(Raw(data), {name: value for name, value in asked.items() if value is not None}, messages)
        return msgspec.json.encode(kept)

    return Keeper(
        store, "chat", plan.name, exchange.tenant, make,
        created=time.time(), model=body.model, metadata=body.metadata or {},
    )  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Raw | UnsetType):
        data = given(value)
        return None if data is None else msgspec.json.decode(data)
    return value


def _message(message: Message, name: str) -> dict[str, Any]:
    """A message as it is listed. Content in parts is in `content_parts`."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(message))
    parts = plain["content"] if isinstance(plain.get("content"), list) else None
    shown = {key: value for key, value in plain.items() if value is not None}
    return {**shown, "id": name, "content": None if parts else plain.get("content"), "content_parts": parts}


def _shown(stored: Stored) -> dict[str, Any]:
    kept = msgspec.json.decode(stored.body, type=Kept)
    completion: dict[str, Any] = msgspec.json.decode(kept.completion)
    return {**kept.asked, **completion, "metadata": stored.metadata or {}}


async def get(service: Service, exchange: Exchange) -> None:
    """GET /v1/chat/completions/{id}."""
    Query(exchange, ())
    stored = await find(service, exchange, "chat", name_in(exchange), WHAT)
    await exchange.answer(200, msgspec.json.encode(_shown(stored)))


async def update(service: Service, exchange: Exchange) -> None:
    """POST /v1/chat/completions/{id}: other metadata."""
    body = await read(service, exchange, UPDATE)
    check_labels(body.metadata)
    name = name_in(exchange)
    stored = await find(service, exchange, "chat", name, WHAT)
    await need_store(service).run(lambda shelf: shelf.relabel("chat", name, exchange.tenant, body.metadata))
    answer = {**_shown(stored), "metadata": body.metadata}
    await exchange.answer(200, msgspec.json.encode(answer))


async def delete(service: Service, exchange: Exchange) -> None:
    """DELETE /v1/chat/completions/{id}."""
    name, store = name_in(exchange), need_store(service)
    now = store.clock()
    if not await store.run(lambda shelf: shelf.delete("chat", name, exchange.tenant, now)):
        raise missing(WHAT, name)
    await exchange.answer(200, msgspec.json.encode({"id": name, "object": "chat.completion.deleted", "deleted": True}))


async def listing(service: Service, exchange: Exchange) -> None:
    """GET /v1/chat/completions: those that are stored."""
    query = Query(exchange, LISTING, labels=True)
    rows, more = await page(service, query.page("chat", exchange.tenant, "asc"))
    await exchange.answer(200, msgspec.json.encode(listed([_shown(row) for row in rows], more=more)))


async def messages(service: Service, exchange: Exchange) -> None:
    """GET /v1/chat/completions/{id}/messages: those of the request."""
    query = Query(exchange, PAGE)
    stored = await find(service, exchange, "chat", name_in(exchange, -2), WHAT)
    rows: Sequence[dict[str, Any]] = msgspec.json.decode(stored.body, type=Kept).messages
    await exchange.answer(200, msgspec.json.encode(sliced(rows, query, "asc")))


def check_labels(metadata: dict[str, str]) -> None:
    """Raises InvalidInput where metadata is more than OpenAI takes."""
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise InvalidInput("metadata can have 16 entries, keys of 64 and values of 512 characters", param="metadata")
