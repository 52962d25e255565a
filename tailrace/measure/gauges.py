"""What a server tells of itself while it is measured: its page in Prometheus' format, looked at every second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from tailrace.deploy.engines.driver import Gauges
from tailrace.measure import prometheus
from tailrace.measure.http import Broken, Pool

EVERY = 1.0


class Seen(msgspec.Struct, frozen=True):
    """The most there was of each, and the share of prompt tokens that were cached meanwhile; None where that is not
    told."""

    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    cached: float | None = None


def value(page: str, names: Sequence[str], *, largest: bool = False) -> float | None:
    """The first of these names that the page has: the sum of its series, or the largest."""
    found = prometheus.parse(page, tuple(names))
    series = next((list(found[name].values()) for name in names if name in found), None)
    if series is None:
        return None
    return max(series) if largest else sum(series)


class _Page:
    def __init__(self) -> None:
        self.status, self.content = 0, b""

    def wrote(self, at: float, connecting: float) -> None:
        """Not of interest."""

    def head(self, status: int, at: float) -> None:
        self.status = status

    def body(self, data: bytes, at: float) -> None:
        self.content += data


class Look:
    """Looks at the gauges from `begin` until `end`. What cannot be read is not known."""

    def __init__(self, pool: Pool, gauges: Gauges | None) -> None:
        self._pool, self._gauges = pool, gauges
        self._pages: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Looks once, and from now on every second."""
        await self._look()
        self._task = asyncio.create_task(self._go_on())

    async def end(self) -> Seen:
        """Looks a last time; what was seen."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._look()
        gauges = self._gauges
        if gauges is None or not self._pages:
            return Seen()
        return Seen(
            running=_most(value(page, gauges.running) for page in self._pages),
            waiting=_most(value(page, gauges.waiting) for page in self._pages),
            kv_use=_most(value(page, gauges.kv_use, largest=True) for page in self._pages),
            cached=self._cached(gauges),
        )

    def _cached(self, gauges: Gauges) -> float | None:
        first, last = self._pages[0], self._pages[-1]
        hits, queries = (
            (value(last, names) or 0.0) - (value(first, names) or 0.0)
            for names in (gauges.cache_hits, gauges.cache_queries)
        )
        return hits / queries if queries > 0 else None

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            await self._look()

    async def _look(self) -> None:
        if self._gauges is None:
            return
        page = _Page()
        with contextlib.suppress(Broken, TimeoutError):
            async with asyncio.timeout(EVERY):
                await self._pool.ask(self._pool.request("GET", self._gauges.path), page)
            if page.status == 200:
                self._pages.append(page.content.decode(errors="replace"))


def _most(found: Iterable[float | None]) -> float | None:
    return max((one for one in found if one is not None), default=None)
