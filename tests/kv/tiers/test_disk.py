"""A page comes back from the disk as it was stored, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.kv.tiers import key_at, memory
from tailrace.kv.tiers.seal import CAUSES
from tailrace.terms import InvalidInput
from tests.kv.tiers.disks import SLOT, again, chain, content, keep, loaded, place_of, taken, tier
from tests.kv.tiers.harms import HEAD_BYTES, PAGE_BYTES, SPOILT, UNPICKLED, flip
from tests.kv.tiers.places import places, spoil


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


def test_many_pages_at_a_time_lie_side_by_side_and_come_back(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    keys = [key_at(chain(1, 20), at) for at in range(20)]
    disk.store_all([(key, content(key)) for key in keys])
    assert [loaded(disk, key) for key in keys] == [content(key) for key in keys]
    assert disk.stats().stored == 20
    assert taken(tmp_path) == 20 * SLOT
    disk.store_all([(key, content(key)) for key in [*keys, key_at(chain(2, 1), 0)]])
    assert disk.stats().stored == 21
    assert taken(tmp_path) == 21 * SLOT


@pytest.mark.parametrize("room", [1, 2, 5])
def test_of_more_pages_at_a_time_than_there_is_room_for_the_last_stay(room: int, tmp_path: Path) -> None:
    disk = tier(tmp_path, most=room * SLOT)
    keys = [key_at(chain(1, 23), at) for at in range(23)]
    disk.store_all([(key, content(key)) for key in keys])
    held = [at for at, key in enumerate(keys) if disk.holds(key.digest)]
    assert len(held) == room
    assert held[-1] == 22
    assert all(loaded(disk, keys[at]) == content(keys[at]) for at in held)
    assert taken(tmp_path) == room * SLOT
    assert disk.stats().stored == 23
    assert disk.stats().writable
