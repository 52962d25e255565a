"""Several servers in one directory, one after the other or at once, and what others have left there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.kv.tiers import key_at
from tailrace.kv.tiers.seal import CAUSES
from tests.kv.tiers.disks import SLOT, again, chain, content, keep, loaded, place_of, taken, tier
from tests.kv.tiers.harms import PAGE_BYTES, flip
from tests.kv.tiers.places import places, segment_files


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


SERVER = """
import random, sys
from pathlib import Path
from tests.kv.tiers import disks as t
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


ROOM = 20
"""Slots of the directory in which anything may happen; segments have one."""


DEEDS = st.tuples(
    st.sampled_from(["store", "store", "store", "load", "rest", "restart", "harm"]),
    st.integers(0, 1),  # by which server
    st.integers(0, 35),  # the first page
    st.integers(1, 9),  # and how many
    st.sampled_from(["delete", "cut", "change"]),
    st.integers(0, 1 << 20),
)


def harm(path: Path, kind: str, where: int) -> None:
    """Does so to a file."""
    raw = path.read_bytes()
    at = where % (len(raw) + 1)
    if kind == "delete":
        path.unlink()
    elif kind == "cut":
        os.truncate(path, at)
    elif at < len(raw):
        path.write_bytes(flip(at, where % 8)(raw))


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deeds=st.lists(DEEDS, max_size=40))
def test_whatever_happens_no_page_is_wrong_the_bound_holds_and_a_server_finds_what_it_stores(
    deeds: list[tuple[str, int, int, int, str, int]], tmp_path: Path
) -> None:
    """Two servers store, load, end, die and start; files are deleted, cut short and changed meanwhile."""
    for path in tmp_path.iterdir():
        path.unlink()
    disks = [tier(tmp_path, ROOM * SLOT), tier(tmp_path, ROOM * SLOT)]
    keys = [key_at(chain(seed, 3), at) for seed in range(12) for at in range(3)]
    for what, at, first, count, kind, where in deeds:
        some = keys[first : first + count]
        match what:
            case "store":
                disks[at].store_all([(key, content(key)) for key in some])
                assert loaded(disks[at], some[-1]) in (None, content(some[-1]))
            case "load":
                disks[at].prepare(some)
                for key in some:
                    assert loaded(disks[at], key) in (None, content(key))
            case "rest":
                disks[at].tend()
            case "restart":
                disks[at] = again(disks[at], tmp_path, ROOM * SLOT)
            case _:
                files = sorted(path for path in tmp_path.iterdir() if path.suffix in (".seg", ".idx"))
                if files:
                    harm(files[where % len(files)], kind, where)
        assert taken(tmp_path) <= (ROOM + 2 * 8) * SLOT
    for disk in disks:
        disk.close()
    disk = tier(tmp_path, ROOM * SLOT)
    for key in keys:
        assert loaded(disk, key) in (None, content(key))
        assert disk.store(key, content(key))
        assert loaded(disk, key) == content(key)
    assert disk.stats().writable
    assert taken(tmp_path) <= ROOM * SLOT
    disk.close()
