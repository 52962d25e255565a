"""The application: routes, keys, request ids, and errors as answers. Nothing lies between it and a stream.

The routes are a table rather than a framework's (docs/decisions/0004).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from tailrace.api import endpoints
from tailrace.api.access.guard import ANYONE
from tailrace.api.errors import HttpError, as_http
from tailrace.api.exchange import ClientGone, Exchange, request_id
from tailrace.api.service import Service
from tailrace.terms import TailraceError

Endpoint = Callable[[Service, Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Route:
    """`name` labels metrics; open routes need no key, others one with the scope (None: any key)."""

    method: str
    endpoint: Endpoint
    name: str
    open: bool = False
    scope: Literal["inference", "admin"] | None = "inference"

    @property
    def limited(self) -> bool:
        """Whether a call counts as a request of its key: what makes the server work for somebody does."""
        return self.method == "POST" and self.scope == "inference" and not self.open


def _texts(function: str) -> Endpoint:
    """An endpoint of `api.texts`, which is imported when somebody asks for it."""

    async def endpoint(service: Service, exchange: Exchange) -> None:
        from tailrace.api import texts

        await texts.ENDPOINTS[function](service, exchange)

    return endpoint


RERANK, SCORE = Route("POST", _texts("rerank"), "rerank"), Route("POST", _texts("score"), "score")
ROUTES: dict[str, Route] = {
    "/v1/chat/completions": Route("POST", endpoints.chat_completions, "chat"),
    "/v1/completions": Route("POST", endpoints.completions, "completions"),
    "/v1/models": Route("GET", endpoints.models, "models", scope=None),
    "/v1/embeddings": Route("POST", _texts("embeddings"), "embeddings"),
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/score": SCORE,
    "/v1/score": SCORE,
    "/tokenize": Route("POST", endpoints.tokenize, "tokenize"),
    "/detokenize": Route("POST", endpoints.detokenize, "detokenize"),
    "/health": Route("GET", endpoints.health, "health", open=True),
    "/health/live": Route("GET", endpoints.health, "health", open=True),
    "/health/ready": Route("GET", endpoints.health, "health", open=True),
    "/metrics": Route("GET", endpoints.metrics, "metrics", scope=None),
    "/version": Route("GET", endpoints.version, "version", scope=None),
}
MODEL = Route("GET", endpoints.model, "models", scope=None)
ADMIN = "/admin/"
ADMIN_ROUTES = {
    "state": ("GET", "state"),
    "requests": ("GET", "requests"),
    "abort": ("POST", "abort"),
    "pause": ("POST", "pause"),
    "resume": ("POST", "resume"),
    "drain": ("POST", "drain"),
    "reset_prefix_cache": ("POST", "reset_prefix_cache"),
    "log_level": ("POST", "log_level"),
}
"""Method and function (of `api.admin`, which is imported when somebody administers) by what follows /admin/."""


def route_of(path: str, method: str) -> Route:
    """The route of a path. Raises HttpError 404 or 405."""
    route = ROUTES.get(path)
    if route is None and path.startswith("/v1/models/"):
        route = MODEL
    if route is None and path.startswith(ADMIN):
        route = admin_route(path.removeprefix(ADMIN))
    if route is None:
        shown = path if len(path) <= 200 else path[:200] + "..."
        raise HttpError(404, f"there is nothing at {shown}", code="not_found")
    if method != route.method and not (method == "HEAD" and route.method == "GET"):
        raise HttpError(
            405, f"{path} takes {route.method}, not {method[:20]}", code="method_not_allowed", allow=route.method
        )
    return route


def admin_route(name: str) -> Route | None:
    """The route of an admin endpoint; None where there is none."""
    found = ADMIN_ROUTES.get("requests" if name.startswith("requests/") else name)
    if found is None:
        return None
    method, function = found

    async def endpoint(service: Service, exchange: Exchange) -> None:
        from tailrace.api import admin

        await admin.ENDPOINTS[function](service, exchange)

    return Route(method, endpoint, "admin", scope="admin")


class Front:
    """The application."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._guard = service.guard
        self._cors = None
        if service.settings.cors_origins:
            from tailrace.api.cors import Cors

            self._cors = Cors(service.settings.cors_origins)

    async def __call__(self, exchange: Exchange) -> None:
        """One exchange, from the routing to the last byte."""
        exchange.id = request_id(exchange.header(b"x-request-id"), lambda: f"req-{os.urandom(12).hex()}")
        name = "other"
        try:
            if self._cors is not None and not exchange.path.startswith(ADMIN):
                exchange.extra += self._cors.headers(exchange)
                allowed = self._cors.preflight(exchange)
                if allowed is not None:
                    await exchange.answer(200, b"", allowed)
                    return
            route = route_of(exchange.path, exchange.method)
            name = route.name
            await self._enter(route, exchange)
        except TailraceError as error:
            await self._refuse(exchange, as_http(error), name)
        except ClientGone:
            exchange.status = 499
        except Exception:  # noqa: BLE001 - a fault in one request must not reach the others
            traceback.print_exc(file=sys.stderr)
            message = "an internal error; the server's log has more"
            await self._refuse(exchange, HttpError(500, message, kind="server_error", code="internal_error"), name)
        finally:
            if exchange.lease is not None and exchange.caller is not None:
                count = exchange.status < 500 and exchange.status != 429
                self._guard.leave(exchange.caller, exchange.lease, count=count)
            self.service.metrics.answered(name, exchange.status)

    async def _enter(self, route: Route, exchange: Exchange) -> None:
        """Who asks, whether they may, and the answer."""
        caller = ANYONE if route.open else self._guard.identify(exchange.header(b"authorization"), route.scope)
        exchange.caller = caller
        if route.limited:
            self.service.need_unpaused()
            exchange.lease = self._guard.lease(caller)
            if exchange.lease is not None:
                exchange.lease.enter()
        await route.endpoint(self.service, exchange)

    async def _refuse(self, exchange: Exchange, error: HttpError, name: str) -> None:
        self.service.refused(exchange, error, name)
        if exchange.status == 0:
            await exchange.refuse(error)
        else:
            exchange.hang_up()
