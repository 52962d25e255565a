"""What lies where in a segment (`segments`), and the file that says so."""

from __future__ import annotations

import errno
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

MAGIC = b"TRKVSLOT"
FORMAT = 1
"""Changes with anything in an index, or where a page's parts lie in a slot."""
HEADER = struct.Struct("<8sII")
RECORD = struct.Struct("<32sQ")
"""A page's digest, and when it was last used, in nanoseconds since 1970."""
NOTHING = bytes(32)
FREE = bytes(RECORD.size)
BLOCK = 4096
"""Slots are whole blocks of the disk."""
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Segment:
    """One of them. `slots` is how many its file has; `lock` is there where it is this process's own; `newest` is when
    its index was last written, as of the last look; `gone` is that it was found to be deleted."""

    __slots__ = ("gone", "lock", "name", "newest", "slot_bytes", "slots")

    def __init__(self, name: str, slot_bytes: int, lock: int | None = None) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        self.slots = 0
        self.lock = lock
        self.newest = 0
        self.gone = False


class Slot(NamedTuple):
    """Where a page is."""

    segment: Segment
    number: int

    @property
    def place(self) -> int:
        """Where it begins in its file."""
        return self.number * self.segment.slot_bytes

    @property
    def record(self) -> int:
        """Where its record begins in the index."""
        return HEADER.size + self.number * RECORD.size


class Found(NamedTuple):
    """A page that an index names."""

    used: int
    digest: bytes
    slot: Slot


class Index(NamedTuple):
    """An index as it was read. `slot_bytes` is 0 where it has an unknown format; `size` is the bytes of its segment's
    slots, `newest` when it was last written, in nanoseconds since 1970, `records` what follows its header."""

    slot_bytes: int
    size: int
    newest: int
    records: bytes

    def slots(self, usual: int) -> int:
        """How many slots the segment has; more than the `usual` only where the index speaks of them."""
        return min(-(-self.size // self.slot_bytes), max(usual, len(self.records) // RECORD.size))

    def pages(self, segment: Segment) -> tuple[list[Found], list[Slot]]:
        """The pages in the segment, and its free slots."""
        found: list[Found] = []
        free: list[Slot] = []
        records = self.records.ljust(segment.slots * RECORD.size, b"\0")
        for number in range(segment.slots):
            digest, used = RECORD.unpack_from(records, number * RECORD.size)
            slot = Slot(segment, number)
            if digest != NOTHING:
                found.append(Found(used, digest, slot))
            else:
                free.append(slot)
        return found, free


def read_index(slots: Path, index: Path) -> Index:
    """Reads an index, as far as it can be of use. OSError where it cannot be read, or either is no plain file."""
    state = slots.lstat()
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    file = os.open(index, READ)
    try:
        raw = os.pread(file, HEADER.size + (state.st_size // BLOCK + 1) * RECORD.size, 0)
        newest = os.fstat(file).st_mtime_ns
    finally:
        os.close(file)
    magic, version, slot_bytes = HEADER.unpack_from(raw) if len(raw) >= HEADER.size else (b"", 0, 0)
    known = magic == MAGIC and version == FORMAT and slot_bytes >= BLOCK and slot_bytes % BLOCK == 0
    return Index(slot_bytes if known else 0, state.st_size, newest, raw[HEADER.size :])


def blocks(size: int) -> int:
    """Bytes that a file of that size takes, as whole blocks."""
    return -(-size // BLOCK) * BLOCK


def written(count: int, wanted: int) -> None:
    """OSError where a write was cut short."""
    if count != wanted:
        raise OSError("it is full")
