"""multipart/form-data (RFC 7578) of bodies that are here as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tailrace.terms import InvalidInput

MOST_PARTS = 16
HEAD_BYTES = 8 << 10
BOUNDARY = re.compile(rb'boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))', re.IGNORECASE)
PARAMETER = re.compile(r'\b(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """One field of a form. `filename` is None where it is no file."""

    data: bytes
    filename: str | None = None


def parse(content_type: bytes, body: bytes) -> dict[str, Part]:
    """The fields by name. Raises InvalidInput."""
    found = BOUNDARY.search(content_type)
    if found is None:
        raise InvalidInput("the content type multipart/form-data has no boundary", code="invalid_form")
    line = b"--" + (found[1] or found[2])
    parts: dict[str, Part] = {}
    at = body.find(line)
    if at < 0 or (at > 0 and body[at - 2 : at] != b"\r\n"):
        raise _malformed("its boundary is nowhere")
    at += len(line)
    while body[at : at + 2] != b"--":
        if len(parts) == MOST_PARTS:
            raise _malformed(f"it has more than {MOST_PARTS} fields")
        start = body.find(b"\r\n", at, at + 80)
        end = body.find(b"\r\n" + line, at)
        if start < 0 or end < 0:
            raise _malformed("it ends in the middle of a field")
        name, part = _part(body, start, end)
        if name in parts:
            raise InvalidInput(f"the field {name[:64]} is given twice", param=name[:64])
        parts[name] = part
        at = end + 2 + len(line)
    return parts


def _part(body: bytes, start: int, end: int) -> tuple[str, Part]:
    """The field between two boundaries; `start` is the line end before its headers."""
    head_end = body.find(b"\r\n\r\n", start, min(end, start + HEAD_BYTES))
    if head_end < 0:
        raise _malformed("a field has no headers, or more than it may have")
    for row in body[start + 2 : head_end].split(b"\r\n"):
        header, _, value = row.partition(b":")
        if header.strip().lower() == b"content-disposition":
            given = {key.lower(): text for key, text in PARAMETER.findall(value.decode("utf-8", "replace"))}
            if "name" in given:
                return given["name"], Part(body[head_end + 4 : end], given.get("filename"))
    raise _malformed("a field has no name")


def _malformed(why: str) -> InvalidInput:
    return InvalidInput(f"the form is malformed: {why}", code="invalid_form")
