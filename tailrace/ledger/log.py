"""One JSON line a request: its timeline and sizes, never its text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tailrace.ledger.timeline import Timeline, as_json

Write = Callable[[str], object]


def request_line(timeline: Timeline, facts: Mapping[str, Any], *, wall_clock: Callable[[], float] = time.time) -> str:
    """The line, without its line end. `facts`: what the HTTP layer knows (endpoint, status, model, user...)."""
    body = {"event": "request", "at": round(wall_clock(), 3), **facts, **as_json(timeline)}
    return msgspec.json.encode(body).decode()


def to_stderr(line: str) -> None:
    """Writes one whole line at once, so that lines of several processes do not mix."""
    sys.stderr.write(line + "\n")
