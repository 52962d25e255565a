"""Records on their way into the database, in a file of the server that wrote them.

A file is one message of its run and any number of records after it, each a frame of its length, its CRC-32 and msgpack.
What a killed server, or a full disk, left half written at the end is cut off. A server holds a lock on its file, so
that whoever finds one without may take it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.ledger.record import Record
from tailrace.ledger.run import Run
from tailrace.terms import TailraceError

FRAME = struct.Struct("<II")
SUFFIX = ".spool"
LONGEST = 1 << 20
"""Bytes of a frame; a longer one is none."""


class SpoolFull(TailraceError):
    """There is no room for more: the spool's bound is reached, or the disk is full."""


class Spool:
    """One file. One thread. What `append` has returned from outlives the process, and what `sync` has, the machine's
    power."""

    def __init__(self, folder: Path, run: Run, most_bytes: int) -> None:
        """Nothing is touched yet."""
        self.path = folder / f"{run.name}{SUFFIX}"
        self.rows = 0  # in it
        self._run = run
        self._most = most_bytes
        self._file = -1
        self._size = 0
        self._head = 0  # bytes of the run's frame
        self._encode = msgspec.msgpack.Encoder().encode

    def append(self, rows: list[tuple[int, Record]]) -> None:
        """Adds records, all or none. Raises SpoolFull."""
        data = b"".join(_frame(self._encode(row)) for row in rows)
        try:
            self._open()
            if self._size + len(data) > self._most:
                raise SpoolFull(f"the ledger's spool {self.path} has reached its {self._most} bytes")
            try:
                _write(self._file, data)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        except OSError as error:
            raise SpoolFull(f"the ledger's spool {self.path} cannot be written: {error.strerror}") from None
        self._size += len(data)
        self.rows += len(rows)

    def read(self, count: int) -> Iterator[list[tuple[int, Record]]]:
        """All that is in it, so many records at a time."""
        yield from _batches(self.path, count)

    def sync(self) -> None:
        """Waits until it is on the disk."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._file)

    def clear(self) -> None:
        """All of it is in the database."""
        if self.rows:
            with contextlib.suppress(OSError):  # what is read again is written once
                os.ftruncate(self._file, self._head)
                self._size = self._head
            self.rows = 0

    def close(self) -> None:
        """Leaves the file to whoever takes it over, where there is something in it."""
        if self._file >= 0:
            if not self.rows:
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        if self._file >= 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            head = _frame(self._encode(self._run))
            _write(file, head)
        except OSError:
            os.close(file)
            raise
        self._file, self._head, self._size = file, len(head), len(head)


def left_behind(folder: Path) -> Iterator[tuple[Path, Run, Iterator[list[tuple[int, Record]]]]]:
    """The files of servers that have ended, with their runs and what is in them, while each is locked; whoever has
    taken all of one over deletes it. Files that are none are left alone."""
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            file = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                head = next(_frames(path), None)
                if head is None:  # killed before it had written anything
                    path.unlink(missing_ok=True)
                else:
                    yield path, msgspec.msgpack.decode(head, type=Run), _batches(path, 1000)
            finally:
                os.close(file)


def _frame(data: bytes) -> bytes:
    return FRAME.pack(len(data), zlib.crc32(data)) + data


def _write(file: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(file, memoryview(data)[done:])


def _frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(head := file.read(FRAME.size)) == FRAME.size:
            length, crc = FRAME.unpack(head)
            data = file.read(length) if length <= LONGEST else b""
            if len(data) != length or zlib.crc32(data) != crc:
                return
            yield data


def _batches(path: Path, count: int) -> Iterator[list[tuple[int, Record]]]:
    decode = msgspec.msgpack.Decoder(tuple[int, Record]).decode
    frames = _frames(path)
    next(frames, None)
    batch = []
    for data in frames:
        batch.append(decode(data))
        if len(batch) == count:
            yield batch
            batch = []
    if batch:
        yield batch
