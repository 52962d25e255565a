"""A line of an input file, and the line that answers it."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from tailrace.api import schema
from tailrace.api.batches.offline import Answer
from tailrace.terms import InvalidInput

MOST_ID = 512


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: Raw


class _Body(msgspec.Struct, frozen=True):
    stream: bool | None = None
    background: bool | None = None


@dataclass(frozen=True)
class Line:
    """A line that can be answered."""

    custom_id: str
    body: bytes


def read(data: bytes, endpoint: str, seen: Collection[str]) -> Line:
    """A line. `seen`: the custom_ids of those before it. Raises InvalidInput."""
    line = schema.decode(_LINE, data)
    if not 0 < len(line.custom_id) <= MOST_ID:
        raise InvalidInput(f"custom_id must have 1 to {MOST_ID} characters", param="custom_id")
    if line.custom_id in seen:
        raise InvalidInput(
            f"there is a line of the custom_id {line.custom_id[:64]!r} before this one",
            param="custom_id",
            code="duplicate_custom_id",
        )
    if line.method != "POST":
        raise InvalidInput("method must be POST", param="method", code="invalid_method")
    if line.url != endpoint:
        raise InvalidInput(f"url must be the batch's endpoint, {endpoint}", param="url", code="invalid_url")
    body: _Body = schema.raw(line.body, _Body, "body")
    for name in ("stream", "background"):
        if getattr(body, name):
            raise InvalidInput(f"body.{name} can only be false in a batch", param=f"body.{name}")
    return Line(line.custom_id, bytes(line.body))


_LINE = msgspec.json.Decoder(_Line)


def custom_id(data: bytes) -> str | None:
    """That of a line, even of a wrong one, where it has one."""
    try:
        found: Any = msgspec.json.decode(data, type=dict[str, Raw]).get("custom_id")
        return None if found is None else msgspec.json.decode(found, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def new_id() -> str:
    """The id of a request of a batch."""
    return f"batch_req_{os.urandom(12).hex()}"


def answered(name: str, line: Line, answer: Answer) -> bytes:
    """The output line of an answer, whatever its status."""
    response = {"status_code": answer.status, "request_id": name, "body": Raw(answer.body)}
    return msgspec.json.encode({"id": name, "custom_id": line.custom_id, "response": response, "error": None})


def unanswered(given: str | None, number: int, code: str, message: str, param: str | None = None) -> bytes:
    """The error line of a line that was not asked. `number`: of the line, from 1."""
    error = {"code": code, "message": message, "param": param, "line": number}
    return msgspec.json.encode({"id": new_id(), "custom_id": given, "response": None, "error": error})
