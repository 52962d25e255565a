"""Slots of equal size in files: where the disk tier's pages lie.

A *segment* is two files. `NAME.seg` has slots one after the other, and grows by one at a time. `NAME.idx` says what is
in them: a header, and for each slot a record with the digest of its page and when that was last used. A record is taken
back before its slot is written, and made when that is done; so a slot that was being written when the process died has
none. Records are hints: what is in a slot vouches for itself (`seal`).

Slots are written by the segment's owner only, who has a lock on the index. The system takes that back when a process
ends, however it does, and the next who reads the directory owns the segment. Others read slots, and may delete whole
segments, which is safe at any moment: who has a file open keeps it, and who opens it finds that it is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tailrace.kv.tiers.index import (
    FORMAT,
    FREE,
    HEADER,
    MAGIC,
    NOTHING,
    READ,
    RECORD,
    Found,
    Index,
    Segment,
    Slot,
    blocks,
    read_index,
    written,
)
from tailrace.kv.tiers.seal import Buffer

NAME = re.compile(r"[0-9a-f]{16}\.(idx|seg)")
PARTNER = {"idx": "seg", "seg": "idx"}
OLD = re.compile(r"[0-9a-f]{64}")
"""A page in a file of its own, as earlier versions kept them."""
WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
DIRECT = getattr(os, "O_DIRECT", 0)
"""Past the system's cache of files: that would take a copy, and memory, for what is most often never read again."""
MOST_OPEN = 4
"""Segments that are open for writing at a time."""
STALE_SECONDS = 600.0
"""Age from which a file that is not part of a segment was left behind by a server that has died."""


class Files(NamedTuple):
    """A segment's, open for writing."""

    pages: int
    records: int


class Segments:
    """The segments in `directory`; new ones get `segment_slots` slots of `slot_bytes`, whole blocks. One thread's.
    OSError where the system says so; FileNotFoundError also where somebody has deleted a segment, which is `gone` then.
    """

    def __init__(self, directory: Path, slot_bytes: int, segment_slots: int) -> None:
        self._directory = directory
        self._slot_bytes = slot_bytes
        self._segment_slots = segment_slots
        self.allocated = 0  # bytes that all of it takes
        self.lost = 0  # segments that were there once
        self._segments: dict[str, Segment] = {}
        self._free: list[Slot] = []  # of its own; the next one last
        self._growing: Segment | None = None
        self._old: list[tuple[Path, int]] = []  # what no page is found in any more, and its bytes
        self._direct = DIRECT
        self._open: dict[str, Files] = {}  # of the segments written last: opening them anew for each page takes time

    # --- the directory

    def scan(self) -> list[Found]:
        """Learns what is in the directory, and makes its own what nobody owns. The pages of those, and of others'
        segments; those that were not used for longest first."""
        with os.scandir(self._directory) as entries:
            names = {entry.name for entry in entries}
        self._old = []
        for name in names:
            with contextlib.suppress(OSError):  # it is gone again, or may not be touched
                self._tidy(name, names)
        whole = {name[:-4] for name in names if NAME.fullmatch(name) and f"{name[:-4]}.{PARTNER[name[-3:]]}" in names}
        for name in self._segments.keys() - whole:
            self._lose(self._segments[name])
        found = [page for name in sorted(whole) for page in self._look(name)]
        self._free.sort(key=lambda slot: (slot.segment.name, -slot.number))
        self.allocated = sum(one.slots * one.slot_bytes for one in self._segments.values())
        self.allocated += sum(size for _, size in self._old)
        return sorted(found, key=lambda page: page.used)

    def _tidy(self, name: str, names: set[str]) -> None:
        """Looks at what is no segment, or only the half of one."""
        path = self._directory / name
        state = path.lstat()
        half = NAME.fullmatch(name) and f"{name[:-4]}.{PARTNER[name[-3:]]}" not in names
        if stat.S_ISREG(state.st_mode) and (OLD.fullmatch(name) or (half and name.endswith(".seg") and state.st_size)):
            self._old.append((path, blocks(state.st_size)))
        elif (half or name.endswith(".tmp")) and time.time() - state.st_mtime > STALE_SECONDS:
            path.unlink()

    def _look(self, name: str) -> list[Found]:
        """Reads a segment's index, but for those of its own: what is in them it knows."""
        segment = self._segments.get(name)
        if segment is not None and segment.lock is not None:
            return []
        try:
            index = read_index(self._path(name, "seg"), self._path(name, "idx"))
            if index.slot_bytes == self._slot_bytes and (lock := self._adopted(name)) is not None:
                segment = self._segments[name] = Segment(name, self._slot_bytes, lock)
                index = read_index(self._path(name, "seg"), self._path(name, "idx"))  # what its owner did last
        except OSError:
            index = Index(0, 0, 0, b"")
        if not index.slot_bytes:
            if segment is not None:
                self._lose(segment)
            if index.size:
                self._old += [(self._path(name, "seg"), blocks(index.size)), (self._path(name, "idx"), 0)]
            return []
        if segment is None:
            segment = self._segments[name] = Segment(name, index.slot_bytes)
        segment.slots, segment.newest = index.slots(self._segment_slots), index.newest
        named, free = index.pages(segment)
        if segment.lock is not None:
            self._free += free
        return named

    def _adopted(self, name: str) -> int | None:
        """Makes a segment its own where nobody owns it: its lock."""
        file = os.open(self._path(name, "idx"), READ)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
        except OSError:  # somebody does
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None

    def _lose(self, segment: Segment) -> None:
        """It has been deleted, or is no segment any more."""
        if self._segments.pop(segment.name, None) is not None:
            self.allocated -= segment.slots * segment.slot_bytes
            self.lost += 1
        segment.gone = True
        self._shut(segment.name)
        if segment.lock is not None:
            os.close(segment.lock)
            segment.lock = None
        self._free = [slot for slot in self._free if slot.segment is not segment]
        if self._growing is segment:
            self._growing = None

    # --- room

    def take(self, *, grow: bool) -> Slot | None:
        """A slot to write to: a free one of its own; with `grow` a new one, where there is none."""
        if self._free:
            return self._free.pop()
        if not grow:
            return None
        if self._growing is None or self._growing.slots >= self._segment_slots:
            mine = (one for one in self._segments.values() if one.lock is not None)
            self._growing = next((one for one in mine if one.slots < self._segment_slots), None) or self._create()
        segment = self._growing
        segment.slots += 1
        self.allocated += segment.slot_bytes
        return Slot(segment, segment.slots - 1)

    def _create(self) -> Segment:
        """A new segment, its own from the first moment that others can see it."""
        segment = Segment(secrets.token_hex(8), self._slot_bytes)
        os.close(os.open(self._path(segment.name, "seg"), WRITE | os.O_CREAT | os.O_EXCL, 0o600))
        temporary = self._directory / f".{segment.name}.tmp"
        lock = -1
        try:
            file = os.open(temporary, WRITE | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                written(os.write(file, HEADER.pack(MAGIC, FORMAT, self._slot_bytes)), HEADER.size)
            finally:
                os.close(file)
            lock = os.open(temporary, READ)  # not for writing: that would keep the disk from being made read-only
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.rename(self._path(segment.name, "idx"))
        except BaseException:
            if lock >= 0:
                os.close(lock)
            for path in (temporary, self._path(segment.name, "seg")):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        segment.lock = lock
        self._segments[segment.name] = segment
        return segment

    def discard_old(self) -> bool:
        """Deletes a file of another format; False where there is none."""
        if not self._old:
            return False
        path, size = self._old[-1]
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._old.pop()
        self.allocated -= size
        return True

    def stranger(self) -> Segment | None:
        """Of the segments that are not its own, the one that was not used for longest."""
        while True:
            strangers = [one for one in self._segments.values() if one.lock is None]
            segment = min(strangers, key=lambda one: one.newest, default=None)
            if segment is None:
                return None
            try:
                newest = self._path(segment.name, "idx").lstat().st_mtime_ns
            except FileNotFoundError:
                self._lose(segment)
                continue
            if newest == segment.newest:
                return segment
            segment.newest = newest

    def oldest(self) -> Segment | None:
        """Of all segments, the one that was not used for longest."""
        return min(self._segments.values(), key=lambda one: one.newest, default=None)

    def delete(self, segment: Segment) -> None:
        """Deletes all of it."""
        for kind in ("seg", "idx"):  # an index alone is deleted by whoever finds it
            with contextlib.suppress(FileNotFoundError):
                self._path(segment.name, kind).unlink()
        self._lose(segment)

    # --- slots

    def write(self, slots: Sequence[Slot], digests: Sequence[bytes], parts: Sequence[Buffer]) -> None:
        """Puts pages into slots that `take` gave and that lie side by side. The parts fill them, are whole blocks, and
        lie on whole blocks of memory."""
        segment = slots[0].segment
        try:
            count = os.pwritev(self._files(segment).pages, parts, slots[0].place)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0  # not every file system can
            self.rest()
            count = os.pwritev(self._files(segment).pages, parts, slots[0].place)
        written(count, len(slots) * segment.slot_bytes)
        now = segment.newest = time.time_ns()
        self._note(slots[0], slots[0].record, b"".join(RECORD.pack(digest, now) for digest in digests))

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Nothing was written there after all."""
        self._free += [slot for slot in slots if not slot.segment.gone]

    def read(self, slot: Slot, parts: Sequence[bytearray]) -> int:
        """Reads a slot from its beginning; the bytes that were there. FileNotFoundError where the segment is gone."""
        file = self._opened(slot.segment, "seg", READ)
        try:
            return os.preadv(file, parts, slot.place)
        finally:
            os.close(file)

    def path(self, slot: Slot) -> Path:
        """The file that it is in."""
        return self._path(slot.segment.name, "seg")

    def expect(self, slots: Iterable[Slot]) -> None:
        """These are going to be read: the disk may have them all to do at once."""
        for segment, some in groupby(slots, key=lambda slot: slot.segment):
            with contextlib.suppress(OSError), open(self._path(segment.name, "seg"), "rb", buffering=0) as file:
                for slot in some:
                    os.posix_fadvise(file.fileno(), slot.place, segment.slot_bytes, os.POSIX_FADV_WILLNEED)

    def record(self, slot: Slot) -> tuple[bytes, int]:
        """Whose page the index says it is (no digest has `NOTHING`), and when that was last used."""
        file = self._opened(slot.segment, "idx", READ)
        try:
            digest, used = RECORD.unpack(os.pread(file, RECORD.size, slot.record).ljust(RECORD.size, b"\0"))
            return digest, used
        finally:
            os.close(file)

    def used(self, slot: Slot) -> None:
        """Its page has been used."""
        slot.segment.newest = time.time_ns()
        self._note(slot, slot.record + len(NOTHING), slot.segment.newest.to_bytes(8, "little"))

    def clear(self, slot: Slot) -> None:
        """Its page is not found any more. One of its own is free then."""
        self._note(slot, slot.record, FREE)
        if slot.segment.lock is not None:
            self._free.append(slot)

    def _note(self, slot: Slot, at: int, said: bytes) -> None:
        """Writes into an index."""
        written(os.pwrite(self._files(slot.segment).records, said, at), len(said))

    # --- files

    def rest(self) -> None:
        """Nothing is written for a while. What is open for writing keeps a disk from being made read-only."""
        while self._open:
            self._shut(next(iter(self._open)))

    def close(self) -> None:
        """Leaves its segments to whoever comes next."""
        self.rest()
        for segment in self._segments.values():
            if segment.lock is not None:
                os.close(segment.lock)
                segment.lock = None

    def _files(self, segment: Segment) -> Files:
        """Opens a segment for writing, where that has not been done yet."""
        files = self._open.get(segment.name)
        if files is None:
            if len(self._open) >= MOST_OPEN:
                self._shut(next(iter(self._open)))
            pages = self._direct_or_not(segment)
            try:
                files = self._open[segment.name] = Files(pages, self._opened(segment, "idx", WRITE))
            except BaseException:
                os.close(pages)
                raise
        return files

    def _direct_or_not(self, segment: Segment) -> int:
        try:
            return self._opened(segment, "seg", WRITE | self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._direct = 0
        return self._opened(segment, "seg", WRITE)

    def _shut(self, name: str) -> None:
        """Closes what is open of a segment for writing."""
        for file in self._open.pop(name, ()):
            with contextlib.suppress(OSError):
                os.close(file)

    def _path(self, name: str, kind: str) -> Path:
        return self._directory / f"{name}.{kind}"

    def _opened(self, segment: Segment, kind: str, flags: int) -> int:
        try:
            if segment.gone:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return os.open(self._path(segment.name, kind), flags)
        except FileNotFoundError:
            self._lose(segment)
            raise
