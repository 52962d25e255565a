"""Pages in slots of files in one directory, bounded in bytes, each with a keyed checksum.

Where a page lies is known from `segments`; nothing is synced, so after a power cut it may not be there. Whether it is
whole, and the page that was asked for, is what its seal says (`seal`), under a key that only those have who may read
the key file. What does not agree to the last bit is not looked for again, and is a miss. So several servers may use one
directory.

The files hold token ids and keys and values in the clear: whoever can read them can read the conversations.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tailrace.kv.prefix import PageChain
from tailrace.kv.tiers import PageKey, TierStats, memory
from tailrace.kv.tiers.index import BLOCK, Segment, Slot, blocks
from tailrace.kv.tiers.seal import CAUSES, SECRET_BYTES, Buffer, Cause, Seal, read_secret
from tailrace.kv.tiers.segments import Segments
from tailrace.terms import InvalidInput

KEY_FILE = "key"
SCANS = 16
"""The directory is read again when a bound's so many parts have been written: others may have written too."""
SEGMENT_BYTES = 64 << 20
"""Bytes of a segment, but never more than a bound's so many parts..."""
SEGMENTS = 16
MOST_SEGMENTS = 64
"""...and never fewer than so many: each takes an open file."""
BATCH = 8
"""Pages that are written at a time: a thread that sleeps less often takes a core from a step less often."""
BATCH_BYTES = 4 << 20
"""But no more than so many bytes, which loads may have to wait for."""

_log = logging.getLogger("tailrace")


class DiskTier:
    """A `Tier`. `numerics` names what the bytes of a page depend on besides model and tokens, `page_bytes` is their
    number. Least recently used pages go first when `most_bytes` would be exceeded, where other servers or layouts have
    to give way whole segments; "used" is looked up, loaded or stored, and the order is kept over restarts as far as
    loads and stores tell it. Pages that lie on whole blocks of memory are stored without another copy.

    InvalidInput where the directory or the key cannot be used at all. Once it is open, a directory that cannot be
    written is only read from (`TierStats.writable`), with one line in the log.
    """

    name = "disk"
    asked = False
    up = True
    batch: int

    def __init__(
        self,
        directory: Path,
        most_bytes: int,
        *,
        numerics: str,
        page_bytes: int,
        page_tokens: int,
        key_file: Path | None = None,
    ) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._known: OrderedDict[bytes, Slot] = OrderedDict()  # in segments of its own; least recently used first
        self._others: dict[bytes, Slot] = {}  # in those of others
        self._others_bytes = 0  # of their slots
        self._lock = threading.Lock()  # of these three
        self._unscanned = 0  # bytes written since the directory was read
        self._loaded = self._stored = self._evicted = self._refused = 0
        self._misses: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._writable = True
        secret = self._open(key_file)
        self._seal = Seal(secret, numerics=numerics, page_bytes=page_bytes, page_tokens=page_tokens)
        self._head = bytearray(self._seal.head_bytes)
        self._data = bytearray(page_bytes)
        self._size = blocks(self._seal.entry_bytes)
        if most_bytes < self._size:
            raise InvalidInput(
                f"--kv-disk-bytes is {most_bytes}, and one page takes {self._size} bytes", param="kv_disk_bytes"
            )
        self._whole = page_bytes // BLOCK * BLOCK  # of a page: its whole blocks
        self.batch = max(1, min(BATCH, BATCH_BYTES // self._size))
        self._rests = [memory(self._size - self._whole) for _ in range(self.batch)]  # what comes after them in slots
        self._copies: dict[int, memoryview] = {}
        segment = max(most_bytes // MOST_SEGMENTS, min(SEGMENT_BYTES, most_bytes // SEGMENTS))
        self._files = Segments(directory, self._size, max(1, segment // self._size))
        self._scan()

    # --- asked by any thread

    def lookup(self, chain: PageChain, first: int, limit: int) -> int:
        known, others, digests = self._known, self._others, chain.digests
        with self._lock:
            end = first
            while end < limit and (digests[end] in known or digests[end] in others):
                end += 1
            for digest in reversed(digests[:end]):  # whatever goes first, the pages that others need go last
                if digest in known:
                    known.move_to_end(digest)
        return end - first

    def holds(self, digest: bytes) -> bool:
        return digest in self._known or digest in self._others

    def stats(self) -> TierStats:
        with self._lock:
            pages = len(self._known) + len(self._others)
            size = len(self._known) * self._size + self._others_bytes
        counts = (self._loaded, self._stored, self._evicted, self._refused)
        return TierStats(pages, size, *counts, self._writable, dict(self._misses))

    # --- one thread

    def ask(self, digests: Sequence[bytes]) -> None:
        """It knows."""

    def tend(self) -> None:
        self._files.rest()

    def close(self) -> None:
        self._files.close()

    def prepare(self, keys: Sequence[PageKey]) -> None:
        self._files.expect(slot for key in keys if (slot := self._slot(key.digest)) is not None)

    def load(self, key: PageKey) -> memoryview | None:
        slot = self._slot(key.digest)
        cause: Cause | None = "absent"
        if slot is not None:
            try:
                cause = self._fault(key, slot)
            except FileNotFoundError:
                cause = "absent"
            except OSError as error:
                path = self._files.path(slot)
                _log.warning("tailrace: a page in %s cannot be read (%s)", path, error.strerror or error)
                cause = "error"
        if cause is None and slot is not None:
            self._loaded += 1
            with contextlib.suppress(OSError):
                self._files.used(slot)
            return memoryview(self._data)
        self._misses[cause or "absent"] += 1
        self._forget(key.digest)
        if slot is not None and cause not in ("absent", "error"):
            with contextlib.suppress(OSError):
                self._files.clear(slot)
        return None

    def store(self, key: PageKey, data: Buffer) -> bool:
        self.store_all([(key, data)])
        return self.holds(key.digest)

    def store_all(self, pages: Sequence[tuple[PageKey, Buffer]]) -> None:
        for _, data in pages:
            if len(data) != len(self._data):
                raise ValueError(f"a page takes {len(self._data)} bytes, not {len(data)}")
        todo = [page for page in pages if not self.holds(page[0].digest)]
        if self._writable:
            try:
                self._write(todo)
            except OSError as error:
                self._writable = False
                _log.warning(
                    "tailrace: %s cannot be written (%s): no more KV pages are stored until the next start",
                    self._directory,
                    error.strerror or error,
                )
        self._refused += len(todo)

    # --- pages

    def _slot(self, digest: bytes) -> Slot | None:
        return self._known.get(digest) or self._others.get(digest)

    def _fault(self, key: PageKey, slot: Slot) -> Cause | None:
        """Reads a page into the buffer; what is wrong with it, if anything."""
        count = self._files.read(slot, [self._data, self._head])
        entry = self._seal.entry_bytes
        cause: Cause | None = "size"  # also of a gap, where a file was cut short and has grown again
        if slot.segment.slot_bytes == self._size and count == entry and any(self._head):
            cause = self._seal.fault(key, self._head, self._data, entry)
        # its owner may have given the slot to another page meanwhile
        return cause and ("absent" if self._files.record(slot)[0] != key.digest else cause)

    def _parts(self, at: int, key: PageKey, data: Buffer) -> list[memoryview]:
        """A slot's content, as the disk takes it: the page, what vouches for it, and zeros up to a whole block. It is
        good until the next call with the same number."""
        view, rest, last = memoryview(data), len(data) - self._whole, self._rests[at]
        last[:rest] = view[self._whole :]
        last[rest : rest + self._seal.head_bytes] = self._seal.head(key, data)
        if not self._whole:
            return [last]
        if np.frombuffer(data, np.uint8).__array_interface__["data"][0] % BLOCK == 0:
            return [view[: self._whole], last]
        copy = self._copies.get(at)
        if copy is None:
            copy = self._copies[at] = memory(self._whole)
        copy[:] = view[: self._whole]
        return [copy, last]

    def _write(self, todo: list[tuple[PageKey, Buffer]]) -> None:
        """Stores pages, those that lie side by side at once; takes what is done out of the list."""
        while todo:
            lost, slots = self._files.lost, list[Slot]()
            try:
                self._take(slots, min(len(todo), self.batch))
                while slots:
                    count = in_a_row(slots)
                    some = todo[:count]
                    parts = [part for at, page in enumerate(some) for part in self._parts(at, *page)]
                    self._files.write(slots[:count], [key.digest for key, _ in some], parts)
                    with self._lock:
                        self._known.update(zip([key.digest for key, _ in some], slots[:count], strict=True))
                    self._stored += count
                    self._unscanned += count * self._size
                    del todo[:count], slots[:count]
            except FileNotFoundError:
                self._files.give_back(slots)
                if self._files.lost == lost:  # it is the directory, and not only a segment that has been deleted
                    raise

    def _take(self, slots: list[Slot], count: int) -> None:
        """Finds slots to write to, so many or fewer, in order; pages go where there are none."""
        if self._unscanned * SCANS >= self._most_bytes:
            self._scan()
        files = self._files
        while files.allocated > self._most_bytes and (files.discard_old() or self._shrink()):
            pass
        while len(slots) < count:
            slot = files.take(grow=files.allocated + self._size <= self._most_bytes)
            if slot is not None:
                slots.append(slot)
            elif not (files.discard_old() or self._evict()):
                break
        if not slots:
            raise OSError("nothing in it can be replaced")
        slots.sort(key=lambda slot: (slot.segment.name, slot.number))

    def _shrink(self) -> bool:
        """Deletes the segment that was not used for longest; False where there is none."""
        segment = self._files.oldest()
        if segment is not None:
            self._delete(segment)
        return segment is not None

    def _evict(self) -> bool:
        """Takes the slot of the page that was not used for longest, or deletes the segment of another server or layout
        where that is even older; False where there is neither."""
        with self._lock:
            digest, slot = next(iter(self._known.items()), (b"", None))
        if slot is not None and slot.segment.gone:
            self._forget(digest)
            return True
        stranger = self._files.stranger()
        if stranger is not None and (slot is None or stranger.newest < self._files.record(slot)[1]):
            self._delete(stranger)
            return True
        if slot is None:
            return False
        self._files.clear(slot)
        self._forget(digest)
        self._evicted += 1
        return True

    def _delete(self, segment: Segment) -> None:
        self._files.delete(segment)
        self._evicted += self._forget_gone()

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            if self._known.pop(digest, None) is None and (slot := self._others.pop(digest, None)) is not None:
                self._others_bytes -= slot.segment.slot_bytes

    def _forget_gone(self) -> int:
        """Forgets the pages of segments that have been deleted; how many there were."""
        gone = [digest for known in (self._known, self._others) for digest, slot in known.items() if slot.segment.gone]
        for digest in gone:
            self._forget(digest)
        return len(gone)

    def _scan(self) -> None:
        """Learns what is in the directory. What is known already keeps its place in the order; the rest comes before
        it, by the time of its last use."""
        self._unscanned = 0
        try:
            found = self._files.scan()
        except OSError as error:
            _log.warning("tailrace: %s cannot be listed (%s)", self._directory, error.strerror or error)
            return
        self._forget_gone()
        before: dict[bytes, Slot] = {}  # those that nobody owned
        others: dict[bytes, Slot] = {}
        for _, digest, slot in found:
            if slot.segment.lock is None:
                others[digest] = slot
            elif digest not in self._known and digest not in before:
                before[digest] = slot
            else:
                with contextlib.suppress(OSError):
                    self._files.clear(slot)
        with self._lock:
            self._known = OrderedDict([*before.items(), *self._known.items()])
            self._others = {digest: slot for digest, slot in others.items() if digest not in self._known}
            self._others_bytes = sum(slot.segment.slot_bytes for slot in self._others.values())

    def _open(self, key_file: Path | None) -> bytes:
        """Makes the directory and the key where they are not there yet; the key."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = key_file or self._directory / KEY_FILE
            if key_file is None and not path.exists():
                self._make_key(path)
        except OSError as error:
            within = f"{error.filename}: " if error.filename not in (None, str(self._directory)) else ""
            raise InvalidInput(
                f"KV pages cannot be kept in {self._directory}: {within}{error.strerror or error}", param="kv_disk"
            ) from error
        return read_secret(path)

    def _make_key(self, path: Path) -> None:
        """Whole or not at all, and the first of several servers wins."""
        temporary = self._directory / f".{secrets.token_hex(8)}.tmp"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, secrets.token_bytes(SECRET_BYTES))
            os.fsync(file)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.close(file)
            temporary.unlink()


def in_a_row(slots: Sequence[Slot]) -> int:
    """How many of them lie side by side, from the first on."""
    segment, number = slots[0]
    return next((at for at, slot in enumerate(slots) if slot != (segment, number + at)), len(slots))
