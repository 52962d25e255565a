"""A page comes back from the disk as it was stored, or not at all."""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.kv.prefix import PageChain, root_digest
from tailrace.kv.tiers import PageKey, key_at
from tailrace.kv.tiers.disk import BLOCK, DiskTier
from tailrace.kv.tiers.seal import CAUSES, FORMAT, HEAD
from tailrace.terms import InvalidInput

PAGE_BYTES = 6000
FILE = 2 * BLOCK
"""A page's file on the disk."""


def tier(folder: Path, most: int = 100 * FILE, **options: object) -> DiskTier:
    settings = {"numerics": "test", "page_bytes": PAGE_BYTES, "page_tokens": 16, **options}
    return DiskTier(folder, most, key_file=settings.pop("key_file", None), **settings)  # type: ignore[arg-type]


def chain(seed: int, pages: int, tenant: str = "") -> PageChain:
    made = PageChain(root_digest({"tenant": tenant.encode()}), 16)
    made.extend(np.random.default_rng(seed).integers(0, 1000, 16 * pages).astype(np.int32).tobytes())
    return made


def content(key: PageKey) -> bytes:
    """What a page holds: anything, but of its own."""
    return random.Random(key.digest).randbytes(PAGE_BYTES)


def keep(tier: DiskTier, chain: PageChain) -> list[PageKey]:
    keys = [key_at(chain, at) for at in range(len(chain))]
    for key in keys:
        assert tier.store(key, content(key))
    return keys


def loaded(tier: DiskTier, key: PageKey) -> bytes | None:
    data = tier.load(key)
    return None if data is None else bytes(data)


def path_of(folder: Path, key: PageKey) -> Path:
    return folder / key.digest.hex()


def test_what_was_stored_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    sequence = chain(1, 5)
    first = tier(tmp_path)
    assert first.lookup(sequence, 0, 5) == 0
    keys = keep(first, sequence)
    for again in (first, tier(tmp_path)):
        assert again.lookup(sequence, 0, 5) == 5
        assert again.lookup(sequence, 2, 4) == 2
        for key in reversed(keys):
            assert loaded(again, key) == content(key)
        stats = again.stats()
        assert (stats.pages, stats.bytes, stats.loaded) == (5, 5 * FILE, 5)
        assert sum(stats.misses.values()) == 0


def test_a_lookup_ends_at_the_first_page_that_is_not_there(tmp_path: Path) -> None:
    sequence = chain(1, 5)
    disk = tier(tmp_path)
    for at in (0, 1, 3):
        disk.store(key_at(sequence, at), content(key_at(sequence, at)))
    assert disk.lookup(sequence, 0, 5) == 2
    assert disk.lookup(sequence, 2, 5) == 0
    assert disk.lookup(sequence, 3, 5) == 1
    assert disk.holds(sequence.digests[3])
    assert not disk.holds(sequence.digests[2])


def test_directory_key_and_pages_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kv"
    keys = keep(tier(folder), chain(1, 1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(path_of(folder, keys[0]).stat().st_mode) == 0o600
    assert len((folder / "key").read_bytes()) == 32


def spoil_header(at: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


UNPICKLED: list[str] = []


class Bomb:
    """Shows where it has been unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return UNPICKLED.append, ("boom",)


def bomb(_raw: bytes) -> bytes:
    return pickle.dumps(Bomb())


def as_long(make: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """The same, filled up with zeros to a page's length."""
    return lambda raw: make(raw).ljust(len(raw), b"\0")


def zipped(_raw: bytes) -> bytes:
    """As numpy and torch store objects."""
    file = io.BytesIO()
    np.savez(file, page=np.array([Bomb()], dtype=object))
    return file.getvalue()


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a pickle": (bomb, "size"),
    "a pickle as long as a page": (as_long(bomb), "foreign"),
    "arrays of pickles": (zipped, "size"),
    "arrays of pickles as long as a page": (as_long(zipped), "foreign"),
    "text": (as_long(lambda raw: b'{"page": 1}'), "foreign"),
    "empty": (lambda raw: b"", "size"),
    "cut in the header": (lambda raw: raw[:20], "size"),
    "cut by a byte": (lambda raw: raw[:-1], "size"),
    "a byte too long": (lambda raw: raw + b"\0", "size"),
    "zeros in place of its end": (lambda raw: raw[:4096] + bytes(len(raw) - 4096), "checksum"),
    "all zeros": (lambda raw: bytes(len(raw)), "foreign"),
    "a bit of the last byte": (spoil_header(-1 + HEAD.size + 64 + 32 + PAGE_BYTES), "checksum"),
    "a bit of the checksum": (spoil_header(HEAD.size + 64), "checksum"),
    "a bit of a token": (spoil_header(HEAD.size), "foreign"),
    "a bit of the parent": (spoil_header(HEAD.size - 1), "foreign"),
    "a bit of the digest": (spoil_header(HEAD.size - 33), "foreign"),
    "a bit of the layout": (spoil_header(HEAD.size - 65), "foreign"),
    "another format": (lambda raw: raw[:8] + (FORMAT + 1).to_bytes(4, "little") + raw[12:], "stale"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_file_that_was_spoilt_is_a_miss_and_goes(name: str, tmp_path: Path) -> None:
    spoil, cause = SPOILT[name]
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 3))
    path = path_of(tmp_path, keys[1])
    path.write_bytes(spoil(path.read_bytes()))
    for again in (disk, tier(tmp_path)):
        assert loaded(again, keys[0]) == content(keys[0])
    assert loaded(disk, keys[1]) is None
    assert disk.stats().misses == {**dict.fromkeys(CAUSES, 0), cause: 1}
    assert not path.exists()
    assert not UNPICKLED
    assert disk.lookup(chain(1, 3), 0, 3) == 1
    assert disk.stats().bytes == 2 * FILE
    assert disk.store(keys[1], content(keys[1]))
    assert loaded(disk, keys[1]) == content(keys[1])


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_what_is_no_file_is_a_miss_and_the_next_start_does_not_know_it(kind: str, tmp_path: Path) -> None:
    disk = tier(tmp_path / "kv")
    keys = keep(disk, chain(1, 2))
    path = path_of(tmp_path / "kv", keys[1])
    path.rename(tmp_path / "page")
    match kind:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "page")
        case _:
            os.mkfifo(path)
    assert tier(tmp_path / "kv").stats().pages == 1
    assert disk.load(keys[1]) is None
    assert sum(disk.stats().misses.values()) == 1
    assert loaded(disk, keys[0]) == content(keys[0])


@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, HEAD.size + 64 + 32 + PAGE_BYTES - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_is_ever_believed(at: int, bit: int, tmp_path: Path) -> None:
    disk = tier(tmp_path)
    (key,) = keep(disk, chain(1, 1))
    path = path_of(tmp_path, key)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    assert disk.load(key) is None
    assert sum(disk.stats().misses.values()) == 1


def test_a_page_under_the_name_of_another_is_a_miss(tmp_path: Path) -> None:
    """Whatever moves files about, and even where a digest is another page's: tokens and parent are compared too."""
    disk = tier(tmp_path)
    mine, other = keep(disk, chain(1, 1))[0], keep(disk, chain(2, 1))[0]
    path_of(tmp_path, mine).write_bytes(path_of(tmp_path, other).read_bytes())
    assert disk.load(mine) is None
    assert loaded(disk, other) == content(other)
    for twin in (other._replace(tokens=mine.tokens), other._replace(parent=mine.digest)):
        disk.store(other, content(other))
        assert disk.load(twin) is None
        assert not path_of(tmp_path, other).exists()
    assert disk.stats().misses["foreign"] == 3


def test_pages_of_other_numerics_or_sizes_are_misses(tmp_path: Path) -> None:
    (key,) = keep(tier(tmp_path), chain(1, 1))
    other = tier(tmp_path, numerics="other")
    assert other.load(key) is None
    assert other.stats().misses["foreign"] == 1
    keep(tier(tmp_path), chain(1, 1))
    smaller = tier(tmp_path, page_bytes=PAGE_BYTES - 8)
    assert smaller.load(key) is None
    assert smaller.stats().misses["size"] == 1


def test_pages_under_another_key_are_misses(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(40)))
    secret.chmod(0o600)
    (key,) = keep(tier(tmp_path / "kv", key_file=secret), chain(1, 1))
    assert not (tmp_path / "kv" / "key").exists()
    assert loaded(tier(tmp_path / "kv", key_file=secret), key) == content(key)
    other = tier(tmp_path / "kv")
    assert other.load(key) is None
    assert other.stats().misses["checksum"] == 1


def test_keys_that_cannot_be_used_are_refused_with_the_remedy(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with pytest.raises(InvalidInput, match="secret"):
        tier(tmp_path / "kv", key_file=secret)
    secret.write_bytes(b"short")
    secret.chmod(0o600)
    with pytest.raises(InvalidInput, match=r"5 bytes.*at least 32"):
        tier(tmp_path / "kv", key_file=secret)
    secret.write_bytes(bytes(32))
    secret.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600"):
        tier(tmp_path / "kv", key_file=secret)


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file"):
        tier(tmp_path / "file")
    with pytest.raises(InvalidInput, match="one page takes"):
        tier(tmp_path / "kv", most=FILE - 1)


def test_the_least_recently_used_pages_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    disk = tier(tmp_path, most=4 * FILE)
    old, used, new = chain(1, 2), chain(2, 2), chain(3, 2)
    keep(disk, old)
    keep(disk, used)
    assert disk.lookup(old, 0, 2) == 2  # now that is the one used last
    keep(disk, new)
    assert [disk.lookup(one, 0, 2) for one in (old, used, new)] == [2, 0, 2]
    stats = disk.stats()
    assert (stats.bytes, stats.evicted) == (4 * FILE, 2)
    assert sum(len(path.name) == 64 for path in tmp_path.iterdir()) == 4


def test_of_one_chain_the_last_pages_go_first(tmp_path: Path) -> None:
    """Without its first page a sequence is lost, without its last one it is only shorter."""
    disk = tier(tmp_path, most=4 * FILE)
    sequence = chain(1, 4)
    keep(disk, sequence)
    assert disk.lookup(sequence, 3, 4) == 1  # the first three were in memory
    keep(disk, chain(2, 1))
    assert disk.lookup(sequence, 0, 4) == 3


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    disk = tier(tmp_path, most=3 * FILE)
    keys = [keep(disk, chain(seed, 1))[0] for seed in (1, 2, 3)]
    for age, key in enumerate(keys):
        os.utime(path_of(tmp_path, key), (1_000_000 + age, 1_000_000 + age))
    disk = tier(tmp_path, most=3 * FILE)
    assert disk.load(keys[0]) is not None  # now is later than all of these
    disk = tier(tmp_path, most=3 * FILE)
    keep(disk, chain(4, 1))
    assert [disk.holds(key.digest) for key in keys] == [True, False, True]


def test_a_smaller_bound_is_kept_from_the_first_page_on(tmp_path: Path) -> None:
    keep(tier(tmp_path), chain(1, 20))
    disk = tier(tmp_path, most=5 * FILE)
    keep(disk, chain(2, 1))
    assert disk.stats().bytes == 5 * FILE
    assert sum(len(path.name) == 64 for path in tmp_path.iterdir()) == 5


def test_two_servers_keep_the_bound_together(tmp_path: Path) -> None:
    one, two = tier(tmp_path, most=32 * FILE), tier(tmp_path, most=32 * FILE)
    for seed in range(100):
        keep((one, two)[seed % 2], chain(seed, 1))
        assert sum(len(path.name) == 64 for path in tmp_path.iterdir()) <= 32 + 2 * 2 + 2
    assert one.stats().writable
    assert two.stats().writable


def test_pages_deleted_by_another_are_misses(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    keys = keep(one, chain(1, 2))
    assert loaded(two, keys[0]) == content(keys[0])  # not known there, but there
    path_of(tmp_path, keys[1]).unlink()
    assert one.load(keys[1]) is None
    assert one.stats().misses["absent"] == 1
    assert one.lookup(chain(1, 2), 0, 2) == 1


SERVER = """
import random, sys
from pathlib import Path
from tests.kv.tiers import test_disk as t
disk = t.tier(Path(sys.argv[1]), most=24 * t.FILE)
rng = random.Random(int(sys.argv[2]))
found = 0
for _ in range(400):
    sequence = t.chain(rng.randrange(20), 2)
    for at in range(2):
        key = t.key_at(sequence, at)
        got = t.loaded(disk, key)
        assert got is None or got == t.content(key)
        found += got is not None
        disk.store(key, t.content(key))
misses = disk.stats().misses
assert disk.stats().writable
assert not any(misses[cause] for cause in misses if cause != "absent"), misses
print(found)
"""


def test_servers_that_share_a_directory_never_get_a_wrong_page(tmp_path: Path) -> None:
    """They write, read and evict the same pages at once, and begin with a key that none of them has."""
    command = [sys.executable, "-c", SERVER, str(tmp_path / "kv")]
    root = Path(__file__).parent.parent.parent.parent
    running = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, text=True)
        for seed in range(3)
    ]
    for one in running:
        out, err = one.communicate(timeout=300)
        assert one.returncode == 0, err
        assert int(out) > 0
    assert not list((tmp_path / "kv").glob(".*"))


def test_a_disk_that_cannot_be_written_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 2))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
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


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("call", "suffix"), [("open", ".tmp"), ("writev", ""), ("close", ""), ("rename", ".tmp"), ("unlink", "")]
)
def test_whatever_fails_in_a_store_is_a_refusal_and_what_is_there_is_loaded(
    call: str,
    suffix: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = tier(tmp_path, most=2 * FILE)
    keys = keep(disk, chain(1, 2))  # the next page has to push one out: `unlink`
    other = key_at(chain(2, 1), 0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tailrace"):
        calls = failing(patch, call, number, suffix)
        assert [disk.store(other, content(other)) for _ in range(3)] == [False] * 3
        assert calls
    stats = disk.stats()
    assert (stats.stored, stats.refused, stats.writable) == (2, 3, False)
    assert [os.strerror(number) in record.getMessage() for record in caplog.records] == [True]
    left = keys if call == "unlink" else keys[1:]
    assert stats.pages == len(left)
    assert [loaded(disk, key) for key in left] == [content(key) for key in left]
    assert not any(disk.stats().misses.values())
    assert disk.load(other) is None
    again = tier(tmp_path, most=2 * FILE)
    assert again.store(other, content(other))
    assert loaded(again, other) == content(other)


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "readv"])
def test_whatever_fails_in_a_load_is_a_miss_with_that_cause(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 3))
    name = keys[1].digest.hex()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tailrace"):
        failing(patch, call, number, name if call == "open" else "")
        disk.prepare(keys)
        assert disk.load(keys[1]) is None
    assert disk.stats().misses == {**dict.fromkeys(CAUSES, 0), "error": 1}
    assert f"{name} cannot be read ({os.strerror(number)})" in caplog.text
    assert disk.lookup(chain(1, 3), 0, 3) == 1
    assert path_of(tmp_path, keys[1]).exists()  # it may well be whole
    assert loaded(tier(tmp_path), keys[1]) == content(keys[1])


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_a_file_whose_time_cannot_be_set_is_loaded_all_the_same(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tier(tmp_path)
    (key,) = keep(disk, chain(1, 1))
    assert failing(monkeypatch, "utime", number) == []
    assert loaded(disk, key) == content(key)


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
from tests.kv.tiers import test_disk as t
home = Path(sys.argv[1], "home")
home.mkdir()
os.chdir(home)  # below folders that others may not enter
home.chmod(0o755)
folder = Path("kv")
keys = t.keep(t.tier(folder), t.chain(1, 2))
if os.geteuid() == 0:
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
disk = t.tier(folder)
folder.chmod(0o500)
other = t.key_at(t.chain(2, 1), 0)
assert not disk.store(other, t.content(other))
for one in (disk, t.tier(folder)):
    assert [t.loaded(one, key) for key in keys] == [t.content(key) for key in keys]
assert not disk.stats().writable
assert not any(disk.stats().misses.values())
t.path_of(folder, keys[0]).chmod(0)
assert disk.load(keys[0]) is None
assert disk.stats().misses["error"] == 1
t.path_of(folder, keys[1]).write_bytes(b"gone bad")  # and cannot be deleted
assert disk.load(keys[1]) is None
assert disk.stats().misses["size"] == 1
folder.chmod(0)
assert disk.load(other) is None
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
    write = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: write(file, parts[:1]))
    assert not disk.store(key, content(key))
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert disk.load(key) is None


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
    disk = tier(tmp_path)
    old, young = tmp_path / ".0000.tmp", tmp_path / ".1111.tmp"
    old.write_bytes(b"half")
    young.write_bytes(b"another server's")
    os.utime(old, (1_000_000, 1_000_000))
    (tmp_path / "README").write_text("not ours")
    (tmp_path / ("g" * 64)).write_text("not ours either")
    keep(disk, chain(1, 1))
    again = tier(tmp_path)
    assert again.stats().pages == 1
    assert not old.exists()
    assert young.exists()
    assert (tmp_path / "README").exists()
