"""The page, its style and its scripts, as they lie in `static/`, with the headers that keep it to itself."""

from __future__ import annotations

import importlib.resources
from functools import cache

from tailrace.api.errors import HttpError

PREFIX = "/ui"
"""Everything of the dashboard is below it."""
KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
"""No script, style or address but our own, whatever a name in the ledger may say (Content Security Policy, W3C)."""
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


@cache
def names() -> frozenset[str]:
    """The files that there are."""
    found = importlib.resources.files("tailrace.web") / "static"
    return frozenset(one.name for one in found.iterdir() if one.name.rpartition(".")[2] in KINDS)


@cache
def read(name: str) -> tuple[bytes, bytes]:
    """A file and its content type. Raises HttpError 404."""
    if name not in names():
        shown = name if len(name) <= 100 else name[:100] + "..."
        raise HttpError(404, f"the dashboard has no {shown}", code="not_found")
    return (importlib.resources.files("tailrace.web") / "static" / name).read_bytes(), KINDS[name.rpartition(".")[2]]
