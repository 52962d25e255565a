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


def refusal_line(facts: Mapping[str, Any], *, wall_clock: Callable[[], float] = time.time) -> str:
    """The line of a request that ended with an error before or beside any timeline. What is None is left out, and a
    parameter's name, which the client may have made up, is cut short."""
    shown = {name: value for name, value in facts.items() if value is not None}
    if "param" in shown:
        shown["param"] = str(shown["param"])[:64]
    return msgspec.json.encode({"event": "refused", "at": round(wall_clock(), 3), **shown}).decode()


def admin_line(facts: Mapping[str, Any], *, wall_clock: Callable[[], float] = time.time) -> str:
    """The line of something that an operator did."""
    return msgspec.json.encode({"event": "admin", "at": round(wall_clock(), 3), **facts}).decode()


def to_stderr(line: str) -> None:
    """Writes one whole line at once, so that lines of several processes do not mix."""
    sys.stderr.write(line + "\n")
