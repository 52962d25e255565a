"""Weights are read into huge pages where there are any, and mapped elsewhere; either way they are the file's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.cpu.memory import File


@pytest.mark.parametrize("offer", ["always [madvise] never", "always madvise [never]", None])
@pytest.mark.parametrize("available", ["MemAvailable:   16000000 kB", "MemAvailable: 1 kB", "nonsense", None])
def test_the_bytes_are_the_file_s(tmp_path: Path, offer: str | None, available: str | None) -> None:
    setting, meminfo, path = tmp_path / "enabled", tmp_path / "meminfo", tmp_path / "tiles"
    if offer is not None:
        setting.write_text(offer)
    if available is not None:
        meminfo.write_text(f"MemTotal: 9 kB\n{available}\n")
    want = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    want.tofile(path)
    with path.open("rb") as file:
        file.read(100)
        whole = File(file, setting=setting, meminfo=meminfo)
    data, offered = whole.data, offer == "always [madvise] never" and available == "MemAvailable:   16000000 kB"
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
