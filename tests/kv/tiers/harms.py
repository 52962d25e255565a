"""Ways to spoil a page outside the process, and what a tier then says of it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import numpy as np

from tailrace.kv.tiers.seal import FORMAT, HEAD, NONCE_BYTES, TAG_BYTES

PAGE_BYTES = 6000
HEAD_BYTES = HEAD.size + 64 + NONCE_BYTES + TAG_BYTES
"""What vouches for a page of 16 tokens."""
UNPICKLED: list[str] = []


def flip(at: int, bit: int = 0) -> Callable[[bytes], bytes]:
    """Changes one bit."""
    return lambda raw: raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


class Bomb:
    """Shows where it has been unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return UNPICKLED.append, ("boom",)


def bomb(_raw: bytes) -> bytes:
    return pickle.dumps(Bomb())


def as_long(make: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """The same, filled up with zeros to a page's length."""
    return lambda raw: make(raw).ljust(len(raw), b"\0")


def zipped(_raw: bytes) -> bytes:
    """As numpy and torch store objects."""
    file = io.BytesIO()
    np.savez(file, page=np.array([Bomb()], dtype=object))
    return file.getvalue()


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a pickle": (bomb, "size"),
    "a pickle as long as a page": (as_long(bomb), "foreign"),
    "arrays of pickles": (zipped, "size"),
    "arrays of pickles as long as a page": (as_long(zipped), "foreign"),
    "text": (as_long(lambda raw: b'{"page": 1}'), "foreign"),
    "empty": (lambda raw: b"", "size"),
    "cut in the header": (lambda raw: raw[:20], "size"),
    "cut by a byte": (lambda raw: raw[:-1], "size"),
    "a byte too long": (lambda raw: raw + b"\0", "size"),
    "zeros in place of its end": (lambda raw: raw[:4096] + bytes(len(raw) - 4096), "checksum"),
    "all zeros": (lambda raw: bytes(len(raw)), "foreign"),
    "a bit of the last byte": (flip(HEAD_BYTES + PAGE_BYTES - 1), "checksum"),
    "a bit of the checksum": (flip(HEAD.size + 64), "checksum"),
    "a bit of a token": (flip(HEAD.size), "foreign"),
    "a bit of the parent": (flip(HEAD.size - 1), "foreign"),
    "a bit of the digest": (flip(HEAD.size - 33), "foreign"),
    "a bit of the layout": (flip(HEAD.size - 65), "foreign"),
    "another format": (lambda raw: raw[:8] + (FORMAT + 1).to_bytes(4, "little") + raw[12:], "stale"),
}
"""What to make of an entry, which is what vouches for a page and then the page; and the cause of the miss."""
