"""Memory that is read whole, again and again: in huge pages where the system has them.

With pages of 4 KiB a core spends much of its time on finding them, and its prefetchers stop at each one's end; the same
weights in pages of 2 MiB are read a quarter faster (docs/performance.md). Getting such pages may take the system a
while, so a start does not wait for them: `File.settle` gathers the memory while it is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

MADV_COLLAPSE = 25
"""Gathers what is mapped into huge pages, now (Linux 6.1). Few kernels do it for files."""
SHARE = 0.5
"""Of the memory that is available: a file larger than this is not copied."""
_SYS = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class File:
    """A whole file, read-only: `data` is uint8 [bytes]. It is mapped, and so shared with other processes, where the
    kernel can hold files in huge pages, or where none are to be had, or memory is short; else it is copied into memory
    of this process. With `own` it is copied wherever there is memory enough. Raises OSError where it cannot be read."""

    def __init__(
        self, file: BinaryIO, *, own: bool = False, setting: Path = _SYS, available: int | None = None
    ) -> None:
        self.copied = False
        self._huge = _offered(setting)
        size = os.fstat(file.fileno()).st_size
        available = available_memory() if available is None else available
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        if (own or (not _in_huge_pages(memory) and self._huge)) and size <= SHARE * available:
            memory.close()
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.copied = True
        self.data = np.frombuffer(memory, np.uint8)
        if self.copied:
            file.seek(0)
            if file.readinto(self.data) != size:  # type: ignore[attr-defined]  # io.BufferedReader has it
                raise OSError(f"{file.name} ended while it was read")
            self.data.flags.writeable = False

    def settle(self) -> threading.Thread | None:
        """Start-up is over: gathers a copy into huge pages, in a thread, which is returned. Readers meanwhile see
        the same bytes."""
        if not self.copied or not self._huge:
            return None
        thread = threading.Thread(target=_gather, args=(self.data,), name="huge pages", daemon=True)
        thread.start()
        return thread


def _in_huge_pages(mapped: mmap.mmap) -> bool:
    """Gathers a mapped file into huge pages, where the kernel can."""
    try:
        mapped.madvise(MADV_COLLAPSE)
    except OSError:
        return False
    return True


def _gather(data: NDArray[np.uint8]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        where, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
        if madvise(where, size, MADV_COLLAPSE):  # lets go of the interpreter lock
            madvise(where, size, mmap.MADV_HUGEPAGE)  # an older kernel: its own thread gathers them by and by


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
