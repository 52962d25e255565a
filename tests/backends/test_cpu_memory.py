"""Weights are read into huge pages where there are any, and mapped elsewhere; either way they are the file's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.cpu.memory import File, available_memory


@pytest.mark.parametrize("offer", ["always [madvise] never", "always madvise [never]", None])
@pytest.mark.parametrize("available", [16 << 30, 5 << 20, 0])
def test_the_bytes_are_the_file_s(tmp_path: Path, offer: str | None, available: int) -> None:
    setting, path = tmp_path / "enabled", tmp_path / "tiles"
    if offer is not None:
        setting.write_text(offer)
    want = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    want.tofile(path)
    with path.open("rb") as file:
        file.read(100)
        whole = File(file, setting=setting, available=available)
    data, offered = whole.data, offer == "always [madvise] never" and available == 16 << 30
    assert np.array_equal(data, want)
    assert not data.flags.writeable
    gathering = whole.settle()
    if gathering is not None:
        assert whole.copied
        gathering.join(30)
        assert np.array_equal(data, want)
        path.write_bytes(b"\0" * 8)  # a copy is its own; a mapping would end here
        assert np.array_equal(data, want)
    assert offered or not whole.copied


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [
        ("max", "7", 16000000 << 10),
        ("9000000000", "1000000000", 8000000000),
        ("5", "9", 0),
        (None, None, 16000000 << 10),
    ],
)
def test_memory_is_what_the_machine_and_the_control_group_allow(
    tmp_path: Path, limit: str | None, used: str | None, free: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   16000000 kB\n")
    if limit is not None and used is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)
    assert available_memory(meminfo, tmp_path) == free
