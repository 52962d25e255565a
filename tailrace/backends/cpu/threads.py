"""How many threads this process may really use: the cores it is allowed on, cut to the control group's quota."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores of the affinity mask, at most the CPU quota of this process's control group (version 2 or 1) and of its
    parents, rounded up; at least 1."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(math.ceil(q) for q in _quotas(root, own))]))


def _quotas(root: Path, own: Path) -> list[float]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        places = [base, *(base.joinpath(*Path(path).parts[1 : i + 1]) for i in range(1, len(Path(path).parts)))]
        for place in places:
            quota = _version2(place) if not controllers else _version1(place)
            if quota is not None:
                found.append(quota)
    return found


def _version2(place: Path) -> float | None:
    try:
        quota, period = (place / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _version1(place: Path) -> float | None:
    try:
        quota = int((place / "cpu.cfs_quota_us").read_text())
        return quota / int((place / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError):
        return None
