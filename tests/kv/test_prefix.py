"""The prefix index: what matches, what is evicted and when, and what can never be a hit."""

import hashlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kv.prefix import Node, root_digest
from tests.kv.support import PAGE, ROOT, Cache, Held


def test_a_match_is_the_longest_known_path_of_full_pages() -> None:
    cache = Cache(16)
    cache.remember(range(12))
    assert cache.match(range(12)) == 3
    assert cache.match([*range(8), 99, 98, 97, 96]) == 2
    assert cache.match(range(7)) == 1
    assert cache.match(range(3)) == 0
    assert cache.match([99, *range(1, 12)]) == 0
    cache.check()


def test_the_same_page_after_another_prefix_is_another_page() -> None:
    cache = Cache(16)
    cache.remember([1, 1, 1, 1, 5, 6, 7, 8])
    assert cache.match([2, 2, 2, 2, 5, 6, 7, 8]) == 0
    assert cache.match([5, 6, 7, 8]) == 0


def test_a_match_has_no_side_effects() -> None:
    cache = Cache(8)
    cache.remember(range(8))
    cache.match(range(8))
    assert cache.index.evict(2) == 2
    assert cache.match(range(8)) == 0
    cache.check()


def test_tenants_and_models_share_nothing() -> None:
    roots = [
        root_digest({"tenant": b"a", "model": b"m"}),
        root_digest({"tenant": b"b", "model": b"m"}),
        root_digest({"tenant": b"a", "model": b"n"}),
    ]
    cache = Cache(16)
    cache.remember(range(8), roots[0])
    assert [cache.match(range(8), root) for root in roots] == [2, 0, 0]


def test_no_two_sets_of_keys_have_one_root() -> None:
    sets = [
        {},
        {"a": b""},
        {"a": b"b"},
        {"ab": b""},
        {"a": b"1:b0:"},
        {"a": b"", "b": b""},
        {"b": b"", "c": b""},
    ]
    assert len({root_digest(keys) for keys in sets}) == len(sets)
    assert root_digest({"a": b"1", "b": b"2"}) == root_digest({"b": b"2", "a": b"1"})


def test_identity_is_chained_sha256() -> None:
    chain = Cache(4).chain(range(8))
    first = hashlib.sha256(ROOT + array("i", range(4)).tobytes()).digest()
    assert chain.digests == [first, hashlib.sha256(first + array("i", range(4, 8)).tobytes()).digest()]


def test_a_chain_grows_as_its_sequence_does() -> None:
    cache = Cache(4)
    whole = cache.chain(range(12))
    grown = cache.chain(range(4))
    grown.extend(array("i", range(4, 12)).tobytes())
    assert grown.digests == whole.digests
    grown.extend(array("i", range(3)).tobytes())
    assert len(grown) == 3


def test_pinned_pages_are_never_evicted() -> None:
    cache = Cache(8)
    held = cache.hold(range(12))
    cache.remember(range(100, 112))
    assert cache.index.evictable == 3
    assert cache.index.evict(8) == 3
    assert cache.match(range(12)) == 3
    cache.check([held])
    cache.let_go(held)
    assert cache.index.evict(8) == 3
    assert cache.pool.free == 8
    cache.check()


def test_pinning_a_leaf_keeps_all_that_it_builds_on() -> None:
    cache = Cache(8)
    cache.remember(range(12))
    chain = cache.chain(range(8))
    path = cache.index.match(chain, 2)
    cache.index.pin(path)
    assert cache.index.evict(8) == 1
    assert cache.match(range(12)) == 2
    cache.index.check_integrity([path])


def test_the_least_recently_used_goes_first_and_a_chain_goes_from_its_end() -> None:
    cache = Cache(16)
    for begin in (0, 100, 200):
        cache.remember(range(begin, begin + 12))
    cache.remember(range(12))  # used again
    cache.index.evict(2)
    assert [cache.match(range(b, b + 12)) for b in (0, 100, 200)] == [3, 1, 3]
    cache.index.evict(3)
    assert [cache.match(range(b, b + 12)) for b in (0, 100, 200)] == [3, 0, 1]
    cache.check()


def test_a_shared_stem_outlives_its_branches() -> None:
    cache = Cache(16)
    stem = list(range(8))
    for branch in (50, 60, 70):
        cache.remember([*stem, *range(branch, branch + 4)])
    cache.index.evict(3)
    assert cache.match(stem) == 2
    assert len(cache.index) == 2
    cache.check()


def test_an_equal_page_computed_twice_is_known_once_and_the_second_is_its_owner_s_alone() -> None:
    cache = Cache(8)
    first = cache.hold(range(8))
    chain = cache.chain(range(8))
    own = cache.pool.take(2)
    assert cache.index.insert(chain, 0, None, own[0]) is None
    cache.check([first, ([], own)])
    cache.let_go(first)
    assert cache.index.evictable == 2  # whoever holds its own copy keeps nobody else's
    cache.pool.release(own)
    assert cache.pool.free == 6
    assert cache.match(range(8)) == 2
    cache.check()


def test_reset_forgets_what_nobody_holds() -> None:
    cache = Cache(16)
    held = cache.hold(range(8))
    cache.remember([*range(8), *range(50, 58)])
    cache.remember(range(100, 112))
    assert cache.index.reset() == 5
    assert cache.match(range(8)) == 2
    cache.check([held])
    cache.let_go(held)
    assert cache.index.reset() == 2
    assert cache.pool.free == 16
    assert len(cache.index) == 0
    cache.check()


def test_withdrawn_pages_are_unknown_and_free() -> None:
    cache = Cache(8)
    cache.remember(range(4))
    path, pages = cache.hold(range(12))
    cache.let_go((path, pages))
    cache.index.withdraw(path[1:])
    assert cache.match(range(12)) == 1
    assert cache.pool.free == 7
    cache.check()


def test_withdrawing_skips_what_was_evicted_since() -> None:
    cache = Cache(8)
    path, pages = cache.hold(range(12))
    cache.let_go((path, pages))
    cache.index.evict(2)
    cache.index.withdraw(path)
    assert cache.pool.free == 8
    cache.check()


@pytest.mark.parametrize("digest", [lambda parent, tokens: b"same", lambda parent, tokens: tokens[:4]])
def test_a_colliding_hash_is_a_miss_and_never_a_wrong_hit(digest) -> None:
    cache = Cache(32, digest)
    first = [1, 2, 3, 4, 5, 6, 7, 8]
    cache.remember(first)
    for other in ([1, 9, 9, 9], [1, 2, 3, 5, 5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4, 1, 2, 3, 4]):
        chain = cache.chain(other)
        for at, node in enumerate(cache.index.match(chain, len(chain))):
            assert node.tokens == array("i", first[at * PAGE : at * PAGE + PAGE]).tobytes()
            assert first[: (at + 1) * PAGE] == other[: (at + 1) * PAGE]
        held = cache.hold(other)
        cache.check([held])
        cache.let_go(held)
    cache.check()


def test_a_colliding_hash_never_crosses_tenants() -> None:
    cache = Cache(32, lambda parent, tokens: b"same")
    a, b = root_digest({"tenant": b"a"}), root_digest({"tenant": b"b"})
    cache.remember(range(4), a)
    assert cache.match(range(4), a) == 1
    assert cache.match(range(4), b) == 0
    held = cache.hold(range(4), b)
    assert held[0] == []
    cache.check([held])
    cache.let_go(held)
    assert cache.pool.free == 31
    cache.check()


def test_evictions_look_at_a_constant_number_of_entries_in_a_tree_of_100_000_pages() -> None:
    cache = Cache(100_000)
    stem = [7] * (4 * PAGE)
    for n in range(100_000 // 40):
        cache.remember([*stem, *(n * 1000 + i for i in range(36 * PAGE))][: 40 * PAGE])
    size = len(cache.index)
    assert size > 89_000
    for n in range(0, 2000, 7):  # hits leave stale entries behind
        cache.remember([*stem, *(n * 1000 + i for i in range(36 * PAGE))])
    before = cache.index.visited
    assert cache.index.evict(5000) == 5000
    assert cache.index.visited - before <= 2 * 5000
    before = cache.index.visited
    assert cache.index.evict(1) == 1
    assert cache.index.visited - before <= 64
    cache.check()


def test_hits_without_evictions_do_not_grow_the_heap() -> None:
    cache = Cache(64)
    cache.remember(range(16))
    for _ in range(5000):
        cache.remember(range(16))
    assert len(cache.index._leaves.heap) <= 128
    cache.check()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hold", "let_go", "evict", "reset"]),
            st.lists(st.integers(0, 2), min_size=0, max_size=6),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_pages_and_pins_always_balance(verbs: list[tuple[str, list[int], int]]) -> None:
    cache = Cache(24)
    held: list[Held] = []
    for verb, kinds, count in verbs:
        tokens = [kind for kind in kinds for _ in range(PAGE)]
        if verb == "hold" and len(kinds) <= cache.pool.free + cache.index.evictable - len(kinds):
            held.append(cache.hold(tokens))
        elif verb == "let_go" and held:
            cache.let_go(held.pop(count % len(held)))
        elif verb == "evict":
            had = cache.index.evictable
            assert cache.index.evict(count) == min(count, had)
        elif verb == "reset":
            cache.index.reset()
            assert cache.index.evictable == 0
        cache.check(held)
        for path, pages in held:
            assert [node.page for node in path] == pages[: len(path)]
    for one in held:
        cache.let_go(one)
    cache.index.reset()
    assert cache.pool.free == 24


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["remember", "evict", "reset", "look"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=6),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_a_match_goes_on_from_an_earlier_one_whatever_was_forgotten_meanwhile(
    verbs: list[tuple[str, list[int], int]],
) -> None:
    cache = Cache(12)
    earlier: dict[tuple[int, ...], list[Node]] = {}
    for verb, kinds, count in verbs:
        tokens = [kind for kind in kinds for _ in range(PAGE)]
        if verb == "remember":
            cache.remember(tokens)
        elif verb == "evict":
            cache.index.evict(count)
        elif verb == "reset":
            cache.index.reset()
        chain = cache.chain(tokens)
        found = cache.index.match(chain, count, earlier.get(tuple(kinds), []))
        assert found == cache.index.match(chain, count)
        earlier[tuple(kinds)] = found
