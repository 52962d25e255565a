"""A page comes back from the disk as it was stored, or not at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.kv.prefix import PageChain, root_digest
from tailrace.kv.tiers import PageKey, key_at, memory
from tailrace.kv.tiers.disk import DiskTier
from tailrace.kv.tiers.seal import CAUSES
from tailrace.kv.tiers.segments import BLOCK
from tailrace.terms import InvalidInput
from tests.kv.tiers.harms import HEAD_BYTES, PAGE_BYTES, SPOILT, UNPICKLED, flip
from tests.kv.tiers.places import Place, places, segment_files, spoil

SLOT = 2 * BLOCK
"""A page's place on the disk."""


def tier(folder: Path, most: int = 100 * SLOT, **options: object) -> DiskTier:
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


def place_of(folder: Path, key: PageKey) -> Place:
    return places(folder)[key.digest]


def taken(folder: Path) -> int:
    """Bytes of all segments."""
    return sum(path.stat().st_size for path in segment_files(folder))


def again(disk: DiskTier, folder: Path, most: int = 100 * SLOT, **options: object) -> DiskTier:
    """A server that starts when that one has ended."""
    disk.close()
    return tier(folder, most, **options)


def test_what_was_stored_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    sequence = chain(1, 5)
    first = tier(tmp_path)
    assert first.lookup(sequence, 0, 5) == 0
    keys = keep(first, sequence)
    beside = tier(tmp_path)
    for disk in (first, beside, again(first, tmp_path)):
        assert disk.lookup(sequence, 0, 5) == 5
        assert disk.lookup(sequence, 2, 4) == 2
        for key in reversed(keys):
            assert loaded(disk, key) == content(key)
        stats = disk.stats()
        assert (stats.pages, stats.bytes, stats.loaded) == (5, 5 * SLOT, 5)
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
    place = place_of(folder, keys[0])
    assert {stat.S_IMODE(path.stat().st_mode) for path in (place.path, place.index)} == {0o600}
    assert len((folder / "key").read_bytes()) == 32


ENTRY = PAGE_BYTES + HEAD_BYTES
"""A page and what vouches for it, which comes after it here: what follows in its slot are zeros that nobody reads."""


def in_slot(how: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """The same for a slot; it keeps its length."""

    def spoilt(raw: bytes) -> bytes:
        made = how(raw[PAGE_BYTES:ENTRY] + raw[:PAGE_BYTES])
        return made[HEAD_BYTES:] + made[:HEAD_BYTES] + raw[ENTRY:]

    return spoilt


@pytest.mark.parametrize("name", [name for name, (_, cause) in SPOILT.items() if cause != "size"])
def test_a_page_that_was_spoilt_is_a_miss_and_not_found_again(name: str, tmp_path: Path) -> None:
    how, cause = SPOILT[name]
    if name == "all zeros":
        cause = "size"  # which is how a file looks that was cut short and has grown again
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 3))
    spoil(place_of(tmp_path, keys[1]), in_slot(how))
    for one in (disk, tier(tmp_path)):
        assert loaded(one, keys[0]) == content(keys[0])
        assert loaded(one, keys[2]) == content(keys[2])
    assert loaded(disk, keys[1]) is None
    assert disk.stats().misses == {**dict.fromkeys(CAUSES, 0), cause: 1}
    assert keys[1].digest not in places(tmp_path)
    assert not UNPICKLED
    assert disk.lookup(chain(1, 3), 0, 3) == 1
    assert disk.stats().bytes == 2 * SLOT
    assert disk.store(keys[1], content(keys[1]))
    assert loaded(disk, keys[1]) == content(keys[1])
    assert taken(tmp_path) == 3 * SLOT  # it got its place back


@pytest.mark.parametrize("left", [0, 1, 20, PAGE_BYTES, PAGE_BYTES + 20, ENTRY - 1])
def test_pages_that_were_cut_off_are_misses(left: int, tmp_path: Path) -> None:
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 3))
    place = place_of(tmp_path, keys[1])
    os.truncate(place.path, place.at + left)
    assert [loaded(disk, key) for key in keys] == [content(keys[0]), None, None]
    assert disk.stats().misses == {**dict.fromkeys(CAUSES, 0), "size": 2}
    assert places(tmp_path).keys() == {keys[0].digest}
    assert keep(disk, chain(1, 3)) == keys
    assert [loaded(disk, key) for key in keys] == [content(key) for key in keys]


def test_what_follows_a_page_in_its_slot_or_the_last_slot_is_not_read(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    (key,) = keep(disk, chain(1, 1))
    place = place_of(tmp_path, key)
    spoil(place, flip(ENTRY))
    with open(place.path, "ab") as file:
        file.write(b"more")
    assert loaded(disk, key) == content(key)
    assert loaded(again(disk, tmp_path), key) == content(key)


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_what_is_no_file_is_a_miss_and_the_next_start_does_not_know_it(kind: str, tmp_path: Path) -> None:
    disk = tier(tmp_path / "kv", most=4 * SLOT)  # a segment has one page
    keys = keep(disk, chain(1, 2))
    path = place_of(tmp_path / "kv", keys[1]).path
    path.rename(tmp_path / "page")
    match kind:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "page")
        case _:
            os.mkfifo(path)
    assert tier(tmp_path / "kv", most=4 * SLOT).stats().pages == 1
    assert disk.load(keys[1]) is None
    assert sum(disk.stats().misses.values()) == 1
    assert loaded(disk, keys[0]) == content(keys[0])


@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, ENTRY - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_is_ever_believed(at: int, bit: int, tmp_path: Path) -> None:
    disk = tier(tmp_path)
    (key,) = keep(disk, chain(1, 1))
    spoil(place_of(tmp_path, key), flip(at, bit))
    assert disk.load(key) is None
    assert sum(disk.stats().misses.values()) == 1
    disk.close()


@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_an_index_says_no_wrong_page_is_believed(data: st.DataObject, tmp_path: Path) -> None:
    """Changed, cut short or with more behind it: pages come back as they were, or not at all; also afterwards."""
    for path in tmp_path.iterdir():
        path.unlink()
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 4))
    index = place_of(tmp_path, keys[0]).index
    raw = bytearray(index.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    more = data.draw(st.binary(max_size=100))
    index.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] + more)
    disk = again(disk, tmp_path)
    for key in keys:
        assert loaded(disk, key) in (None, content(key))
    keep(disk, chain(2, 3))
    for key in keys + keep(disk, chain(1, 4)):
        assert loaded(disk, key) in (None, content(key))
    assert disk.stats().writable
    disk.close()


def test_a_page_in_the_place_of_another_is_a_miss(tmp_path: Path) -> None:
    """Whatever moves bytes about, and even where a digest is another page's: tokens and parent are compared too."""
    disk = tier(tmp_path)
    mine, other = keep(disk, chain(1, 1))[0], keep(disk, chain(2, 1))[0]
    place_of(tmp_path, mine).write(place_of(tmp_path, other).read())
    assert disk.load(mine) is None
    assert loaded(disk, other) == content(other)
    for twin in (other._replace(tokens=mine.tokens), other._replace(parent=mine.digest)):
        disk.store(other, content(other))
        assert disk.load(twin) is None
        assert other.digest not in places(tmp_path)
    assert disk.stats().misses["foreign"] == 3


def test_pages_of_other_numerics_or_sizes_are_misses(tmp_path: Path) -> None:
    first = tier(tmp_path)
    (key,) = keep(first, chain(1, 1))
    other = again(first, tmp_path, numerics="other")
    assert other.load(key) is None
    assert other.stats().misses["foreign"] == 1
    keep(other, chain(1, 1))
    smaller = again(other, tmp_path, page_bytes=PAGE_BYTES - 8)
    assert smaller.load(key) is None
    assert smaller.stats().misses["foreign"] == 1
    longer = again(smaller, tmp_path, page_bytes=2 * PAGE_BYTES)
    assert longer.store(key, bytes(2 * PAGE_BYTES))
    shorter = again(longer, tmp_path)
    assert shorter.load(key) is None
    assert shorter.stats().misses["size"] == 1


def test_pages_under_another_key_are_misses(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(40)))
    secret.chmod(0o600)
    first = tier(tmp_path / "kv", key_file=secret)
    (key,) = keep(first, chain(1, 1))
    assert not (tmp_path / "kv" / "key").exists()
    same = again(first, tmp_path / "kv", key_file=secret)
    assert loaded(same, key) == content(key)
    other = again(same, tmp_path / "kv")
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
        tier(tmp_path / "kv", most=SLOT - 1)


def test_the_least_recently_used_pages_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    disk = tier(tmp_path, most=4 * SLOT)
    old, used, new = chain(1, 2), chain(2, 2), chain(3, 2)
    keep(disk, old)
    keep(disk, used)
    assert disk.lookup(old, 0, 2) == 2  # now that is the one used last
    keep(disk, new)
    assert [disk.lookup(one, 0, 2) for one in (old, used, new)] == [2, 0, 2]
    stats = disk.stats()
    assert (stats.bytes, stats.evicted) == (4 * SLOT, 2)
    assert (len(places(tmp_path)), taken(tmp_path)) == (4, 4 * SLOT)


def test_of_one_chain_the_last_pages_go_first(tmp_path: Path) -> None:
    """Without its first page a sequence is lost, without its last one it is only shorter."""
    disk = tier(tmp_path, most=4 * SLOT)
    sequence = chain(1, 4)
    keep(disk, sequence)
    assert disk.lookup(sequence, 3, 4) == 1  # the first three were in memory
    keep(disk, chain(2, 1))
    assert disk.lookup(sequence, 0, 4) == 3


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    disk = tier(tmp_path, most=3 * SLOT)
    keys = [keep(disk, chain(seed, 1))[0] for seed in (1, 2, 3)]
    assert disk.load(keys[0]) is not None
    disk = again(disk, tmp_path, most=3 * SLOT)
    keep(disk, chain(4, 1))
    assert [disk.holds(key.digest) for key in keys] == [True, False, True]


def test_a_smaller_bound_is_kept_from_the_first_page_on(tmp_path: Path) -> None:
    """Whole segments go, those that were used last stay."""
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 20))
    disk = again(disk, tmp_path, most=9 * SLOT)
    assert disk.stats().pages == 20
    keep(disk, chain(2, 1))
    assert taken(tmp_path) == disk.stats().bytes <= 9 * SLOT
    assert [disk.holds(key.digest) for key in keys] == [at >= 12 for at in range(20)]
    assert disk.stats().evicted == 12


def test_two_servers_keep_the_bound_together(tmp_path: Path) -> None:
    one, two = tier(tmp_path, most=32 * SLOT), tier(tmp_path, most=32 * SLOT)
    for seed in range(100):
        keep((one, two)[seed % 2], chain(seed, 1))
        assert taken(tmp_path) <= (32 + 2 * 2 + 2) * SLOT
    assert one.stats().writable
    assert two.stats().writable
    recent = [chain(seed, 1) for seed in range(92, 100)]
    third = tier(tmp_path, most=32 * SLOT)
    assert sum(third.lookup(sequence, 0, 1) for sequence in recent) == len(recent)


def test_a_server_that_starts_on_a_full_directory_gets_room_from_the_one_that_has_it(tmp_path: Path) -> None:
    one = tier(tmp_path, most=32 * SLOT)
    keep(one, chain(1, 32))
    two = tier(tmp_path, most=32 * SLOT)
    keys = keep(two, chain(2, 12))
    assert taken(tmp_path) <= 32 * SLOT
    assert all(loaded(two, key) == content(key) for key in keys)
    assert keep(one, chain(3, 4))
    assert one.stats().writable
    held = [loaded(one, key_at(chain(1, 32), at)) for at in range(32)]
    assert held[:10] == [None] * 10
    assert held[20:] == [content(key_at(chain(1, 32), at)) for at in range(20, 32)]
    misses = one.stats().misses
    assert misses["absent"] == sum(misses.values())


def test_pages_of_another_layout_make_room_a_segment_at_a_time(tmp_path: Path) -> None:
    other = tier(tmp_path, most=32 * SLOT, page_bytes=3 * PAGE_BYTES)
    for at in range(10):
        assert other.store(key_at(chain(1, 10), at), bytes(3 * PAGE_BYTES))
    disk = again(other, tmp_path, most=32 * SLOT)
    assert disk.stats().pages == 10
    keep(disk, chain(2, 32))
    assert taken(tmp_path) <= 32 * SLOT
    assert disk.lookup(chain(2, 32), 0, 32) == 32
    assert disk.stats().pages == 32


def test_what_an_earlier_version_left_makes_room_first(tmp_path: Path) -> None:
    """It kept each page in a file that had the digest for a name. Those are not read any more."""
    old = chain(1, 5)
    for digest in old.digests:
        (tmp_path / digest.hex()).write_bytes(bytes(PAGE_BYTES))
    disk = tier(tmp_path, most=6 * SLOT)
    assert (disk.lookup(old, 0, 5), disk.stats().pages) == (0, 0)
    keys = []
    for seed in range(2, 9):
        keys += keep(disk, chain(seed, 1))
        left = [path for path in tmp_path.iterdir() if len(path.name) == 64]
        assert taken(tmp_path) + len(left) * SLOT <= 6 * SLOT
    assert left == []
    assert disk.stats().evicted == 1
    assert [loaded(disk, key) for key in keys] == [None, *map(content, keys[1:])]


def test_a_segment_of_an_unknown_format_makes_room_first(tmp_path: Path) -> None:
    disk = tier(tmp_path, most=4 * SLOT)
    keys = keep(disk, chain(1, 2))
    spoil_index = place_of(tmp_path, keys[1])
    with open(spoil_index.index, "r+b") as file:
        file.seek(8)
        file.write(b"\xff")
    disk = again(disk, tmp_path, most=4 * SLOT)
    assert (disk.stats().pages, taken(tmp_path)) == (1, 2 * SLOT)
    keys = keys[:1] + keep(disk, chain(2, 3))
    assert taken(tmp_path) == 4 * SLOT
    assert not spoil_index.path.exists()
    assert not spoil_index.index.exists()
    assert [loaded(disk, key) for key in keys] == [content(key) for key in keys]


@pytest.mark.parametrize("suffix", [".seg", ".idx"])
def test_a_segment_that_somebody_deleted_is_misses_and_another_takes_its_place(suffix: str, tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    keys = keep(one, chain(1, 2))
    one.tend()  # else its files are open
    place = place_of(tmp_path, keys[0])
    place.path.with_suffix(suffix).unlink()
    if suffix == ".seg":
        assert one.load(keys[1]) is None
    assert keep(one, chain(2, 3))
    assert one.stats().writable
    assert one.load(keys[0]) is None
    assert one.stats().misses["absent"] == 1 + (suffix == ".seg")
    assert one.lookup(chain(1, 2), 0, 2) == 0
    assert keep(one, chain(1, 2))
    assert keep(two, chain(3, 1))
    assert two.stats().writable


def test_a_page_whose_place_was_given_to_another_meanwhile_is_absent(tmp_path: Path) -> None:
    """What a server has heard of another's pages may be old."""
    one = tier(tmp_path, most=4 * SLOT)
    keys = keep(one, chain(1, 4))
    two = tier(tmp_path, most=4 * SLOT)
    keep(one, chain(2, 1))
    assert two.lookup(chain(1, 4), 0, 4) == 4
    assert [loaded(two, key) for key in keys] == [None, *map(content, keys[1:])]
    assert two.stats().misses == {**dict.fromkeys(CAUSES, 0), "absent": 1}
    assert [loaded(one, key) for key in keep(one, chain(2, 1))] == [content(key_at(chain(2, 1), 0))]


def test_a_page_that_two_servers_have_stored_is_there_once_when_one_has_both(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    (key,) = keep(one, chain(1, 1))
    keep(two, chain(1, 1))
    assert len(segment_files(tmp_path)) == 2
    two.close()
    one = again(one, tmp_path)
    assert places(tmp_path).keys() == {key.digest}
    assert loaded(one, key) == content(key)
    keep(one, chain(2, 1))
    assert taken(tmp_path) == 2 * SLOT


def test_a_disk_that_takes_no_writes_past_its_cache_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.pwritev, []

    def picky(file: int, *args: object) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", picky)
    disk = tier(tmp_path)
    keys = keep(disk, chain(1, 3))
    assert len(refused) == 1
    assert [loaded(disk, key) for key in keys] == [content(key) for key in keys]


def test_pages_are_stored_from_wherever_they_lie(tmp_path: Path) -> None:
    """On whole pages of memory or not, in one of its own, or as bytes."""
    disk = tier(tmp_path)
    room = memory(PAGE_BYTES + 100)
    for at, make in enumerate(
        (lambda n: room[:n], lambda n: room[1 : n + 1], bytearray, lambda n: memoryview(bytes(n)))
    ):
        key = key_at(chain(at, 1), 0)
        data = make(PAGE_BYTES)
        if not memoryview(data).readonly:
            data[:] = content(key)
        assert disk.store(key, data)
        assert loaded(disk, key) == bytes(data)


SERVER = """
import random, sys
from pathlib import Path
from tests.kv.tiers import test_disk as t
disk = t.tier(Path(sys.argv[1]), most=24 * t.SLOT)
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
    assert taken(tmp_path / "kv") <= (24 + 3 * 2) * SLOT
    assert not list((tmp_path / "kv").glob(".*"))


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
from tests.kv.tiers import test_disk as t
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
t.spoil(place, t.flip(0))
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
assert keys[1].digest in t.places(folder)  # and it cannot be noted
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
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (1_000_000, 1_000_000))
        (tmp_path / name.replace("0", "2").replace("1", "3")).write_bytes(b"another server's")
    (tmp_path / "README").write_text("not ours")
    (tmp_path / ("g" * 64)).write_text("not ours either")
    keep(tier(tmp_path), chain(1, 1))
    assert tier(tmp_path).stats().pages == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & set(names)
    assert left >= {".2222.tmp", f"{'2' * 16}.seg", f"{'3' * 16}.idx", "README", "g" * 64}
