"""The dashboard beside an API: its routes, and who may use them.

The files are for everybody; what they show is not. Where anybody needs a key for anything, the dashboard needs one with
the scope admin, since a waterfall names the requests of others that it waited for. Where nobody does, only who has
opened it by address or as localhost gets an answer: a web page elsewhere that has its own name lead here (DNS
rebinding) sends that name.
"""

from __future__ import annotations

import ipaddress

from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.api.front import Route
from tailrace.api.service import Service
from tailrace.web import files
from tailrace.web.desk import Desk, Facts, endpoint_of
from tailrace.web.live import Live
from tailrace.web.reader import Reader

API = f"{files.PREFIX}/api/"


def only_get(path: str, method: str) -> None:
    """Raises HttpError 405 for any other method."""
    if method not in ("GET", "HEAD"):
        raise HttpError(405, f"{path[:100]} takes GET, not {method[:20]}", code="method_not_allowed", allow="GET")


async def send_file(exchange: Exchange) -> None:
    """GET /ui, /ui/ and /ui/FILE. Raises HttpError 404."""
    name = exchange.path.removeprefix(files.PREFIX).removeprefix("/") or "index.html"
    data, kind = files.read(name)
    await exchange.answer(200, data, [(b"content-type", kind), *files.HEADERS])


def need_address(exchange: Exchange, own: str) -> None:
    """Raises HttpError 403 where the host that was asked for is no address, not localhost, and not what the server was
    told to listen on (`own`)."""
    host = (exchange.header(b"host") or b"").decode("latin-1").strip().lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name not in ("localhost", own.lower()):
            raise HttpError(
                403,
                f"without keys the dashboard answers at an address or localhost only, not at {name[:100]!r}",
                kind="permission_error",
                code="wrong_host",
            ) from None


class Dashboard:
    """`api.mount.Mount`."""

    prefix = files.PREFIX
    title = "Dashboard"

    def __init__(self, service: Service) -> None:
        self._service = service
        given = service.settings.ledger
        self._live = Live(service, self._permit)
        self._desk = Desk(None if given is None else Reader(given, own=True), self._live, self._facts)

    def _facts(self) -> Facts:
        service, ready = self._service, self._service.client.ready
        settings = service.settings
        return {
            "model": settings.model_name,
            "models": [settings.model_name, *(one.name for one in service.adapters.all)],
            "task": ready.task if ready is not None else None,
            "kernels": ready.kernels if ready is not None else "",
            "threads": ready.threads if ready is not None else 0,
            "max_context": ready.max_context if ready is not None else 0,
            "page_size": ready.page_size if ready is not None else 0,
            "max_running": settings.max_running,
            "slo": settings.slo,
            "usd_per_hour": settings.usd_per_hour,
            "started": service.created,
            "asks": service.guard.asks,
        }

    def _permit(self, exchange: Exchange) -> None:
        """Raises HttpError where whoever asks may not. The front has asked the same of a new exchange already."""
        if self._service.guard.asks:
            self._service.guard.identify(exchange.authorization, "admin")
        else:
            need_address(exchange, self._service.settings.host)

    def route(self, path: str, method: str) -> Route:
        """The route of a path. Raises HttpError."""
        only_get(path, method)
        if not path.startswith(API):

            async def send(_service: Service, exchange: Exchange) -> None:
                await send_file(exchange)

            return Route("GET", send, "ui", open=True)
        endpoint = endpoint_of(path.removeprefix(API))

        async def tell(_service: Service, exchange: Exchange) -> None:
            self._permit(exchange)
            await endpoint(self._desk, exchange)

        return Route("GET", tell, "ui", scope="admin" if self._service.guard.asks else None)

    def open(self) -> None:
        """Begins to follow the server."""
        self._live.open()

    async def close(self) -> None:
        """Ends the streams, and what is asked of the ledger."""
        await self._live.close()
        self._desk.close()
