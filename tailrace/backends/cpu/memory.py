"""Memory that is read whole, again and again: in huge pages where the system has them.

With pages of 4 KiB a core spends much of its time on finding them, and its prefetchers stop at each one's end; the same
weights in pages of 2 MiB are read a quarter faster (docs/performance.md). Copying a file into such pages takes a while,
so a start does not wait for it: the file is mapped, and `File.settle` puts the copy in its place while it is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MADV_COLLAPSE = 25
"""Gathers what is mapped into huge pages, now (Linux 6.1). Few kernels do it for files."""
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
HUGE = 2 << 20
SHARE = 0.5
"""Of the memory that is available: a file larger than this is not copied."""
QUIET = 10
"""Niceness of the thread that copies: requests come first..."""
AFTER = 0.2
"""...and the first of them even sooner: seconds before it begins."""
_SYS = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class File:
    """A whole file, read-only: `data` is uint8 [bytes]. It is mapped, and so shared with other processes; `settle`
    makes it a copy in huge pages where the system has them for a copy but not for a file, and memory is not short.
    With `own` it is copied at once wherever there is memory enough. Raises OSError where it cannot be read."""

    def __init__(
        self, file: BinaryIO, *, own: bool = False, setting: Path = _SYS, available: int | None = None
    ) -> None:
        size = os.fstat(file.fileno()).st_size
        available = available_memory() if available is None else available
        roomy = size <= SHARE * available
        self._huge = _offered(setting)
        self.copied = own and roomy
        if self.copied:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.data = np.frombuffer(memory, np.uint8)
            _read_into(file, self.data)
            self.data.flags.writeable = False
        else:
            # all at once, where it fits: that costs a fraction of a fault for every few pages
            flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if roomy else 0)
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=flags)
            self.data = np.frombuffer(memory, np.uint8)
            self._huge = self._huge and roomy and not _in_huge_pages(memory)

    def settle(self) -> threading.Thread | None:
        """Start-up is over: gets the file into huge pages, in a thread, which is returned. Readers meanwhile see the
        same bytes at the same place."""
        if not self._huge:
            return None
        work = self._gather if self.copied else self._replace
        thread = threading.Thread(target=work, name="huge pages", daemon=True)
        thread.start()
        return thread

    def _gather(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            libc, where, size = _libc(), self.data.ctypes.data, self.data.nbytes
            if libc.madvise(where, size, MADV_COLLAPSE):
                libc.madvise(where, size, mmap.MADV_HUGEPAGE)  # an older kernel: its own thread gathers them by and by

    def _replace(self) -> None:
        """Copies what is mapped into huge pages and moves those to its place: one call, and whoever reads there just
        then waits for its end. Where the system refuses, all stays as it is."""
        with contextlib.suppress(OSError, AttributeError):
            time.sleep(AFTER)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), QUIET)
            self.copied = _move_copy(self.data.ctypes.data, self.data.nbytes)


def _move_copy(target: int, size: int) -> bool:
    """Puts a private copy, in huge pages, where a mapping of `size` bytes begins."""
    libc = _libc()
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = libc.mmap(None, size + HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room in (None, ctypes.c_void_p(-1).value):
        return False
    copy = room + (target - room) % HUGE  # a huge page moves as one only between places that lie alike
    libc.madvise(copy, size, mmap.MADV_HUGEPAGE)
    libc.memcpy(copy, target, size)
    libc.mprotect(copy, size, mmap.PROT_READ)
    if libc.mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, target) != target:
        libc.munmap(room, size + HUGE)
        return False
    for begin, end in ((room, copy), (copy + size, room + size + HUGE)):
        if begin < end:
            libc.munmap(begin, end - begin)
    return True


def _libc() -> Any:
    """The C library's functions on memory, which let go of the interpreter lock."""
    libc = ctypes.CDLL(None)
    place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        ("mmap", place, (place, size, number, number, number, ctypes.c_long)),
        ("munmap", number, (place, size)),
        ("mremap", place, (place, size, size, number, place)),
        ("mprotect", number, (place, size, number)),
        ("madvise", number, (place, size, number)),
        ("memcpy", place, (place, place, size)),
    ):
        function = getattr(libc, name)
        function.restype, function.argtypes = result, arguments
    return libc


def _read_into(file: BinaryIO, data: NDArray[np.uint8]) -> None:
    file.seek(0)
    if file.readinto(data) != data.nbytes:  # type: ignore[attr-defined]  # io.BufferedReader has it
        raise OSError(f"{file.name} ended while it was read")


def _in_huge_pages(mapped: mmap.mmap) -> bool:
    """Gathers a mapped file into huge pages, where the kernel can."""
    try:
        mapped.madvise(MADV_COLLAPSE)
    except OSError:
        return False
    return True


def _offered(setting: Path) -> bool:
    """Whether the system gives huge pages to those who ask."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def available_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had without swapping: MemAvailable, less where a control group allows less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return free
