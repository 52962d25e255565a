"""Whether the client held things up: how late its event loop was, how late it sent, how busy it kept a core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from tailrace.measure import metrics
from tailrace.measure.record import Record

EVERY = 0.02
LATE = 0.01
"""Seconds by which sending may be late (99th percentile) before it counts, or, where that is more:"""
LATE_SHARE = 0.02
"""the share of the median TTFT."""
LAG = 0.02
BUSY = 0.85
"""Share of a core above which there is no telling who was waited for."""


class Client(msgspec.Struct, frozen=True):
    """What the load generator was during a run. Seconds; `cpu` is its share of one core, `late` how late it may send
    before it counts."""

    cpu: float
    lag_p99: float
    lag_max: float
    dispatch_p99: float | None
    dispatch_max: float | None
    most_in_flight: int
    late: float = LATE

    @property
    def reasons(self) -> list[str]:
        """Why the client may have been the bottleneck; empty where it was not."""
        found = []
        if self.dispatch_p99 is not None and self.dispatch_p99 > self.late:
            found.append(f"1 % of the requests were sent more than {self.dispatch_p99 * 1000:.0f} ms late")
        if self.lag_p99 > LAG:
            found.append(f"1 % of the time its event loop was more than {self.lag_p99 * 1000:.0f} ms late")
        if self.cpu > BUSY:
            found.append(f"it kept a core {self.cpu:.0%} busy")
        return found


UNKNOWN = Client(cpu=0.0, lag_p99=0.0, lag_max=0.0, dispatch_p99=None, dispatch_max=None, most_in_flight=0)
"""Of a run that had no client, or whose client said nothing of itself."""


class Watch:
    """Looks at the event loop every 20 ms while it runs."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._handle: asyncio.TimerHandle | None = None
        self._wall = self._cpu = self._due = 0.0
        self.in_flight = self.most = 0

    def start(self) -> None:
        """Begins looking."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._next(self._wall)

    def one_more(self) -> None:
        """A request has been begun."""
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)

    def stop(self, records: Sequence[Record]) -> Client:
        """Ends looking; what was seen."""
        if self._handle is not None:
            self._handle.cancel()
        wall = time.perf_counter() - self._wall
        waits = [wait for wait in map(metrics.ttft, records) if wait is not None]
        delays = [delay for delay in map(metrics.dispatch_delay, records) if delay is not None]
        return Client(
            cpu=(time.process_time() - self._cpu) / wall if wall else 0.0,
            lag_p99=_p99(self._lags) or 0.0,
            lag_max=max(self._lags, default=0.0),
            dispatch_p99=_p99(delays),
            dispatch_max=max(delays, default=None),
            most_in_flight=self.most,
            late=max(LATE, LATE_SHARE * float(np.median(waits))) if waits else LATE,
        )

    def _next(self, now: float) -> None:
        self._due = now + EVERY
        self._handle = asyncio.get_running_loop().call_later(EVERY, self._look)

    def _look(self) -> None:
        now = time.perf_counter()
        self._lags.append(max(0.0, now - self._due))
        self._next(now)


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None
