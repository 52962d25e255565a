"""Which web pages of other origins may use the API (CORS, in WHATWG's Fetch standard).

Only what those pages send with a key of their own: credentials of the browser (cookies) are never allowed, and admin
endpoints are for no page at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.api.exchange import Exchange

ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d{1,5})?")
NAMES = re.compile(rb"[A-Za-z0-9-]{1,64}(\s*,\s*[A-Za-z0-9-]{1,64}){0,63}")
"""Names of headers that a page asks to send: the official JavaScript client has a dozen of its own."""
EXPOSED = b", ".join(
    (
        b"x-request-id", b"request-id", b"retry-after", b"x-should-retry", b"x-tailrace-ignored-parameters",
        b"x-tailrace-not-stored",
        *(b"x-ratelimit-%b-%b" % (what, of) for of in (b"requests", b"tokens")
          for what in (b"limit", b"remaining", b"reset")),
    )
)  # fmt: skip
MAX_AGE = b"600"
"""Seconds for which a browser need not ask again."""


def check(origins: Sequence[str]) -> None:
    """Raises InvalidInput unless each is an origin as browsers send it, or *."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise InvalidInput(
                f"--cors-origin is an origin such as https://chat.example.com, without a path, or *; not {origin!r}",
                param="cors_origins",
            )


class Cors:
    """The headers for the allowed origins."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = {origin.encode() for origin in origins}

    def headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """Those of an answer, whatever it says."""
        origin = exchange.header(b"origin")
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        rows = [(b"vary", b"origin")]
        if origin in self._origins:
            assert origin is not None
            rows += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]
        return rows

    def preflight(self, exchange: Exchange) -> list[tuple[bytes, bytes]] | None:
        """What to answer where a browser asks whether a page may send a request; None where it does not ask that. A
        page of another origin gets an answer that allows nothing."""
        if exchange.method != "OPTIONS" or exchange.header(b"access-control-request-method") is None:
            return None
        if not self._any and exchange.header(b"origin") not in self._origins:
            return []
        rows = [(b"access-control-allow-methods", b"GET, POST, DELETE"), (b"access-control-max-age", MAX_AGE)]
        names = exchange.header(b"access-control-request-headers")
        if names is not None and NAMES.fullmatch(names):
            rows.append((b"access-control-allow-headers", names))
        return rows
