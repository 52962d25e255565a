"""A body without the parameters that nobody knows, for servers that are told to pass over them.

Only bodies that were refused come here. What is known stays the bytes that it was.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from msgspec import Raw

SHOWN = 20
"""Names that the header has room for."""
NAME_CHARS = 64
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.[]$")


def without(data: bytes, kind: Any) -> tuple[bytes, list[str]]:
    """The body without what `kind` (a struct that forbids unknown fields) does not have, and the names of that.
    Raises msgspec's errors where it is no object, and RecursionError."""
    names: list[str] = []
    return bytes(_struct(Raw(data), kind, "", names)), names


def header(names: list[str]) -> tuple[bytes, bytes]:
    """The header that tells of them; what would not be plain in a header is shown as ?."""
    shown = ["".join(one if one in PLAIN else "?" for one in name[:NAME_CHARS]) for name in names[:SHOWN]]
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return b"x-tailrace-ignored-parameters", ", ".join([*shown, *more]).encode()


def _struct(value: Raw, kind: type[msgspec.Struct], path: str, names: list[str]) -> Raw:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    kept: list[bytes] = []
    given = msgspec.json.decode(value, type=dict[str, Raw])
    for name, content in given.items():
        where = f"{path}{name}"
        if name in fields:
            kept.append(msgspec.json.encode(name) + b":" + bytes(_value(content, fields[name], where, names)))
        else:
            names.append(where)
    return Raw(b"{" + b",".join(kept) + b"}")


def _value(value: Raw, kind: Any, path: str, names: list[str]) -> Raw:
    """Goes on in what may be a strict struct, or a list of them; what has another type stays for the decoder."""
    first = bytes(value).lstrip()[:1]
    for one in (kind, *get_args(kind)):
        inner = get_args(one)
        if first == b"{" and _strict(one):
            return _struct(value, one, f"{path}.", names)
        if first == b"[" and inner and _strict(inner[0]):
            items = msgspec.json.decode(value, type=list[Raw])
            parts = [bytes(_value(item, inner[0], f"{path}[{index}]", names)) for index, item in enumerate(items)]
            return Raw(b"[" + b",".join(parts) + b"]")
    return value


def _strict(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.forbid_unknown_fields
