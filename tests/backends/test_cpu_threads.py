"""Threads are sized from what the control group allows, not from the core count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tailrace.backends.cpu.threads import usable_cores

CORES = len(os.sched_getaffinity(0))


def tree(root: Path, own: str, **files: str) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_max", ".max").replace("cfs_", "cpu.cfs_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "own").write_text(own)
    return root, root / "own"


@pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", CORES)])
def test_a_version_2_quota_bounds_the_threads(tmp_path: Path, quota: str, cores: int) -> None:
    root, own = tree(tmp_path, "0::/a/b\n", a__b__cpu_max=quota)
    assert usable_cores(root, own) == cores


def test_a_parent_s_quota_counts_too(tmp_path: Path) -> None:
    root, own = tree(tmp_path, "0::/a/b\n", a__b__cpu_max="max 100000", a__cpu_max="100000 100000")
    assert usable_cores(root, own) == 1


def test_a_version_1_quota_bounds_the_threads(tmp_path: Path) -> None:
    root, own = tree(
        tmp_path,
        "4:cpu,cpuacct:/x\n1:memory:/x\n",
        **{"cpu,cpuacct__x__cfs_quota_us": "100000", "cpu,cpuacct__x__cfs_period_us": "100000"},
    )
    assert usable_cores(root, own) == 1


def test_without_a_control_group_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "missing") == CORES
