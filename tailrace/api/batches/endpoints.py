"""The endpoints of batches."""

from __future__ import annotations

import os
import re

import msgspec

from tailrace.api.batches import shelf, state
from tailrace.api.batches.files import check_seconds
from tailrace.api.batches.state import Batch
from tailrace.api.content.chats import check_labels
from tailrace.api.content.pages import find, listed, missing, name_in, need_store, page
from tailrace.api.content.query import Query
from tailrace.api.content.shelf import Stored
from tailrace.api.endpoints import read
from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.api.params import unsupported
from tailrace.api.schema import Body
from tailrace.api.service import Service
from tailrace.terms import InvalidInput

WHAT = "batch"
LISTING = ("after", "limit")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
WINDOW = re.compile(r"(\d{1,6})([smhd])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_WINDOW = 30 * 86400


class OutputExpiry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When what comes out is deleted."""

    anchor: str
    seconds: int


class Create(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


CREATE = msgspec.json.Decoder(Create)


async def create(service: Service, exchange: Exchange) -> None:
    """POST /v1/batches."""
    store = need_store(service)
    body = await read(service, exchange, CREATE)
    window = check(body)
    try:
        file = await find(service, exchange, "file", body.input_file_id, "file")
    except HttpError as error:
        error.param = "input_file_id"
        raise
    if file.model != "batch":
        raise InvalidInput('input_file_id must be a file with the purpose "batch"', param="input_file_id")
    now = store.clock()
    if file.expires < now + window:
        raise InvalidInput("the input file is deleted before the completion window ends", param="completion_window")
    caller = exchange.caller
    assert caller is not None
    batch = Batch(
        id=f"batch_{os.urandom(12).hex()}",
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=int(now),
        expires_at=int(now + window),
        key=caller.key,
        group=caller.group,
        output_seconds=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    stored = Stored(
        batch.id, "batch", exchange.tenant, now, store.expiry(now + window), state.encode(batch), metadata=body.metadata
    )
    most = service.settings.limits.batches
    if not await store.run(lambda one: shelf.create(one, stored, most)):
        raise HttpError(
            429,
            f"{most} batches are not done yet, more are not possible: wait for one, or cancel one",
            kind="rate_limit_error",
            code="too_many_batches",
            retry_after=60.0,
        )
    if service.batches is not None:
        service.batches.poke()
    await exchange.answer(200, msgspec.json.encode(state.shown(batch, body.metadata, (0, 0))))


def check(body: Create) -> int:
    """Seconds of the completion window. Raises InvalidInput."""
    from tailrace.api.front import route_of

    if body.endpoint not in ENDPOINTS:
        raise InvalidInput(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    try:
        route_of(body.endpoint, "POST")
    except HttpError:
        raise unsupported("endpoint", f"{body.endpoint} is not served here") from None
    if body.metadata is not None:
        check_labels(body.metadata)
    expiry = body.output_expires_after
    if expiry is not None:
        if expiry.anchor != "created_at":
            raise InvalidInput('output_expires_after.anchor must be "created_at"', param="output_expires_after.anchor")
        check_seconds(expiry.seconds, "output_expires_after.seconds")
    found = WINDOW.fullmatch(body.completion_window)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_WINDOW:
        raise InvalidInput("completion_window is a time such as 24h, and at most 30d", param="completion_window")
    return seconds


async def _shown(service: Service, stored: Stored) -> dict[str, object]:
    batch, counts = state.decode(stored.body), None
    if batch.open:
        counts = await need_store(service).run(lambda one: shelf.counts(one, batch.id))
    return state.shown(batch, stored.metadata, counts)


async def get(service: Service, exchange: Exchange) -> None:
    """GET /v1/batches/{id}."""
    stored = await find(service, exchange, "batch", name_in(exchange), WHAT)
    await exchange.answer(200, msgspec.json.encode(await _shown(service, stored)))


async def listing(service: Service, exchange: Exchange) -> None:
    """GET /v1/batches."""
    query = Query(exchange, LISTING)
    rows, more = await page(service, query.page("batch", exchange.tenant, "desc"))
    shown = [await _shown(service, row) for row in rows]
    await exchange.answer(200, msgspec.json.encode(listed(shown, more=more)))


async def cancel(service: Service, exchange: Exchange) -> None:
    """POST /v1/batches/{id}/cancel: what runs is given up, what was answered stays."""
    name, store = name_in(exchange, -2), need_store(service)
    now = store.clock()
    batch = await store.run(lambda one: shelf.cancel(one, name, exchange.tenant, now))
    if batch is None:
        raise missing(WHAT, name)
    if batch.status != "cancelling":
        raise InvalidInput(f"{name} is {batch.status} and cannot be cancelled", param="id")
    if service.batches is not None:
        service.batches.cancel(name)
    stored = await find(service, exchange, "batch", name, WHAT)
    await exchange.answer(200, msgspec.json.encode(await _shown(service, stored)))
