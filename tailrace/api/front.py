"""The application: routes, keys, request ids, and errors as answers. Nothing lies between it and a stream.

The routes are a table rather than a framework's (docs/decisions/0004).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tailrace.api import endpoints
from tailrace.api.access.guard import ANYONE
from tailrace.api.errors import HttpError, as_http
from tailrace.api.exchange import ClientGone, Exchange, request_id
from tailrace.api.service import Service
from tailrace.terms import TailraceError

if TYPE_CHECKING:
    from tailrace.api.mount import Mount

Endpoint = Callable[[Service, Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Route:
    """`name` labels metrics; open routes need no key, others one with the scope (None: any key)."""

    method: str
    endpoint: Endpoint
    name: str
    open: bool = False
    scope: Literal["inference", "admin"] | None = "inference"
    engine: bool = True
    """Whether a call that counts needs the engine, and so has to wait, or is refused, while that sleeps."""

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
    "/tokenize": Route("POST", endpoints.tokenize, "tokenize", engine=False),
    "/detokenize": Route("POST", endpoints.detokenize, "detokenize", engine=False),
    "/health": Route("GET", endpoints.health, "health", open=True),
    "/health/live": Route("GET", endpoints.health, "health", open=True),
    "/health/ready": Route("GET", endpoints.health, "health", open=True),
    "/metrics": Route("GET", endpoints.metrics, "metrics", scope=None),
    "/version": Route("GET", endpoints.version, "version", scope=None),
    "/openapi.json": Route("GET", endpoints.openapi, "openapi", scope=None),
}
MODEL = Route("GET", endpoints.model, "models", scope=None)
MESSAGES = "/v1/messages"
"""Anthropic's part of the paths: errors and headers are theirs here."""
MODELS = "/v1/models"
"""And of this, where their header is sent."""
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
    "sleep": ("POST", "sleep"),
    "wake": ("POST", "wake"),
    "is_sleeping": ("GET", "is_sleeping"),
    "profile": ("POST", "profile"),
    "load_lora_adapter": ("POST", "load_lora_adapter"),
    "unload_lora_adapter": ("POST", "unload_lora_adapter"),
}
"""Method and function (of `api.admin`, which is imported when somebody administers) by what follows /admin/."""


ALIASES = {
    "/sleep": "sleep",
    "/wake_up": "wake",
    "/is_sleeping": "is_sleeping",
    "/v1/load_lora_adapter": "load_lora_adapter",
    "/v1/unload_lora_adapter": "unload_lora_adapter",
}
"""vLLM's names."""


def route_of(path: str, method: str) -> Route:
    """The route of a path. Raises HttpError 404 or 405."""
    route = ROUTES.get(path)
    if route is None and path.startswith("/v1/models/"):
        route = MODEL
    if route is None and path.startswith(ADMIN):
        route = admin_route(path.removeprefix(ADMIN))
    if route is None and path in ALIASES:
        route = admin_route(ALIASES[path])
    wanted = "GET" if method == "HEAD" else method
    if route is not None and wanted == route.method:
        return route
    routes = {} if route is None else {route.method: route}
    routes |= later_routes(path)
    if not routes:
        shown = path if len(path) <= 200 else path[:200] + "..."
        raise HttpError(404, f"there is nothing at {shown}", code="not_found")
    if wanted not in routes:
        allow = ", ".join(routes)
        raise HttpError(405, f"{path} takes {allow}, not {method[:20]}", code="method_not_allowed", allow=allow)
    return routes[wanted]


LATER = {
    ("POST", MESSAGES): ("messages", "anthropic.endpoints", "messages"),
    ("POST", f"{MESSAGES}/count_tokens"): ("messages", "anthropic.endpoints", "count_tokens"),
    ("POST", "/v1/responses"): ("responses", "responses.endpoints", "create"),
    ("GET", "/v1/responses/{id}"): ("responses", "responses.endpoints", "get"),
    ("DELETE", "/v1/responses/{id}"): ("responses", "responses.endpoints", "delete"),
    ("POST", "/v1/responses/{id}/cancel"): ("responses", "responses.endpoints", "cancel"),
    ("GET", "/v1/responses/{id}/input_items"): ("responses", "responses.endpoints", "input_items"),
    ("POST", "/v1/files"): ("files", "batches.files", "create"),
    ("GET", "/v1/files"): ("files", "batches.files", "listing"),
    ("GET", "/v1/files/{id}"): ("files", "batches.files", "get"),
    ("DELETE", "/v1/files/{id}"): ("files", "batches.files", "delete"),
    ("GET", "/v1/files/{id}/content"): ("files", "batches.files", "content"),
    ("POST", "/v1/batches"): ("batches", "batches.endpoints", "create"),
    ("GET", "/v1/batches"): ("batches", "batches.endpoints", "listing"),
    ("GET", "/v1/batches/{id}"): ("batches", "batches.endpoints", "get"),
    ("POST", "/v1/batches/{id}/cancel"): ("batches", "batches.endpoints", "cancel"),
    ("GET", "/v1/chat/completions"): ("chat", "content.chats", "listing"),
    ("GET", "/v1/chat/completions/{id}"): ("chat", "content.chats", "get"),
    ("POST", "/v1/chat/completions/{id}"): ("chat", "content.chats", "update"),
    ("DELETE", "/v1/chat/completions/{id}"): ("chat", "content.chats", "delete"),
    ("GET", "/v1/chat/completions/{id}/messages"): ("chat", "content.chats", "messages"),
}
"""What few servers are asked for: its name in metrics, and the module of this package, imported when it is asked for,
with its function. {id} is any one segment of a path."""


WITH_ENGINE = frozenset({MESSAGES, "/v1/responses"})
"""Those of them that are not answered while the engine sleeps."""


def later_routes(path: str) -> dict[str, Route]:
    """The routes of `LATER` that a path has, by method."""
    parts = path.split("/")
    found = {}
    for (method, pattern), (name, module, function) in LATER.items():
        wanted = pattern.split("/")
        if len(wanted) == len(parts) and all(w == p or (w == "{id}" and p) for w, p in zip(wanted, parts, strict=True)):
            found[method] = Route(method, _later(module, function), name, engine=pattern in WITH_ENGINE)
    return found


def _later(module: str, function: str) -> Endpoint:
    async def endpoint(service: Service, exchange: Exchange) -> None:
        from importlib import import_module

        await getattr(import_module(f"tailrace.api.{module}"), function)(service, exchange)

    return endpoint


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


def _anthropic(exchange: Exchange) -> bool:
    """Whether this is for Anthropic's API: by the path, or where both have it, by a header of theirs."""
    path = exchange.path
    if path.startswith(MODELS):
        return exchange.header(b"anthropic-version") is not None
    return path.startswith(MESSAGES)


def below(path: str, prefix: str) -> bool:
    """Whether a path is the prefix, or lies below it."""
    return path.startswith(prefix) and path[len(prefix) :][:1] in ("", "/")


class Front:
    """The application."""

    def __init__(self, service: Service, mount: Mount | None = None) -> None:
        """`mount`: what a room above serves."""
        self.service = service
        self._mount = mount
        self._guard = service.guard
        self._cors = None
        if service.settings.cors_origins:
            from tailrace.api.cors import Cors

            self._cors = Cors(service.settings.cors_origins)

    async def __call__(self, exchange: Exchange) -> None:
        """One exchange, from the routing to the last byte."""
        exchange.id = request_id(exchange.header(b"x-request-id"), lambda: f"req-{os.urandom(12).hex()}")
        name = "other"
        if _anthropic(exchange):
            from tailrace.api.anthropic import dialect

            dialect.speak(exchange)
        try:
            if exchange.fault is not None:
                raise exchange.fault
            mounted = self._mount is not None and below(exchange.path, self._mount.prefix)
            private = mounted or exchange.path.startswith(ADMIN) or exchange.path in ALIASES
            if self._cors is not None and not private:
                exchange.extra += self._cors.headers(exchange)
                allowed = self._cors.preflight(exchange)
                if allowed is not None:
                    await exchange.answer(200, b"", allowed)
                    return
            if mounted and self._mount is not None:
                route = self._mount.route(exchange.path, exchange.method)
            else:
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
        caller = ANYONE if route.open else self._guard.identify(exchange.authorization, route.scope)
        exchange.caller = caller
        if route.limited:
            self.service.need_unpaused()
            exchange.lease = self._guard.lease(caller)
            if exchange.lease is not None:
                exchange.lease.enter()
            if route.engine:
                await self.service.enter()
                try:
                    await route.endpoint(self.service, exchange)
                finally:
                    self.service.leave()
                return
        await route.endpoint(self.service, exchange)

    async def _refuse(self, exchange: Exchange, error: HttpError, name: str) -> None:
        self.service.refused(exchange, error, name)
        if exchange.status == 0:
            await exchange.refuse(error)
        else:
            exchange.hang_up()
