"""Disks that are full, read-only or broken, and servers that die: misses and refusals, never a wrong page."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.kv.tiers import key_at
from tailrace.kv.tiers.index import BLOCK
from tailrace.kv.tiers.seal import CAUSES
from tailrace.terms import InvalidInput
from tests.kv.tiers.disks import SLOT, again, chain, content, keep, loaded, place_of, taken, tier
from tests.kv.tiers.harms import PAGE_BYTES
from tests.kv.tiers.places import places


def test_a_disk_that_cannot_be_written_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 2))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with caplog.at_level(logging.WARNING, "tailrace"):
        for seed in range(5):
            assert not disk.store(key_at(chain(2 + seed, 1), 0), bytes(PAGE_BYTES))
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not disk.stats().writable
    monkeypatch.undo()
    assert not disk.store(key_at(chain(9, 1), 0), bytes(PAGE_BYTES))
    assert [loaded(disk, key) for key in keys] == [content(key) for key in keys]
    assert not list(tmp_path.glob(".*"))


ERRNOS = [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EIO]


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, suffix: str = "") -> list[object]:
    """From now on that call of `os` does its work and fails all the same (a close), or does not do it; for paths that
    end with `suffix` only. The calls that failed."""
    real, calls = getattr(os, name), []

    def fail(*args: object, **options: object) -> object:
        if not str(args[0]).endswith(suffix):
            return real(*args, **options)
        calls.append(args[0])
        if name == "close":
            real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)
    return calls


REPLACING = [("open", ".seg"), ("open", ".idx"), ("pwritev", ""), ("pwrite", "")]
GROWING = [("open", ".tmp"), ("write", ""), ("close", ""), ("rename", ".tmp")]


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("call", "suffix", "room"), [*((*one, 2) for one in REPLACING), *((*one, 4) for one in REPLACING + GROWING)]
)
def test_whatever_fails_in_a_store_is_a_refusal_and_what_is_there_is_loaded(
    call: str,
    suffix: str,
    room: int,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = tier(tmp_path, most=room * SLOT)
    keys = keep(disk, chain(1, 2))  # the next page has to push one out, or needs a segment of its own
    disk.tend()
    other = key_at(chain(2, 1), 0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tailrace"):
        calls = failing(patch, call, number, suffix)
        assert [disk.store(other, content(other)) for _ in range(3)] == [False] * 3
        assert calls
    stats = disk.stats()
    assert (stats.stored, stats.refused, stats.writable) == (2, 3, False)
    assert [os.strerror(number) in record.getMessage() for record in caplog.records] == [True]
    left = keys[1:] if (call, room) == ("pwritev", 2) else keys
    assert stats.pages == len(left)
    assert [loaded(disk, key) for key in left] == [content(key) for key in left]
    assert not any(disk.stats().misses.values())
    assert disk.load(other) is None
    disk = again(disk, tmp_path, most=room * SLOT)
    assert disk.store(other, content(other))
    assert loaded(disk, other) == content(other)
    assert taken(tmp_path) <= room * SLOT


def test_a_file_that_cannot_be_closed_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path, most=100 * SLOT)
    keys = keep(disk, chain(1, 2))
    with monkeypatch.context() as patch:
        assert not failing(patch, "close", errno.EIO)
        disk.tend()
    assert keep(disk, chain(2, 1))
    assert [loaded(disk, key) for key in keys] == [content(key) for key in keys]


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_whatever_fails_in_a_load_is_a_miss_with_that_cause(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 3))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tailrace"):
        failing(patch, call, number, ".seg" if call == "open" else "")
        disk.prepare(keys)
        assert disk.load(keys[1]) is None
    assert disk.stats().misses == {**dict.fromkeys(CAUSES, 0), "error": 1}
    assert f"{place_of(tmp_path, keys[1]).path} cannot be read ({os.strerror(number)})" in caplog.text
    assert disk.lookup(chain(1, 3), 0, 3) == 1
    assert loaded(again(disk, tmp_path), keys[1]) == content(keys[1])  # it may well be whole


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("call", "suffix"), [("pwrite", ""), ("open", ".idx")])
def test_a_page_whose_use_cannot_be_noted_is_loaded_all_the_same(
    call: str, suffix: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tier(tmp_path)
    (key,) = keep(disk, chain(1, 1))
    disk.tend()
    calls = failing(monkeypatch, call, number, suffix)
    assert loaded(disk, key) == content(key)
    assert calls


@pytest.mark.parametrize("call", ["fsync", "write", "link"])
def test_a_key_that_cannot_be_made_is_said_once_and_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, call, errno.EDQUOT)
        with pytest.raises(InvalidInput, match=rf"kept in {tmp_path}: {os.strerror(errno.EDQUOT)}$"):
            tier(tmp_path)
    assert list(tmp_path.iterdir()) == []
    keep(tier(tmp_path), chain(1, 1))


def test_the_refusal_of_a_directory_names_each_path_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^KV pages cannot be kept in /proc/tailrace: No such file or directory$"):
        tier(Path("/proc/tailrace"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=rf"kept in {tmp_path}/file/kv: Not a directory$"):
        tier(tmp_path / "file" / "kv")


NOBODY = """
import os, sys
from pathlib import Path
from tests.kv.tiers import disks as t
from tests.kv.tiers import harms, places
home = Path(sys.argv[1], "home")
home.mkdir()
os.chdir(home)  # below folders that others may not enter
home.chmod(0o755)
folder = Path("kv")
first = t.tier(folder)
keys = t.keep(first, t.chain(1, 4))
first.close()
if os.geteuid() == 0:
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
disk = t.tier(folder)
place = t.place_of(folder, keys[1])
places.spoil(place, harms.flip(0))
for path in (place.path, place.index):
    path.chmod(0o400)
folder.chmod(0o500)
other = t.key_at(t.chain(2, 1), 0)
assert not disk.store(other, t.content(other))
for one in (disk, t.tier(folder)):
    assert [t.loaded(one, key) for key in keys if key != keys[1]] == [t.content(key) for key in keys if key != keys[1]]
assert not disk.stats().writable
assert not any(disk.stats().misses.values())
assert disk.load(keys[1]) is None
assert disk.stats().misses["checksum"] == 1
assert keys[1].digest in places.places(folder)  # and it cannot be noted
place.path.chmod(0)
assert disk.load(keys[0]) is None
assert disk.stats().misses["error"] == 1
folder.chmod(0)
assert disk.load(keys[2]) is None
assert disk.stats().misses["error"] == 2
folder.chmod(0o700)
"""


def test_a_directory_that_a_user_may_not_write_or_enter_is_only_misses(tmp_path: Path) -> None:
    """By a user to whom permissions mean something, also where the tests run as root."""
    root = Path(__file__).parent.parent.parent.parent
    command = [sys.executable, "-c", NOBODY, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be read (Permission denied)") == 2


def test_a_write_that_the_disk_cuts_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    key = key_at(chain(1, 1), 0)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, parts[:1], at))
    assert not disk.store(key, content(key))
    assert places(tmp_path) == {}
    assert disk.load(key) is None


@pytest.mark.parametrize("cut", [0, BLOCK, SLOT])
def test_a_page_that_was_being_written_when_the_server_died_is_not_there(cut: int, tmp_path: Path) -> None:
    """Into a slot that another page had before: whatever is in it by then."""
    first = tier(tmp_path, most=4 * SLOT)
    keys = keep(first, chain(1, 4))
    other = key_at(chain(2, 1), 0)

    class Killed(BaseException):
        pass

    def killed(file: int, parts: Sequence[memoryview], at: int) -> int:
        os.pwrite(file, b"".join(parts)[:cut], at)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", killed)
        with pytest.raises(Killed):
            first.store(other, content(other))
    disk = again(first, tmp_path, most=4 * SLOT)
    assert disk.lookup(chain(2, 1), 0, 1) == 0
    assert [loaded(disk, key) for key in keys[1:]] == [content(key) for key in keys[1:]]
    assert keep(disk, chain(2, 1)) == [other]
    assert loaded(disk, other) == content(other)
    assert not any(disk.stats().misses.values())
    assert disk.stats().evicted == 0
    assert taken(tmp_path) == 4 * SLOT


def test_a_directory_that_vanishes_is_only_misses(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    disk = tier(folder)
    keys = keep(disk, chain(1, 2))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert [disk.load(key) for key in keys] == [None, None]
    assert not disk.store(keys[0], content(keys[0]))
    assert disk.stats().pages == 0


def test_what_a_dead_server_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    names = [".0000.tmp", f"{'0' * 16}.seg", f"{'1' * 16}.idx"]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1_000_000, 1_000_000))
        (tmp_path / name.replace("0", "2").replace("1", "3")).touch()  # another server's
    (tmp_path / "README").write_text("not ours")
    (tmp_path / ("g" * 64)).write_text("not ours either")
    keep(tier(tmp_path), chain(1, 1))
    assert tier(tmp_path).stats().pages == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & set(names)
    assert left >= {".2222.tmp", f"{'2' * 16}.seg", f"{'3' * 16}.idx", "README", "g" * 64}
