"""Memory that is read whole, again and again: in huge pages where the system has them.

With pages of 4 KiB a core spends much of its time on finding them, and its prefetchers stop at each one's end; the same
weights in pages of 2 MiB are read a quarter faster (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

MADV_COLLAPSE = 25
"""Gathers what is mapped into huge pages, now (Linux 6.1). Few kernels do it for files."""
SHARE = 0.5
"""Of the memory that is available: a file larger than this is not copied."""
_SYS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMINFO = Path("/proc/meminfo")


def read_file(file: BinaryIO, *, setting: Path = _SYS, meminfo: Path = _MEMINFO) -> NDArray[np.uint8]:
    """The whole file, read-only: uint8 [bytes]. It is mapped, and so shared with other processes, where the kernel can
    hold files in huge pages, or where none are to be had, or memory is short; else copied into memory of this process.
    Raises OSError where it cannot be read."""
    size = os.fstat(file.fileno()).st_size
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    try:
        mapped.madvise(MADV_COLLAPSE)
    except OSError:
        if _offered(setting) and size <= SHARE * _available(meminfo):
            return _copy(file, size)
    return np.frombuffer(mapped, np.uint8)


def _copy(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    file.seek(0)
    data = np.frombuffer(memory, np.uint8)
    if file.readinto(data) != size:  # type: ignore[attr-defined]  # io.BufferedReader has it
        raise OSError(f"{file.name} ended while it was read")
    data.flags.writeable = False
    return data


def _offered(setting: Path) -> bool:
    """Whether the system gives huge pages to those who ask."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def _available(meminfo: Path) -> int:
    """Bytes of memory that could be had now; 0 where nobody says."""
    try:
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
