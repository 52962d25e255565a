"""Weights are mapped, then copied into huge pages where there are any; all the while they are the file's."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.cpu import memory
from tailrace.backends.cpu.memory import File, available_memory

OFFERED = "always [madvise] never"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "AFTER", 0.0)


def huge_setting(tmp_path: Path) -> Path:
    path = tmp_path / "enabled"
    path.write_text(OFFERED)
    return path


def mapping_of(address: int) -> str:
    """The line of /proc/self/maps that holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.parametrize("offer", ["always [madvise] never", "always madvise [never]", None])
@pytest.mark.parametrize("available", [16 << 30, 5 << 20, 0])
@pytest.mark.parametrize("own", [False, True])
def test_the_bytes_are_the_file_s(tmp_path: Path, offer: str | None, available: int, own: bool) -> None:
    setting, path = tmp_path / "enabled", tmp_path / "tiles"
    if offer is not None:
        setting.write_text(offer)
    want = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    want.tofile(path)
    with path.open("rb") as file:
        file.read(100)
        whole = File(file, own=own, setting=setting, available=available)
    data, offered = whole.data, offer == OFFERED and available == 16 << 30
    assert np.array_equal(data, want)
    assert not data.flags.writeable
    assert whole.copied == (own and available == 16 << 30)
    gathering = whole.settle()
    assert offered or gathering is None
    if gathering is not None:
        gathering.join()
        assert whole.copied
        assert np.array_equal(data, want)
        path.write_bytes(b"\0" * 8)  # a copy is its own; a mapping would end here
        assert np.array_equal(data, want)


@pytest.mark.parametrize("size", [(6 << 20) + 5, 4096, 1])
def test_a_copy_takes_the_place_of_the_mapping_while_it_is_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "tiles"
    want = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    want.tofile(path)
    with path.open("rb") as file:
        whole = File(file, setting=huge_setting(tmp_path), available=16 << 30)
    address, done, wrong = whole.data.ctypes.data, threading.Event(), []
    if str(path) not in mapping_of(address):
        pytest.skip("the kernel holds files in huge pages: nothing is to be moved")

    def read() -> None:
        while not done.is_set():
            if not np.array_equal(whole.data, want):
                wrong.append(True)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    moving = whole.settle()
    assert moving is not None
    moving.join()
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert whole.copied
    assert whole.data.ctypes.data == address
    line = mapping_of(address)
    assert str(path) not in line
    assert "r--p" in line
    path.write_bytes(b"")  # who still read the mapping would end here
    assert np.array_equal(whole.data, want)


def test_where_the_system_refuses_the_mapping_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles"
    want = np.arange(256, dtype=np.uint8)
    want.tofile(path)
    with path.open("rb") as file:
        whole = File(file, setting=huge_setting(tmp_path), available=16 << 30)
    monkeypatch.setattr(memory, "MREMAP_FIXED", 64)  # no flag that there is
    moving = whole.settle()
    if moving is not None:
        moving.join()
        assert not whole.copied
    assert np.array_equal(whole.data, want)


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
