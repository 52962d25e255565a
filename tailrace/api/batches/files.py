"""Files: what batches are made of and what comes out of them. Their content is in pieces in the content store."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from tailrace.api.batches import shelf as batches
from tailrace.api.batches.multipart import Part, parse
from tailrace.api.content.pages import find, listed, missing, name_in, need_store, page
from tailrace.api.content.query import Query
from tailrace.api.content.shelf import NEVER, Shelf, Stored, pieces_of
from tailrace.api.exchange import Exchange
from tailrace.api.params import unsupported
from tailrace.api.service import Service
from tailrace.terms import InvalidInput

WHAT = "file"
FORM = b"multipart/form-data"
FORM_BYTES = 64 << 10
"""Most bytes of a form beside the file."""
PATIENCE = 10
"""How much longer than another body a file may take to come."""
MOST_LISTED = 10_000
LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 86400
LISTING = ("after", "limit", "order", "purpose")
FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


class FileObject(msgspec.Struct, frozen=True):
    """A file, as it is stored and shown."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    status: str = "processed"
    object: str = "file"


def new_name() -> str:
    """An id that no other file has."""
    return f"file-{os.urandom(12).hex()}"


def new_file(
    name: str, data_bytes: int, filename: str, purpose: str, tenant: str, created: float, expires: float
) -> Stored:
    """A file that is to be stored. A list finds it by its purpose, which stands in the place of a model."""
    ends = None if expires >= NEVER else int(expires)
    shown = FileObject(name, data_bytes, int(created), filename, purpose, ends)
    return Stored(name, "file", tenant, created, expires, msgspec.json.encode(shown), model=purpose, content=data_bytes)


async def create(service: Service, exchange: Exchange) -> None:
    """POST /v1/files: a form with `file` and `purpose`."""
    store = need_store(service)
    settings = service.settings
    try:
        most = settings.limits.file_bytes + FORM_BYTES
        data = await exchange.body(most, PATIENCE * settings.timeouts.body, service.bodies, kind=FORM)
        form = parse(exchange.header(b"content-type") or b"", data)
        del data
        file, expires_after = _checked(form, settings.limits.file_bytes)
        now = store.clock()
        expires = store.expiry(now) if expires_after is None else min(now + expires_after, store.expiry(now))
        stored = new_file(
            new_name(), len(file.data), (file.filename or "")[:255], "batch", exchange.tenant, now, expires
        )

        def keep(shelf: Any) -> None:
            shelf.put(stored)
            shelf.write(stored.id, pieces_of(file.data))

        store.need_room(stored.size)
        await store.run(keep)
    finally:
        exchange.release(service.bodies)
    await exchange.answer(200, stored.body)


def _checked(form: dict[str, Part], most: int) -> tuple[Part, int | None]:
    """The file, and the seconds that it is to be kept. Raises InvalidInput."""
    for name in form:
        if name not in FIELDS:
            raise InvalidInput(f"unknown parameter: {name[:64]}", param=name[:64], code="unknown_parameter")
    for name in ("file", "purpose"):
        if name not in form:
            raise InvalidInput(f"missing parameter: {name}", param=name, code="missing_required_parameter")
    purpose = form["purpose"].data[:64].decode("utf-8", "replace")
    if purpose != "batch":
        raise unsupported("purpose", f'can only be "batch", not {purpose!r}')
    if not form["file"].data:
        raise InvalidInput("the file is empty", param="file")
    if len(form["file"].data) > most:
        raise InvalidInput(f"the file has more than {most} bytes", param="file", code="request_too_large")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return form["file"], None
    if anchor is None or anchor.data != b"created_at":
        raise InvalidInput('expires_after.anchor must be "created_at"', param="expires_after.anchor")
    text = b"" if seconds is None else seconds.data
    number = int(text) if text.isdigit() and len(text) < 9 else 0
    check_seconds(number, "expires_after.seconds")
    return form["file"], number


def check_seconds(number: int, param: str) -> None:
    """Raises InvalidInput unless a file may be kept so long."""
    if not LEAST_SECONDS <= number <= MOST_SECONDS:
        raise InvalidInput(f"{param} must be between {LEAST_SECONDS} and {MOST_SECONDS}", param=param)


async def listing(service: Service, exchange: Exchange) -> None:
    """GET /v1/files."""
    query = Query(exchange, LISTING)
    query.values["model"] = query.values.pop("purpose", "")
    if not query.values["model"]:
        del query.values["model"]
    wanted = query.page("file", exchange.tenant, "desc", most=MOST_LISTED, default=MOST_LISTED)
    rows, more = await page(service, wanted)
    shown = [msgspec.json.decode(row.body) for row in rows]
    await exchange.answer(200, msgspec.json.encode(listed(shown, more=more)))


async def get(service: Service, exchange: Exchange) -> None:
    """GET /v1/files/{id}."""
    stored = await find(service, exchange, "file", name_in(exchange), WHAT)
    await exchange.answer(200, stored.body)


async def content(service: Service, exchange: Exchange) -> None:
    """GET /v1/files/{id}/content: the file itself, a piece at a time."""
    name = name_in(exchange, -2)
    await find(service, exchange, "file", name, WHAT)
    store = need_store(service)
    await exchange.begin(200, [(b"content-type", b"application/octet-stream")])
    part = 0
    while True:
        piece = await store.run(Shelf.piece, name, part)
        if piece is None:
            break
        await exchange.write(piece)
        part += 1
    await exchange.write(b"", more=False)


async def delete(service: Service, exchange: Exchange) -> None:
    """DELETE /v1/files/{id}. Refused while a batch reads it."""
    name, store = name_in(exchange), need_store(service)
    now = store.clock()
    if reader := await store.run(lambda shelf: batches.reader_of(shelf, name, exchange.tenant)):
        raise InvalidInput(f"{reader} still reads this file: cancel it, or wait until it has ended", param="id")
    if not await store.run(lambda shelf: shelf.delete("file", name, exchange.tenant, now)):
        raise missing(WHAT, name)
    await exchange.answer(200, msgspec.json.encode({"id": name, "object": "file", "deleted": True}))
