"""Pages as files in one directory, bounded in bytes, each with a keyed checksum.

A page is a file named by its digest. It is written under another name and moved into place, so a file with a page's
name was complete when it got it; nothing is synced, so after a power cut it may be so no more. Whether it is whole, and
the page that it is named after, is what its seal says (`seal`), under a key that only those have who may read the key
file. A file that does not agree to the last bit is deleted, and is a miss. So several servers may use one directory.

The files hold token ids and keys and values in the clear: whoever can read them can read the conversations.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tailrace.kv.prefix import PageChain
from tailrace.kv.tiers import PageKey, TierStats
from tailrace.kv.tiers.seal import CAUSES, SECRET_BYTES, Cause, Seal, read_secret
from tailrace.terms import InvalidInput

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NAME = re.compile(r"[0-9a-f]{64}")
KEY_FILE = "key"
BLOCK = 4096
"""Files take whole blocks of the disk."""
SCANS = 16
"""The directory is read again when a bound's so many parts have been written: others may have written too."""
STALE_SECONDS = 600.0
"""Age from which a file that never got its name was left behind by a server that has died."""

_log = logging.getLogger("tailrace")


class DiskTier:
    """A `Tier`. `numerics` names what the bytes of a page depend on besides model and tokens, `page_bytes` is their
    number. Least recently used pages go first when `most_bytes` would be exceeded; "used" is looked up, loaded or
    stored, and the order is kept over restarts as far as files' times tell it.

    InvalidInput where the directory or the key cannot be used at all. Once it is open, a directory that cannot be
    written is only read from (`TierStats.writable`), with one line in the log.
    """

    name = "disk"
    asked = False
    up = True

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
        self._known: OrderedDict[bytes, int] = OrderedDict()  # bytes of each page's file; least recently used first
        self._bytes = 0
        self._lock = threading.Lock()  # of these two
        self._unscanned = 0  # bytes written since the directory was read
        self._temporary = directory / f".{secrets.token_hex(8)}.tmp"
        self._loaded = self._stored = self._evicted = self._refused = 0
        self._misses: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._writable = True
        secret = self._open(key_file)
        self._seal = Seal(secret, numerics=numerics, page_bytes=page_bytes, page_tokens=page_tokens)
        self._head = bytearray(self._seal.head_bytes)
        self._data = bytearray(page_bytes)
        self._size = -(-self._seal.entry_bytes // BLOCK) * BLOCK
        if most_bytes < self._size:
            raise InvalidInput(
                f"--kv-disk-bytes is {most_bytes}, and one page takes {self._size} bytes", param="kv_disk_bytes"
            )
        self._scan()

    # --- asked by any thread

    def lookup(self, chain: PageChain, first: int, limit: int) -> int:
        known, digests = self._known, chain.digests
        with self._lock:
            end = first
            while end < limit and digests[end] in known:
                end += 1
            for digest in reversed(digests[:end]):  # whatever goes first, the pages that others need go last
                if digest in known:
                    known.move_to_end(digest)
        return end - first

    def holds(self, digest: bytes) -> bool:
        return digest in self._known

    def stats(self) -> TierStats:
        with self._lock:
            pages, size = len(self._known), self._bytes
        counts = (self._loaded, self._stored, self._evicted, self._refused)
        return TierStats(pages, size, *counts, self._writable, dict(self._misses))

    # --- one thread

    def ask(self, digests: Sequence[bytes]) -> None:
        """It knows."""

    def tend(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Files are closed."""

    def prepare(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            with contextlib.suppress(OSError), open(self._path(key.digest), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # so the disk has them all to do at once

    def load(self, key: PageKey) -> memoryview | None:
        path = self._path(key.digest)
        try:
            cause = self._read(path, key)
        except FileNotFoundError:
            cause = "absent"
        except OSError as error:
            _log.warning("tailrace: %s cannot be read (%s)", path, error.strerror or error)
            cause = "error"
        if cause is None:
            self._loaded += 1
            with contextlib.suppress(OSError):
                os.utime(path)
            return memoryview(self._data)
        self._misses[cause] += 1
        self._forget(key.digest)
        if cause not in ("absent", "error"):
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    def store(self, key: PageKey, data: bytes | bytearray) -> bool:
        if len(data) != len(self._data):
            raise ValueError(f"a page takes {len(self._data)} bytes, not {len(data)}")
        if key.digest in self._known:
            return True
        if not self._writable:
            self._refused += 1
            return False
        try:
            self._make_room()
            self._write(key, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            self._writable = False
            self._refused += 1
            _log.warning(
                "tailrace: %s cannot be written (%s): no more KV pages are stored until the next start",
                self._directory,
                error.strerror or error,
            )
            return False
        with self._lock:
            self._known[key.digest] = self._size
            self._bytes += self._size
        self._stored += 1
        self._unscanned += self._size
        return True

    # --- files

    def _path(self, digest: bytes) -> Path:
        return self._directory / digest.hex()

    def _read(self, path: Path, key: PageKey) -> Cause | None:
        """Reads a page's file into the buffers; what is wrong with it, if anything."""
        past = bytearray(1)
        file = os.open(path, READ)
        try:
            count = os.readv(file, [self._head, self._data, past])
        finally:
            os.close(file)
        return self._seal.fault(key, self._head, self._data, count)

    def _write(self, key: PageKey, data: bytes | bytearray) -> None:
        parts = [self._seal.head(key, data), data]
        file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.writev(file, parts) != sum(map(len, parts)):
                raise OSError("it is full")
        finally:
            os.close(file)
        self._temporary.rename(self._path(key.digest))

    def _make_room(self) -> None:
        """Deletes pages until one more fits."""
        if self._unscanned * SCANS >= self._most_bytes:
            self._scan()
        while self._bytes + self._size > self._most_bytes and self._known:
            with self._lock:
                digest = next(iter(self._known))
            with contextlib.suppress(FileNotFoundError):
                self._path(digest).unlink()
            self._forget(digest)
            self._evicted += 1

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._bytes -= self._known.pop(digest, 0)

    def _scan(self) -> None:
        """Learns what is in the directory. What is known already keeps its place in the order; the rest comes before
        it, by the files' times."""
        self._unscanned = 0
        found: list[tuple[int, bytes, int]] = []
        now = time.time()
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another server has deleted it meanwhile
                        state = entry.stat(follow_symlinks=False)
                        if entry.name.endswith(".tmp") and now - state.st_mtime > STALE_SECONDS:
                            os.unlink(entry.path)
                        elif NAME.fullmatch(entry.name) and stat.S_ISREG(state.st_mode):
                            size = -(-state.st_size // BLOCK) * BLOCK
                            found.append((state.st_mtime_ns, bytes.fromhex(entry.name), size))
        except OSError as error:
            _log.warning("tailrace: %s cannot be listed (%s)", self._directory, error.strerror or error)
            return
        found.sort()
        sizes = {digest: size for _, digest, size in found}
        with self._lock:
            kept = [digest for digest in self._known if digest in sizes]
            mine = set(kept)
            order = [digest for digest in sizes if digest not in mine] + kept
            self._known = OrderedDict((digest, sizes[digest]) for digest in order)
            self._bytes = sum(self._known.values())

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
        file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, secrets.token_bytes(SECRET_BYTES))
            os.fsync(file)
            with contextlib.suppress(FileExistsError):
                os.link(self._temporary, path)
        finally:
            os.close(file)
            self._temporary.unlink()
