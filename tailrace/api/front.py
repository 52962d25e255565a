"""The application: routes, keys, request ids, and errors as answers. Nothing lies between it and a stream.

The ten routes are a table rather than a framework's (docs/decisions/0004).
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tailrace.api import endpoints
from tailrace.api.errors import HttpError, as_http
from tailrace.api.exchange import ClientGone, Exchange, request_id
from tailrace.api.service import Service
from tailrace.terms import TailraceError

Endpoint = Callable[[Service, Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Route:
    """`name` labels metrics; open routes need no key."""

    method: str
    endpoint: Endpoint
    name: str
    open: bool = False


ROUTES: dict[str, Route] = {
    "/v1/chat/completions": Route("POST", endpoints.chat_completions, "chat"),
    "/v1/completions": Route("POST", endpoints.completions, "completions"),
    "/v1/models": Route("GET", endpoints.models, "models"),
    "/tokenize": Route("POST", endpoints.tokenize, "tokenize"),
    "/detokenize": Route("POST", endpoints.detokenize, "detokenize"),
    "/health": Route("GET", endpoints.health, "health", open=True),
    "/health/live": Route("GET", endpoints.health, "health", open=True),
    "/health/ready": Route("GET", endpoints.health, "health", open=True),
    "/metrics": Route("GET", endpoints.metrics, "metrics"),
    "/version": Route("GET", endpoints.version, "version"),
}
MODEL = Route("GET", endpoints.model, "models")


def route_of(path: str, method: str) -> Route:
    """The route of a path. Raises HttpError 404 or 405."""
    route = ROUTES.get(path)
    if route is None and path.startswith("/v1/models/"):
        route = MODEL
    if route is None:
        shown = path if len(path) <= 200 else path[:200] + "..."
        raise HttpError(404, f"there is nothing at {shown}", code="not_found")
    if method != route.method and not (method == "HEAD" and route.method == "GET"):
        raise HttpError(
            405, f"{path} takes {route.method}, not {method[:20]}", code="method_not_allowed", allow=route.method
        )
    return route


class Keys:
    """The accepted keys, as digests: comparing them takes the same time whatever was sent."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant(self, authorization: bytes | None) -> str:
        """Who asks: the digest of the key, or "" where no keys are configured. Raises HttpError 401."""
        if not self._digests:
            return ""
        from hmac import compare_digest  # only where there are keys: it is a start's milliseconds

        scheme, _, given = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        matches = [compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "no API key was given" if authorization is None else "the API key is not valid"
            raise HttpError(
                401,
                f"{what}: send the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return digest.hex()


class Front:
    """The application."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._keys = Keys(service.settings.api_keys)

    async def __call__(self, exchange: Exchange) -> None:
        """One exchange, from the routing to the last byte."""
        exchange.id = request_id(exchange.header(b"x-request-id"), lambda: f"req-{os.urandom(12).hex()}")
        name = "other"
        try:
            route = route_of(exchange.path, exchange.method)
            name = route.name
            if not route.open:
                exchange.tenant = self._keys.tenant(exchange.header(b"authorization"))
            await route.endpoint(self.service, exchange)
        except TailraceError as error:
            await self._refuse(exchange, as_http(error))
        except ClientGone:
            exchange.status = 499
        except Exception:  # noqa: BLE001 - a fault in one request must not reach the others
            traceback.print_exc(file=sys.stderr)
            message = "an internal error; the server's log has more"
            await self._refuse(exchange, HttpError(500, message, kind="server_error", code="internal_error"))
        self.service.metrics.answered(name, exchange.status)

    async def _refuse(self, exchange: Exchange, error: HttpError) -> None:
        if exchange.status == 0:
            await exchange.refuse(error)
        else:
            exchange.hang_up()
