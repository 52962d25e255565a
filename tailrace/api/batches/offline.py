"""A request without a client: endpoints, guard, limits and accounts as for any other; its answer stays here."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.api.access.guard import Caller
from tailrace.api.errors import HttpError, as_http
from tailrace.api.exchange import JSON, ClientGone, Exchange
from tailrace.api.service import Service
from tailrace.terms import TailraceError

if TYPE_CHECKING:
    from tailrace.api.access.account import Lease

Endpoint = Callable[[Service, Exchange], Awaitable[None]]


class _Sheet:
    """Keeps a whole answer: what an exchange writes behind the head."""

    def __init__(self) -> None:
        self.body = b""
        self.date = b""

    def write(self, data: bytes) -> None:
        """Nothing is streamed to nobody."""

    def writelines(self, data: Iterable[bytes]) -> None:
        """The head, and the answer."""
        _, self.body = data


class _Desk:
    """Stands for a connection whose client takes everything at once."""

    def __init__(self) -> None:
        self.blocked_since = 0.0
        self.address = ""
        self.transport = self.shared = _Sheet()

    async def drained(self) -> None:
        """There is always room."""

    def relieve(self) -> None:
        """The body was here from the start."""

    def ended(self, exchange: Exchange) -> None:
        """Whoever waits for the answer looks at the sheet."""

    def abort(self) -> None:
        """There is nobody to cut off."""


@dataclass(frozen=True)
class Answer:
    """What came of it. `retry_after`: seconds after which it may go better, where the request is not to blame."""

    status: int
    body: bytes
    retry_after: float | None = None


class Offline:
    """One request, to be run once."""

    def __init__(
        self, caller: Caller, path: str, body: bytes, name: str, priority: int | None, lease: Lease | None = None
    ) -> None:
        """`name`: what its log lines and timeline call it. Lower priorities go first; None is what the request asks
        for. `lease`: one that was entered already."""
        self._desk = _Desk()
        self.exchange = Exchange(
            self._desk, "POST", path, b"", [JSON], chunks=False, keep_alive=False,
            id=name, caller=caller, lease=lease, priority=priority,
        )  # fmt: skip
        self.exchange.feed(body)
        self.exchange.finish()

    def stop(self) -> None:
        """As if the client had left."""
        self.exchange.lose()

    async def run(self, service: Service, endpoint: Endpoint) -> Answer | None:
        """The answer; None where it was stopped."""
        exchange, guard = self.exchange, service.guard
        caller = exchange.caller
        assert caller is not None
        try:
            if exchange.lease is None:
                exchange.lease = guard.lease(caller)
                if exchange.lease is not None:
                    exchange.lease.enter()
            await service.enter()
            try:
                await endpoint(service, exchange)
            finally:
                service.leave()
        except TailraceError as error:
            return self._refused(as_http(error))
        except ClientGone:
            return None
        except Exception:  # noqa: BLE001 - a fault in one request must not reach the others
            traceback.print_exc(file=sys.stderr)
            message = "an internal error; the server's log has more"
            return self._refused(HttpError(500, message, kind="server_error", code="internal_error"))
        finally:
            if exchange.lease is not None:
                guard.leave(caller, exchange.lease, count=exchange.status < 500 and exchange.status != 429)
        if exchange.status == 499 or not exchange.ended:
            return None
        return Answer(exchange.status, self._desk.transport.body)

    def _refused(self, error: HttpError) -> Answer:
        self.exchange.status = error.status
        retry = error.retry_after if error.status in (429, 503) and error.retry else None
        return Answer(error.status, error.body(), retry)
