"""A running server, followed: a sample a second, kept for some minutes and sent to whoever watches.

A sample is what `/metrics` would say then; rates are differences, which the page takes. What is sent is made once for
all that watch. Who does not read misses samples, and is cut off by the connection's own bound in the end.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.api.errors import HttpError, unavailable
from tailrace.api.exchange import EVENT_STREAM, Exchange
from tailrace.api.service import Service, who
from tailrace.ledger.record import Record
from tailrace.ledger.timeline import as_json
from tailrace.terms import TailraceError
from tailrace.web.steps import Part, Recent

EVERY = 1.0
"""Seconds between samples."""
KEPT = 300
"""Samples that are kept: five minutes."""
MOST_WATCHING = 32
"""Pages that are open at a time."""
MOST_SHOWN = 64
"""Running and waiting requests that are told of by name."""
FIELDS = (
    "at", "running", "waiting", "pages", "used", "cached", "pinned", "prompt_tokens", "output_tokens", "ended",
    "failed", "steps", "preemptions", "prefix_queries", "prefix_hits", "ttft_count", "ttft_sum", "itl_count", "itl_sum",
)  # fmt: skip
"""What a sample has, in its order. Gauges first; the rest counts from the server's (or its engine's) start."""

Sample = tuple[float, ...]
Facts = dict[str, Any]


class Live:
    """Of one server. `permitted` raises where somebody may not watch any more."""

    def __init__(self, service: Service, permitted: Callable[[Exchange], object]) -> None:
        self.recent = Recent()
        self._service = service
        self._permitted = permitted
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._watching: set[Exchange] = set()
        self._ticking: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begins to sample, and to keep steps."""
        self._service.client.listen(self.recent.add)
        self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="dashboard")

    async def close(self) -> None:
        """Ends every stream."""
        if self._ticking is not None:
            self._ticking.cancel()
        for exchange in list(self._watching):
            await _end(exchange)

    @property
    def clock(self) -> float:
        """What the wall clock says at monotonic time 0."""
        return time.time() - time.monotonic()

    async def watch(self, exchange: Exchange) -> None:
        """Streams to a page until it leaves: `history`, then a `now` every second."""
        if exchange.method == "HEAD":
            raise HttpError(405, "live numbers take GET, not HEAD", code="method_not_allowed", allow="GET")
        if not exchange.chunks:
            raise HttpError(400, "live numbers need HTTP/1.1", close=True)
        if len(self._watching) >= MOST_WATCHING:
            raise unavailable(f"{MOST_WATCHING} pages watch already", 10.0)
        await exchange.begin(200, list(EVENT_STREAM))
        await exchange.write(_event("history", {"fields": FIELDS, "samples": list(self._samples)}) + self._now())
        self._watching.add(exchange)
        try:
            await exchange.gone()
        finally:
            self._watching.discard(exchange)

    async def _tick(self) -> None:
        while True:
            self._samples.append(self.sample())
            if self._watching:
                await self._send(self._now())
            await asyncio.sleep(EVERY)

    async def _send(self, data: bytes) -> None:
        for exchange in list(self._watching):
            try:
                self._permitted(exchange)
            except TailraceError:
                await _end(exchange)
            else:
                if exchange.writable:
                    exchange.write_now(data)

    def sample(self) -> Sample:
        """The values of `FIELDS` now."""
        service = self._service
        service.settle()
        gauges, totals = service.client.gauges, service.metrics.totals
        ended = totals.finished
        ttft, itl = (
            service.metrics.histograms[name] for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
        )
        return (
            round(time.time(), 3), gauges.running, gauges.waiting, gauges.pages, gauges.used_pages,
            gauges.cached_pages, gauges.pinned_pages, totals.prompt_tokens, totals.generation_tokens,
            ended["stop"] + ended["length"], ended["error"] + ended["timeout"], gauges.steps, gauges.preemptions,
            gauges.prefix_queries, gauges.prefix_hits, sum(ttft.counts), round(ttft.total, 6), sum(itl.counts),
            round(itl.total, 6),
        )  # fmt: skip

    def _now(self) -> bytes:
        """The event of this second."""
        service = self._service
        gauges = service.client.gauges
        rows, more = self.running()
        return _event(
            "now",
            {
                "sample": self._samples[-1] if self._samples else self.sample(),
                "engine": service.client.state,
                "restarts": service.client.restarts,
                "state": "draining" if service.draining else "paused" if service.paused else service.slept,
                "requests": rows,
                "more": more,
                "tiers": {name: _plain(tier) for name, tier in gauges.tiers.items()},
                "windows": [_plain(window) for window in gauges.windows],
                "ledger": service.accounts.numbers() or None,
            },
        )

    async def open_request(self, name: str) -> list[Facts]:
        """The timelines up to now of a request that has not ended, by the id of its answer or its x-request-id, with
        its latest steps."""
        service, now = self._service, time.monotonic()
        service.settle()
        found: list[tuple[str, float, Facts]] = []
        for exchange, plan in service.exchanges.items():
            for choice in plan.generation.choices:
                fold = service.book.fold(choice.request)
                if fold is not None and name in (choice.request, plan.name, exchange.id):
                    line = as_json(fold.timeline(now))
                    facts = {"phase": fold.state, "prompt_tokens": len(choice.prompt), **line}
                    found.append((choice.request, fold.received, facts))
        return [{**facts, "steps": await self._of(request, received)} for request, received, facts in found]

    async def steps_of(self, record: Record) -> list[tuple[float, float, Part]]:
        """What is still known of the steps of a request that has ended."""
        return await self._of(record.request, record.received / 1e6 - self.clock)

    async def knows(self, name: str) -> bool:
        """Whether an answer with this id, or a choice of it, was in one of the last steps."""
        return await asyncio.to_thread(self.recent.snapshot().knows, name)

    async def _of(self, request: str, received: float) -> list[tuple[float, float, Part]]:
        """One request's share of each step, looked for beside the server's loop."""
        return await asyncio.to_thread(self.recent.snapshot().of, request, received)

    def running(self) -> tuple[list[Facts], int]:
        """The requests that are open, oldest first, and how many more there are. Never their text."""
        service, now = self._service, time.monotonic()
        rows: list[Facts] = []
        total = 0
        for exchange, plan in service.exchanges.items():
            for choice in plan.generation.choices:
                total += 1
                fold = service.book.fold(choice.request)
                if fold is None or len(rows) >= MOST_SHOWN:
                    continue
                rows.append(
                    {
                        "request": choice.request,
                        **who(exchange),
                        "phase": fold.state,
                        "seconds": round(now - fold.received, 3),
                        "prompt_tokens": len(choice.prompt),
                        "cached_tokens": fold.cached,
                        "output_tokens": fold.outputs,
                        "max_tokens": choice.params.max_tokens,
                    }
                )
        return rows, total - len(rows)


async def _end(exchange: Exchange) -> None:
    """Ends a stream, by force where its page does not read."""
    if exchange.writable:
        await exchange.write(b"", more=False)
    else:
        exchange.hang_up()


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def _plain(gauges: msgspec.Struct) -> Facts:
    """A struct that goes out as a list elsewhere, with names."""
    return msgspec.structs.asdict(gauges)
