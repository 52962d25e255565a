"""A page comes back from the server as it was stored, or not at all, whatever it does; and nobody waits long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.kv.prefix import PageChain
from tailrace.kv.tiers import PageKey, key_at, valkey
from tailrace.kv.tiers.seal import CAUSES, Seal
from tailrace.kv.tiers.valkey import FIRST_PAUSE, FULL_PAUSE, LONGEST_PAUSE, ValkeyTier, read_password
from tailrace.terms import InvalidInput
from tests.fakes import FakeClock
from tests.kv.tiers.disks import chain, content
from tests.kv.tiers.harms import PAGE_BYTES, SPOILT
from tests.valkey import Server, StandIn, needs_server, running

SECRET = bytes(range(32))
DAY = 86400.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine which does much else is not taken for a server that fails."""
    monkeypatch.setattr(valkey, "TIMEOUT", 20.0)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    with running(StandIn, tmp_path) as server:
        yield server


@pytest.fixture(params=["stand-in", pytest.param("real", marks=needs_server)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with running(StandIn if request.param == "stand-in" else Server, tmp_path) as made:
        yield made


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Server]:
    with running(Server, tmp_path) as made:
        yield made


@pytest.fixture
def tier() -> Iterator[Callable[..., ValkeyTier]]:
    """Makes tiers, connected where there is a server, and closes them."""
    made: list[ValkeyTier] = []

    def make(server: Any, *, secret: bytes = SECRET, ttl: float = DAY, **options: Any) -> ValkeyTier:
        layout = {"numerics": "test", "page_bytes": PAGE_BYTES, "page_tokens": 16}
        sealed = Seal(secret, **{**layout, **options.pop("layout", {})})
        made.append(ValkeyTier(options.pop("url", None) or server.url, sealed, ttl=ttl, **options))
        made[-1].tend()
        return made[-1]

    yield make
    for one in made:
        one.close()


def keys_of(sequence: PageChain) -> list[PageKey]:
    return [key_at(sequence, at) for at in range(len(sequence))]


def keep(tier: ValkeyTier, sequence: PageChain) -> list[PageKey]:
    """Stores all pages, and hears that they are."""
    for key in keys_of(sequence):
        assert tier.store(key, content(key))
    tier.tend()
    return keys_of(sequence)


def loaded(tier: ValkeyTier, key: PageKey) -> bytes | None:
    data = tier.load(key)
    return None if data is None else bytes(data)


def found(tier: ValkeyTier, sequence: PageChain) -> int:
    tier.ask(sequence.digests)
    return tier.lookup(sequence, 0, len(sequence))


def works(tier: ValkeyTier, clock: FakeClock, sequence: PageChain) -> bool:
    """Whether it keeps pages again, once its longest pause is over. A busy machine may need more than one try where a
    test has little patience."""
    clock.advance(LONGEST_PAUSE)
    tier.tend()
    keys = keys_of(sequence)
    stored = [tier.store(key, content(key)) for key in keys]
    tier.tend()
    return tier.up and all(stored) and [loaded(tier, key) for key in keys] == [content(key) for key in keys]


Make = Callable[..., ValkeyTier]


def test_what_one_replica_has_stored_another_finds(server: Any, tier: Make) -> None:
    sequence = chain(1, 40)
    one, two = tier(server), tier(server)
    keys = keep(one, sequence)
    assert one.lookup(sequence, 0, 40) == 40
    assert two.lookup(sequence, 0, 40) == 0
    assert not two.holds(keys[0].digest)
    assert found(two, sequence) == 40
    assert two.holds(keys[0].digest)
    two.prepare(keys)
    for key in keys:
        assert loaded(two, key) == content(key)
    stats = two.stats()
    assert (stats.loaded, stats.pages, sum(stats.misses.values())) == (40, 40, 0)
    assert one.stats().stored == 40


@pytest.mark.parametrize("gap", [0, 15, 16, 17, 39])
def test_what_is_found_ends_at_the_first_page_that_is_not_there(gap: int, server: Any, tier: Make) -> None:
    sequence = chain(1, 40)
    one = tier(server)
    for at, key in enumerate(keys_of(sequence)):
        if at != gap:
            one.store(key, content(key))
    assert found(tier(server), sequence) == gap


def test_pages_are_loaded_without_being_asked_for_and_in_any_order(server: Any, tier: Make) -> None:
    keys = keep(tier(server), chain(1, 30))
    other = keep(tier(server), chain(2, 2))
    two = tier(server)
    two.prepare(keys)
    assert [loaded(two, key) for key in keys[:3]] == [content(key) for key in keys[:3]]
    assert loaded(two, keys[20]) == content(keys[20])  # that was not the next one
    assert found(two, chain(2, 2)) == 2
    two.prepare(keys)
    assert two.store(key_at(chain(3, 1), 0), content(key_at(chain(3, 1), 0)))
    assert loaded(two, other[1]) == content(other[1])
    assert loaded(two, keys[0]) == content(keys[0])


@pytest.mark.parametrize("name", SPOILT)
def test_an_entry_that_was_spoilt_is_a_miss_and_is_stored_anew(name: str, stand_in: StandIn, tier: Make) -> None:
    spoil, cause = SPOILT[name]
    one = tier(stand_in)
    keys = keep(one, chain(1, 3))
    place = next(place for place in stand_in.data if place.endswith(keys[1].digest.hex().encode()))
    stand_in.data[place] = spoil(stand_in.data[place])
    if name == "empty":
        cause = "absent"  # which is what a server says that has nothing
    assert loaded(one, keys[0]) == content(keys[0])
    assert loaded(one, keys[1]) is None
    assert one.stats().misses == {**dict.fromkeys(CAUSES, 0), cause: 1}
    assert one.up
    assert not one.holds(keys[1].digest)
    assert one.store(keys[1], content(keys[1]))
    assert loaded(one, keys[1]) == content(keys[1])


def test_a_page_under_the_name_of_another_is_a_miss(stand_in: StandIn, tier: Make) -> None:
    one = tier(stand_in)
    mine, other = keep(one, chain(1, 1))[0], keep(one, chain(2, 1))[0]
    places = list(stand_in.data)
    stand_in.data[places[0]] = stand_in.data[places[1]]
    assert one.load(mine) is None
    for twin in (other._replace(tokens=mine.tokens), other._replace(parent=mine.digest)):
        assert one.load(twin) is None
    assert one.stats().misses["foreign"] == 3
    assert loaded(one, other) == content(other)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_no_flipped_bit_is_ever_believed(at: int, bit: int, stand_in: StandIn, tier: Make) -> None:
    one = tier(stand_in)
    (key,) = keep(one, chain(1, 1))
    (place,) = stand_in.data
    raw = bytearray(stand_in.data[place])
    raw[at % len(raw)] ^= 1 << bit
    stand_in.data[place] = bytes(raw)
    assert one.load(key) is None
    assert sum(one.stats().misses.values()) == 1
    one.close()


def test_another_key_or_layout_finds_nothing_and_harms_nothing(server: Any, tier: Make) -> None:
    one = tier(server)
    keys = keep(one, chain(1, 2))
    for other in (tier(server, secret=bytes(32)), tier(server, layout={"numerics": "other"})):
        assert found(other, chain(1, 2)) == 0
        assert other.load(keys[0]) is None
        assert other.stats().misses["absent"] == 1
        keep(other, chain(1, 2))
    assert [loaded(one, key) for key in keys] == [content(key) for key in keys]


@needs_server
def test_the_server_forgets_pages_after_their_time(real: Server, tier: Make) -> None:
    one = tier(real, ttl=90.0)
    keep(one, chain(1, 2))
    with real.client() as client:
        for place in client.scan_iter():
            assert 60_000 < client.pttl(place) <= 90_000
            client.pexpire(place, 1)
        end = time.monotonic() + 10.0
        while client.dbsize():
            assert time.monotonic() < end, "pages outlive their time"
            time.sleep(0.01)
    assert found(one, chain(1, 2)) == 0
    for_ever = tier(real, ttl=0.0)
    keep(for_ever, chain(1, 1))
    with real.client() as client:
        assert client.ttl(next(client.scan_iter())) == -1


def test_what_is_known_is_believed_for_a_while(stand_in: StandIn, tier: Make) -> None:
    clock = FakeClock()
    one = tier(stand_in, ttl=100.0, clock=clock)
    (key,) = keep(one, chain(1, 1))
    clock.advance(49.0)
    assert one.holds(key.digest)
    clock.advance(2.0)
    assert not one.holds(key.digest)
    assert one.lookup(chain(1, 1), 0, 1) == 0
    assert found(one, chain(1, 1)) == 1


@needs_server
def test_values_of_another_kind_or_size_are_misses_and_are_not_read_whole(real: Server, tier: Make) -> None:
    one = tier(real)
    keys = keep(one, chain(1, 3))
    with real.client() as client:
        places = {key: next(p for p in client.scan_iter() if p.endswith(key.digest.hex().encode())) for key in keys}
        client.delete(places[keys[0]])
        client.rpush(places[keys[0]], "x")
        client.set(places[keys[1]], bytes(50_000_000))
        one.prepare(keys)
        before = client.info("stats")["total_net_output_bytes"]
        assert [loaded(one, key) for key in keys] == [None, None, content(keys[2])]
        assert client.info("stats")["total_net_output_bytes"] - before < 10 * PAGE_BYTES
    assert {cause: n for cause, n in one.stats().misses.items() if n} == {"foreign": 1, "size": 1}
    assert one.up


def test_a_full_server_is_only_read_and_tried_again(
    stand_in: StandIn, tier: Make, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    one = tier(stand_in, clock=clock)
    keys = keep(one, chain(1, 2))
    stand_in.mode = "full"
    with caplog.at_level(logging.WARNING, "tailrace"):
        for seed in range(2, 40):
            one.store(key_at(chain(seed, 1), 0), bytes(PAGE_BYTES))
            one.tend()
        assert len(caplog.records) == 1
        assert "maxmemory" in caplog.text
        assert one.stats().refused == 38
        assert stand_in.commands < 10  # it was not bothered with all of them
        assert not one.stats().writable
        assert one.up
        assert loaded(one, keys[0]) == content(keys[0])
        stand_in.mode = "well"
        clock.advance(FULL_PAUSE)
        keep(one, chain(50, 1))
    assert one.stats().writable
    assert len(caplog.records) == 2


@needs_server
@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_the_server_bounds_its_memory_by_its_own_policy(policy: str, tmp_path: Path, tier: Make) -> None:
    with running(Server, tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", policy) as server:
        one = tier(server, clock=FakeClock())  # once full it stays so, however long this takes
        sequences = [chain(seed, 10) for seed in range(60)]
        for sequence in sequences:
            for key in keys_of(sequence):
                one.store(key, content(key))
            one.tend()
        stats = one.stats()
        assert one.up
        assert stats.writable == (policy == "allkeys-lru")
        assert bool(stats.refused) == (policy == "noeviction")
        two = tier(server)
        there = sum(found(two, sequence) for sequence in sequences)
        assert 10 < there < 500
        for sequence in sequences:
            for key in keys_of(sequence):
                assert loaded(two, key) in (None, content(key))
        assert not any(count for cause, count in two.stats().misses.items() if cause != "absent")


FAULTS = ["hang", "cut", "rubbish", "wrong", "error", "gone"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_left_alone_and_tried_again(
    fault: str, stand_in: StandIn, tier: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "hang":
        monkeypatch.setattr(valkey, "TIMEOUT", 0.2)
    clock = FakeClock()
    one = tier(stand_in, clock=clock)
    sequence = chain(1, 3)
    keys = keep(one, sequence)
    held = dict(stand_in.data)
    if fault == "gone":
        stand_in.kill()
    else:
        stand_in.mode = fault
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING, "tailrace"):
        one.ask(sequence.digests)
        assert not one.up
        assert one.lookup(sequence, 0, 3) == 0
        assert not one.holds(keys[0].digest)
        commands, pause = stand_in.commands, FIRST_PAUSE
        for _ in range(12):
            assert one.load(keys[0]) is None
            assert not one.store(keys[0], content(keys[0]))
            one.ask(sequence.digests)
            assert stand_in.commands == commands
            assert one.tend() == pytest.approx(pause)
            clock.advance(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
            one.tend()
            assert not one.up
            commands = stand_in.commands
        assert time.monotonic() - begun < 10
        assert len(caplog.records) == 1
        assert "not shared through unix://" in caplog.text
        assert one.stats().misses["error"] == 12
        stand_in.mode = "well"
        if fault == "gone":
            stand_in.start()
        stand_in.data |= held
        assert any(
            works(one, clock, chain(2, 1))
            and found(one, sequence) == 3
            and [loaded(one, key) for key in keys] == [content(key) for key in keys]
            for _ in range(100)
        )
        assert "are shared through unix://" in caplog.records[1].getMessage()


def test_a_server_that_is_not_there_at_the_start_is_waited_for_by_nobody(tmp_path: Path, tier: Make) -> None:
    clock = FakeClock()
    begun = time.monotonic()
    one = tier(None, url=f"unix://{tmp_path}/standin.sock", clock=clock)
    assert not one.up
    assert time.monotonic() - begun < 2
    with running(StandIn, tmp_path):
        clock.advance(FIRST_PAUSE)
        one.tend()
        assert one.up
        keep(one, chain(1, 1))
        one.close()


@needs_server
def test_a_killed_server_is_used_again_once_it_is_back(real: Server, tier: Make) -> None:
    clock = FakeClock()
    one = tier(real, clock=clock)
    keys = keep(one, chain(1, 20))
    one.prepare(keys)
    assert loaded(one, keys[0]) == content(keys[0])
    real.kill()
    rest = [loaded(one, key) for key in keys[1:]]
    assert all(data in (None, content(key)) for key, data in zip(keys[1:], rest, strict=True))
    one.ask(chain(1, 20).digests)  # the pages were on their way
    assert not one.up
    real.start()
    clock.advance(LONGEST_PAUSE)
    one.tend()
    assert one.up
    assert found(one, chain(1, 20)) == 0
    keep(one, chain(1, 20))
    assert [loaded(one, key) for key in keys] == [content(key) for key in keys]


STEPS = st.one_of(
    st.tuples(st.sampled_from(["store", "load", "prepare", "ask", "spoil", "drop"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["hang", "cut", "rubbish", "wrong", "error", "full", "gone", "well"]), st.just(0)),
)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=30))
def test_whatever_happens_no_wrong_page_is_ever_given(
    steps: list[tuple[str, int]], tmp_path: Path, tier: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey, "TIMEOUT", 0.02)
    sequences = [chain(seed, 4) for seed in range(6)]
    clock = FakeClock()
    with running(StandIn, tmp_path) as server:
        one = tier(server, clock=clock)
        for verb, at in steps:
            keys = keys_of(sequences[at])
            if verb == "store":
                for key in keys:
                    one.store(key, content(key))
            elif verb == "load":
                for key in keys:
                    assert loaded(one, key) in (None, content(key))
            elif verb == "prepare":
                one.prepare(keys)
                assert loaded(one, keys[0]) in (None, content(keys[0]))
            elif verb == "ask":
                assert 0 <= found(one, sequences[at]) <= 4
            elif verb in ("spoil", "drop"):
                for place in list(server.data)[at : at + 2]:
                    server.data[place] = b"spoilt" if verb == "spoil" else server.data[place][:-1] + b"\0"
            elif verb == "gone":
                server.kill()
                server.start()
            else:
                server.mode = verb
                clock.advance(LONGEST_PAUSE)
                one.tend()
        server.mode = "well"
        one.ask(sequences[0].digests)  # whether it has failed meanwhile
        assert any(works(one, clock, chain(99, 4)) for _ in range(100))
        one.close()


@needs_server
def test_a_password_comes_from_the_url_or_a_file_and_is_never_told(
    tmp_path: Path, tier: Make, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "password"
    secret.write_text("open sesame\n")
    secret.chmod(0o600)
    with running(Server, tmp_path, "--requirepass", "open sesame") as server:
        assert tier(server, password=read_password(str(secret))).up
        assert tier(server, url=f"unix://:open%20sesame@{server.path}").up
        with caplog.at_level(logging.WARNING, "tailrace"):
            assert not tier(server, url=f"unix://:wrong@{server.path}").up
            assert not tier(server).up
        assert "wrong" not in caplog.text
        assert len(caplog.records) == 2
    secret.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600"):
        read_password(str(secret))
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_password(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("valkey://user:pw@host:6380/2?ssl=1", "valkey://host:6380/2"),
        ("rediss://host", "rediss://host"),
        ("valkey://[::1]:6379", "valkey://[::1]:6379"),
        ("unix://:pw@/run/valkey.sock?db=1", "unix:///run/valkey.sock"),
    ],
)
def test_where_a_server_is_can_be_told_without_the_password(url: str, shown: str) -> None:
    assert valkey.check(url) == shown


@pytest.mark.parametrize("url", ["", "host", "http://host", "valkey://", "unix://", "valkey://host:99999999"])
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="--kv-valkey is the URL"):
        valkey.check(url)


def test_options_that_no_connection_takes_are_refused(tier: Make) -> None:
    with pytest.raises(InvalidInput, match="--kv-valkey valkey://host"):
        tier(None, url="valkey://:pw@host?nonsense=1")
