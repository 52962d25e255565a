"""What this machine has, as far as it decides how many servers may be there at a time."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that can be had without swapping (MemAvailable, or what a control group leaves); None where the system does
    not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        found.append(limit - int((group / "memory.current").read_text()) + cached)
    return min(found, default=None)


def has_gpu() -> bool:
    """Whether there is an accelerator whose memory a suspended server would keep."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/kfd", "/dev/accel/accel0"))
