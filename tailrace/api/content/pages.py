"""What endpoints of stored things share: the store itself, what is not there, and lists as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.api.content.query import Query
from tailrace.api.content.shelf import Filter, Kind, Stored
from tailrace.api.content.store import ContentStore
from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.api.service import Service
from tailrace.terms import InvalidInput


def need_store(service: Service) -> ContentStore:
    """The store. Raises HttpError 404 where the server has none, so nothing can be found."""
    if service.content is None:
        raise HttpError(
            404, "this server stores nothing: it was started without --content-store", code="no_content_store"
        )
    return service.content


def name_in(exchange: Exchange, place: int = -1) -> str:
    """A segment of the path: the id that it names."""
    return exchange.path.split("/")[place]


def missing(kind: str, name: str) -> HttpError:
    """404. What another tenant has is not there either."""
    shown = name if len(name) <= 80 else name[:80] + "..."
    return HttpError(404, f"there is no {kind} {shown!r} here", param="id", code="not_found")


async def find(service: Service, exchange: Exchange, kind: Kind, name: str, what: str) -> Stored:
    """An object of the caller's. Raises HttpError 404, 503."""
    store = need_store(service)
    now = store.clock()
    found = await store.run(lambda shelf: shelf.get(kind, name, exchange.tenant, now))
    if found is None:
        raise missing(what, name)
    return found


async def page(service: Service, wanted: Filter) -> tuple[list[Stored], bool]:
    """A page of objects, and whether there are more. Raises InvalidInput, HttpError."""
    store = need_store(service)
    now = store.clock()
    found = await store.run(lambda shelf: shelf.page(wanted, now))
    if found is None:
        raise InvalidInput("after is the id of none of them", param="after")
    return found


def listed(rows: Sequence[Mapping[str, Any]], *, more: bool) -> dict[str, Any]:
    """A list of things that each have an id."""
    return {
        "object": "list",
        "data": rows,
        "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None,
        "has_more": more,
    }


def sliced(rows: Sequence[Mapping[str, Any]], query: Query, order: str) -> dict[str, Any]:
    """A page of what is one object's own list, oldest first. Raises InvalidInput."""
    turned = list(rows) if query.order("asc" if order == "asc" else "desc") == "asc" else list(reversed(rows))
    after, start = query.values.get("after"), 0
    if after is not None:
        names = [row["id"] for row in turned]
        if after not in names:
            raise InvalidInput("after is the id of none of them", param="after")
        start = names.index(after) + 1
    end = start + query.limit()
    return listed(turned[start:end], more=end < len(turned))
