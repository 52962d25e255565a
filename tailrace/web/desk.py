"""What the pages are told: a JSON endpoint for each, of a ledger, of a running server, or of both.

Every number comes from the functions that the command line prints (`usage`, `cost`, `explain`), or that `/metrics`
shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

import tailrace
from tailrace.api.content.query import Query
from tailrace.api.errors import HttpError
from tailrace.api.exchange import JSON, Exchange
from tailrace.terms import InvalidInput
from tailrace.web import files
from tailrace.web.reader import Reader

if TYPE_CHECKING:
    from tailrace.ledger.cost import Bill
    from tailrace.ledger.listing import Order, Which
    from tailrace.ledger.lookup import Story
    from tailrace.ledger.store import Ledger
    from tailrace.ledger.usage import Span, Usage
    from tailrace.web.live import Live

MOST_ROWS = 200
"""Requests of one page of the list."""
LONGEST_NAME = 256
"""Characters of a request's id that are looked for."""
EXACT = ("key", "tenant", "model", "adapter", "endpoint", "workload", "outcome")
ORDERS: dict[str, Order] = {"latest": "ended", "e2e": "e2e_us", "ttft": "ttft_us", "tpot": "tpot_us"}
"""By what the list goes down."""

Facts = dict[str, Any]
Endpoint = Callable[["Desk", Exchange], Awaitable[None]]


class Desk:
    """`facts` are what does not change: what is served, and with what. `live` is None where there is no server."""

    def __init__(self, reader: Reader | None, live: Live | None, facts: Callable[[], Facts]) -> None:
        self.live = live
        self._reader = reader
        self._facts = facts

    async def state(self, exchange: Exchange) -> None:
        """GET state: what this is a dashboard of."""
        Query(exchange, ())
        shown = None if self._reader is None else self._reader.shown
        caller = exchange.caller
        facts = {"version": tailrace.__version__, "live": self.live is not None, "ledger": shown,
                 "key": caller.key if caller is not None else "", **self._facts()}  # fmt: skip
        await answer(exchange, facts)

    async def watch(self, exchange: Exchange) -> None:
        """GET live: server-sent events, one a second."""
        Query(exchange, ())
        await self._running().watch(exchange)

    async def steps(self, exchange: Exchange) -> None:
        """GET steps?after=NUMBER: the engine's last steps, those behind a number only."""
        query = Query(exchange, ("after",))
        live = self._running()
        after = whole(query, "after") or 0
        await answer(exchange, await asyncio.to_thread(live.recent.snapshot().after, after, live.clock))

    async def requests(self, exchange: Exchange) -> None:
        """GET requests: those of the ledger, a page at a time."""
        from tailrace.ledger import listing

        query = Query(exchange, ("limit", "after", "order", "since", *EXACT, "prompt", "output"))
        size, which = query.limit(50, MOST_ROWS), which_of(query)
        order = ORDERS.get(query.values.get("order", "latest"))
        if order is None:
            raise InvalidInput(f"order is one of {', '.join(ORDERS)}", param="order")
        after = pair(query, "after")

        def read(ledger: Ledger) -> listing.Page:
            return listing.page(ledger, size, which, order, after)

        await answer(exchange, await self._ledger().ask(read))

    async def request(self, exchange: Exchange, name: str) -> None:
        """GET requests/ID: where one request's time went, and why. Of several choices, each. `soon`: it has just ended,
        and is on its way into the ledger. 404 where neither the server nor the ledger knows it."""
        Query(exchange, ())
        if len(name) > LONGEST_NAME:
            raise unknown(name)
        running = await self.live.open_request(name) if self.live is not None else []
        stories: list[Story] = []
        if self._reader is not None and not running:
            stories = await self._reader.ask(lambda ledger: _found(ledger, name))
        soon = not running and not stories
        if soon and (self._reader is None or self.live is None or not await self.live.knows(name)):
            raise unknown(name)
        ended = [await self._story(one) for one in stories]
        await answer(exchange, {"running": running, "ended": ended, "soon": soon})

    async def _story(self, story: Story) -> Facts:
        """As `explain --json` has it, with the phases in order and what is still known of its steps."""
        from tailrace.ledger.lookup import phases
        from tailrace.ledger.words import sentences

        record = msgspec.structs.asdict(story.record)
        del record["detail"]
        steps = [] if self.live is None else await self.live.steps_of(story.record)
        return {
            **record,
            "detail": story.detail,
            "ahead": story.ahead,
            "hardware": story.hardware,
            "phases": phases(story.record),
            "words": sentences(story),
            "steps": steps,
        }

    async def shapes(self, exchange: Exchange) -> None:
        """GET shapes: how many requests there were of each, input against output."""
        from tailrace.ledger import listing

        which = which_of(Query(exchange, ("since", *EXACT)))
        await answer(exchange, {"cells": await self._ledger().ask(lambda ledger: listing.shapes(ledger, which))})

    async def usage(self, exchange: Exchange) -> None:
        """GET usage?by=...: sums, as `tailrace usage` prints them."""
        from tailrace.ledger import usage

        query = Query(exchange, ("by", "since"))
        names, span = by(query), span_of(query)

        def read(ledger: Ledger) -> list[Usage]:
            return usage.usage(ledger, names, span)

        await answer(exchange, {"lines": await self._ledger().ask(read)})

    async def cost(self, exchange: Exchange) -> None:
        """GET cost?by=...: dollars, as `tailrace cost` prints them. `bill` is null where nobody has said what an hour
        costs."""
        from tailrace.ledger import cost, usage
        from tailrace.ledger.price import Profile, Rented

        query = Query(exchange, ("by", "since", "per_hour"))
        names, span, rent = by(query), span_of(query), dollars(query, "per_hour")
        profile = Profile() if rent is None else Profile("", Rented(rent, "as typed here"))

        def read(ledger: Ledger) -> Bill | None:
            lines = usage.usage(ledger, names, span)
            paid = usage.paid(ledger, span, rent)
            rate = cost.known_rate(profile, paid)
            return None if rate is None else cost.bill(lines, paid, rate[0], source=rate[1], apis={})

        await answer(exchange, {"bill": await self._ledger().ask(read)})

    async def prices(self, exchange: Exchange) -> None:
        """GET prices: public prices of devices, as `tailrace cost --prices` prints them."""
        from tailrace.twin.catalogue import prices

        Query(exchange, ())
        rents = prices.load().of()
        shown = [
            {"device": r.device, "usd_per_hour": r.usd_per_hour, "seller": r.seller, "date": r.read} for r in rents
        ]
        await answer(exchange, {"prices": shown})

    def _running(self) -> Live:
        if self.live is None:
            raise HttpError(404, "this dashboard reads a ledger: there is no running server", code="not_live")
        return self.live

    def _ledger(self) -> Reader:
        if self._reader is None:
            raise HttpError(404, "this server keeps no ledger (--ledger off)", code="no_ledger")
        return self._reader

    def close(self) -> None:
        """The server ends."""
        if self._reader is not None:
            self._reader.close()


ENDPOINTS: dict[str, Endpoint] = {
    "state": Desk.state,
    "live": Desk.watch,
    "steps": Desk.steps,
    "requests": Desk.requests,
    "shapes": Desk.shapes,
    "usage": Desk.usage,
    "cost": Desk.cost,
    "prices": Desk.prices,
}
"""By what follows /ui/api/; requests/ID beside them."""


def endpoint_of(name: str) -> Endpoint:
    """The endpoint of what follows /ui/api/. Raises HttpError 404."""
    found = ENDPOINTS.get(name)
    if found is not None:
        return found
    collection, _, rest = name.partition("/")
    if collection == "requests" and rest:
        return lambda desk, exchange: desk.request(exchange, rest)
    raise HttpError(404, f"the dashboard has no /{name[:100]}", code="not_found")


async def answer(exchange: Exchange, value: object) -> None:
    """Sends JSON that no cache keeps."""
    rows = [JSON, (b"cache-control", b"no-store"), *files.HEADERS[:3]]
    await exchange.answer(200, msgspec.json.encode(value), rows)


def unknown(name: str) -> HttpError:
    """404 for a request."""
    shown = name if len(name) <= 100 else name[:100] + "..."
    return HttpError(404, f"no request {shown!r} is known here", param="request", code="request_not_found")


def _found(ledger: Ledger, name: str) -> list[Story]:
    from tailrace.ledger import lookup

    return lookup.find(ledger, name)


def whole(query: Query, name: str) -> int | None:
    """A number without sign; None where it is not given. Raises InvalidInput."""
    text = query.values.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidInput(f"{name} is a whole number, not {text[:32]!r}", param=name)
    return int(text)


def pair(query: Query, name: str) -> tuple[int, int] | None:
    """Two numbers with a point between them; None where they are not given. Raises InvalidInput."""
    text = query.values.get(name)
    if text is None:
        return None
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise InvalidInput(f"{name} is two whole numbers with a point between, not {text[:48]!r}", param=name)
    return int(parts[0]), int(parts[1])


def dollars(query: Query, name: str) -> float | None:
    """An amount; None where it is not given. Raises InvalidInput."""
    text = query.values.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise InvalidInput(f"{name} is US dollars, at least 0, not {text[:32]!r}", param=name)
    return value


def span_of(query: Query) -> Span:
    """From `since` seconds ago on; always, where that is 0 or not given."""
    from tailrace.ledger.usage import Span

    seconds = whole(query, "since")
    return Span(max(0.0, time.time() - seconds)) if seconds else Span()


def which_of(query: Query) -> Which:
    """Which requests are asked for. Raises InvalidInput."""
    from tailrace.ledger.listing import Which

    exact = {name: query.values[name] for name in EXACT if name in query.values}
    return Which(span_of(query), exact, pair(query, "prompt"), pair(query, "output"))


def by(query: Query) -> list[str]:
    """What sums are to be told apart by. Raises InvalidInput."""
    from tailrace.ledger import usage

    return usage.check([name for name in query.values.get("by", "").split(",") if name])
