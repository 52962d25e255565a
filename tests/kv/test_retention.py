"""How long pages are kept: what each policy lets go first, what never goes, and what no tenant may have."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kv.prefix import root_digest
from tailrace.kv.retention import POLICIES, Policy, make_policy
from tailrace.terms import InvalidInput
from tests.kv.support import PAGE, ROOT, Cache, Held

TENANTS = [root_digest({"tenant": name}) for name in (b"a", b"b", b"c")]
STEM = [1] * PAGE * 2


def policy_of(name: str) -> Policy:
    return make_policy(name, page_tokens=PAGE, ttl=10.0 if name == "ttl" else 0.0, parity=64.0)


def cache_of(name: str, pages: int = 24, **index: object) -> Cache:
    return Cache(pages, policy=policy_of(name), **index)


def page(kind: int, count: int = 1) -> list[int]:
    return [kind] * PAGE * count


def as_bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


# --- what goes first


@pytest.mark.parametrize("name", ["lru", "ttl"])
def test_the_least_recently_used_goes_first(name: str) -> None:
    cache = cache_of(name)
    for now, kind in enumerate((5, 6, 7, 5, 5, 6)):
        cache.index.advance(now)
        cache.remember(page(kind))
    cache.index.evict(1)
    assert [cache.match(page(kind)) for kind in (5, 6, 7)] == [1, 1, 0]
    cache.index.evict(1)
    assert [cache.match(page(kind)) for kind in (5, 6)] == [0, 1]


def test_lfu_keeps_what_was_used_often_and_of_equals_what_was_used_last() -> None:
    cache = cache_of("lfu")
    for kind in (5, 5, 5, 6, 7, 8, 7, 6):
        cache.remember(page(kind))
    gone = []
    for _ in range(4):
        before = {kind for kind in (5, 6, 7, 8) if cache.match(page(kind))}
        cache.index.evict(1)
        gone += [kind for kind in before if not cache.match(page(kind))]
    assert gone == [8, 7, 6, 5]


def test_what_was_popular_once_goes_when_others_are_popular_now() -> None:
    cache = cache_of("lfu", 4)
    for _ in range(20):
        cache.remember(page(100))
    steps = 0
    while cache.match(page(100)):
        cache.remember(page(200 + steps))
        steps += 1
        assert steps < 200, "the page of the past stays for ever"
    assert steps > 20


def test_cost_keeps_a_late_page_rather_than_an_early_one_used_as_often() -> None:
    cache = cache_of("cost")
    cache.remember([*page(5, 6)])
    cache.remember(page(6))
    cache.index.evict(1)
    assert cache.match(page(5, 6)) == 6
    assert cache.match(page(6)) == 0
    lru = cache_of("lru")
    lru.remember([*page(5, 6)])
    lru.remember(page(6))
    lru.index.evict(1)
    assert lru.match(page(5, 6)) == 5


def test_cost_lets_an_expensive_page_go_in_the_end() -> None:
    cache = cache_of("cost", 8)
    cache.remember(page(5, 6))
    steps = 0
    while cache.match(page(5, 6)) == 6:
        cache.remember(page(100 + steps))
        steps += 1
        assert steps < 100, "what it saved once pays for it for ever"
    assert steps > 1


def test_a_page_stays_in_proportion_to_its_uses_and_its_prefill() -> None:
    policy = make_policy("cost", page_tokens=16, parity=160.0)
    cache = Cache(4, policy=policy)
    path, pages = cache.hold(page(5, 2))
    cache.let_go((path, pages))
    assert [node.value for node in path] == pytest.approx([1 + 8 / 160, 1 + 24 / 160])
    policy.evicted(3.0)
    policy.evicted(2.0)  # the level never falls
    cache.remember(page(5))
    assert path[0].value == pytest.approx(3 + 2 * (1 + 8 / 160))


# --- time to live


def test_ttl_forgets_what_has_not_been_used_for_longer_though_there_is_room() -> None:
    cache = cache_of("ttl")
    cache.remember(page(5, 3))
    cache.index.advance(6.0)
    cache.remember(page(5))
    assert cache.index.advance(10.0) == 0  # not longer yet
    assert cache.index.advance(10.5) == 2
    assert cache.match(page(5, 3)) == 1
    assert cache.index.advance(100.0) == 1
    assert cache.pool.free == 24
    assert cache.index.evictions == {"pressure": 0, "ttl": 3, "quota": 0, "reset": 0}
    cache.check()


def test_ttl_never_forgets_what_a_request_holds() -> None:
    cache = cache_of("ttl")
    held = cache.hold(page(5, 2))
    assert cache.index.advance(1000.0) == 0
    cache.check([held])
    cache.let_go(held)
    assert cache.index.advance(1009.0) == 0
    assert cache.index.advance(1011.0) == 2


@pytest.mark.parametrize("name", ["lru", "lfu", "cost"])
def test_other_policies_forget_nothing_while_there_is_room(name: str) -> None:
    cache = cache_of(name)
    cache.remember(page(5, 3))
    assert cache.index.advance(1e9) == 0
    assert cache.match(page(5, 3)) == 3


@pytest.mark.parametrize(
    ("name", "ttl", "param"),
    [("mru", 0.0, "kv_policy"), ("ttl", 0.0, "kv_ttl"), ("ttl", -1.0, "kv_ttl"), ("ttl", float("nan"), "kv_ttl"),
     ("ttl", float("inf"), "kv_ttl"), ("lru", 5.0, "kv_ttl")],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(name: str, ttl: float, param: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        make_policy(name, page_tokens=16, ttl=ttl)
    assert refused.value.param == param


# --- tenants


@pytest.mark.parametrize("name", POLICIES)
def test_a_tenant_over_its_share_loses_its_own_pages_and_nobody_elses(name: str) -> None:
    cache = cache_of(name, 20, share=0.25)
    cache.remember(page(5, 5), TENANTS[0])
    for kind in range(100, 120):
        cache.remember(page(kind), TENANTS[1])
        cache.check()
    assert cache.match(page(5, 5), TENANTS[0]) == 5
    assert sum(cache.match(page(kind), TENANTS[1]) for kind in range(100, 120)) == 5
    assert cache.index.evictions["quota"] == 15
    assert cache.index.evictions["pressure"] == 0


def test_of_a_tenants_own_pages_the_least_valued_go_first() -> None:
    cache = cache_of("lru", 10, share=0.3)
    for kind in (5, 6, 7, 5, 8):
        cache.remember(page(kind), TENANTS[0])
    assert [cache.match(page(kind), TENANTS[0]) for kind in (5, 6, 7, 8)] == [1, 0, 1, 1]


def test_pages_in_use_do_not_count_against_a_share_until_they_are_let_go() -> None:
    cache = cache_of("lru", 10, share=0.2)
    held = cache.hold(page(5, 6), TENANTS[0])
    cache.check([held])
    assert cache.match(page(5, 6), TENANTS[0]) == 6
    cache.let_go(held)
    assert cache.match(page(5, 6), TENANTS[0]) == 2
    assert cache.pool.free == 8
    cache.check()


# --- kept for good


def keeping(name: str = "lru", pages: int = 24, **index: object) -> Cache:
    return cache_of(name, pages, keep=[as_bytes([*STEM, 9])], keep_pages=4, **index)


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefix_that_is_to_be_kept_stays_once_it_is_computed(name: str) -> None:
    cache = keeping(name)
    assert cache.index.kept == 0
    cache.remember([*STEM, *page(5)])
    assert cache.index.kept == 2
    assert cache.index.evict(24) == 1
    cache.index.advance(1e6)
    cache.index.reset()
    assert cache.match([*STEM, *page(5)]) == 2
    assert cache.index.evictable == 0
    cache.check()


def test_every_tenant_keeps_its_own_copy_up_to_the_bound() -> None:
    cache = keeping()
    for tenant in TENANTS:
        cache.remember(STEM, tenant)
        cache.check()
    assert cache.index.kept == 4
    cache.index.reset()
    assert [cache.match(STEM, tenant) for tenant in TENANTS] == [2, 2, 0]


def test_kept_pages_do_not_count_against_a_share() -> None:
    cache = keeping(share=0.1)
    cache.remember([*STEM, *page(5, 3)])
    assert cache.match([*STEM, *page(5, 3)]) == 4
    cache.check()


def test_only_the_pages_of_the_prefix_itself_are_kept() -> None:
    cache = keeping()
    cache.remember([*page(2), *page(1)])  # its second page, after another first one
    cache.remember([*page(1), *page(2)])
    assert cache.index.kept == 1
    cache.index.reset()
    assert cache.match(STEM) == 1


def test_prefixes_that_begin_alike_are_kept_once() -> None:
    cache = Cache(24, keep=[as_bytes([*STEM, *page(3)]), as_bytes([*STEM, *page(4)])], keep_pages=24)
    for kind in (3, 4, 5):
        cache.remember([*STEM, *page(kind)])
    assert cache.index.kept == 4
    cache.index.reset()
    assert [cache.match([*STEM, *page(kind)]) for kind in (3, 4, 5)] == [3, 3, 2]
    cache.check()


def test_what_was_to_be_kept_but_was_never_written_is_withdrawn() -> None:
    cache = keeping()
    held = cache.hold([*STEM, *page(5)])
    cache.let_go(held)
    cache.index.withdraw(held[0])
    assert cache.index.kept == 0
    assert cache.pool.free == 24
    cache.check()
    cache.remember(STEM)
    assert cache.index.kept == 2
    cache.check()


def test_a_page_is_not_kept_without_those_before_it() -> None:
    cache = keeping()
    first = cache.hold(STEM, TENANTS[0])
    cache.remember(STEM, TENANTS[1])
    cache.remember(page(1), TENANTS[2])  # the room for kept pages is taken
    cache.let_go(first)
    cache.index.withdraw(first[0])  # and free again
    cache.remember(STEM, TENANTS[2])
    assert cache.index.kept == 2
    cache.check()


@pytest.mark.parametrize("digest", [lambda parent, tokens: b"same", lambda parent, tokens: tokens[:4]])
def test_a_colliding_hash_keeps_no_other_page(digest: Callable[[bytes, bytes], bytes]) -> None:
    cache = Cache(24, digest, keep=[as_bytes(STEM)], keep_pages=24)
    cache.remember([1, 2, 3, 4])
    assert cache.index.kept == 0
    cache.check()


# --- whatever comes


def test_lru_evicts_as_a_list_of_leaves_by_last_use_would() -> None:
    """The order before there were policies: an eviction takes the leaf whose last use is longest ago."""
    cache = Cache(40)
    for n in range(400):
        kinds = [n * 7 % 3, n * n % 5, n % 4, n * 3 % 7][: 1 + n % 4]
        cache.remember([token for kind in kinds for token in page(kind)])
        if n % 3 == 0:
            leaves = [node for node in cache.index._nodes.values() if not node.children]
            oldest = min(leaves, key=lambda node: (node.used, node.entry))
            cache.index.evict(1)
            assert not oldest.alive


@pytest.mark.parametrize("name", POLICIES)
def test_evictions_look_at_a_constant_number_of_entries_in_a_tree_of_100_000_pages(name: str) -> None:
    cache = cache_of(name, 100_000, share=0.95)

    def prompt(n: int) -> list[int]:
        return [*STEM, *range(n * 1000, n * 1000 + 38 * PAGE)]

    for n in range(2400):
        cache.remember(prompt(n))
    for n in range(0, 2400, 3):  # hits leave stale entries behind
        cache.remember(prompt(n))
    assert len(cache.index) > 90_000
    before = cache.index.visited
    assert cache.index.evict(5000) == 5000
    assert cache.index.visited - before <= 2 * 5000
    cache.check()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    share=st.sampled_from([1.0, 0.5, 0.1]),
    keep=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=2),
    verbs=st.lists(
        st.tuples(
            st.sampled_from(["hold", "hold", "let_go", "let_go", "evict", "advance", "reset", "withdraw"]),
            st.lists(st.integers(0, 2), min_size=0, max_size=6),
            st.integers(0, 8),
        ),
        max_size=50,
    ),
)
def test_books_balance_whatever_the_policy(
    name: str, share: float, keep: list[list[int]], verbs: list[tuple[str, list[int], int]]
) -> None:
    prefixes = [as_bytes([token for kind in kinds for token in page(kind)]) for kinds in keep]
    cache = cache_of(name, share=share, keep=prefixes, keep_pages=8)
    held: list[Held] = []
    now = 0.0
    for verb, kinds, count in verbs:
        tokens = [token for kind in kinds for token in page(kind)]
        index = cache.index
        if verb == "hold" and len(kinds) <= cache.pool.free + index.evictable - len(kinds):
            held.append(cache.hold(tokens, TENANTS[count % 3]))
        elif verb == "let_go" and held:
            cache.let_go(held.pop(count % len(held)))
        elif verb == "evict":
            had = index.evictable
            leaves = [node for node in index._nodes.values() if not node.pins and not node.children]
            assert index.evict(count) == min(count, had)
            if count and leaves:
                least = min(leaves, key=lambda node: (node.value, node.used, node.entry))
                assert not least.alive
        elif verb == "advance":
            now += count
            index.advance(now)
        elif verb == "reset":
            index.reset()
            assert index.evictable == 0
        elif verb == "withdraw":
            path, pages = cache.hold(tokens[: PAGE * 2], ROOT) if cache.pool.free >= 2 else ([], [])
            fresh = [node for node in path if node.uses == 0]
            cache.let_go((path, pages))
            index.withdraw(fresh)
        cache.check(held)
    for one in held:
        cache.let_go(one)
    cache.index.reset()
    assert cache.pool.free == 24 - cache.index.kept
    cache.check()
