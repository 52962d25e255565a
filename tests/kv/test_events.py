"""KV events: whoever hears all of them knows what the index holds, and nothing of whose it is."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kv.events import Batch, EventLog, events_of, snapshot
from tailrace.kv.prefix import root_digest
from tailrace.kv.retention import Ttl
from tests.kv.support import PAGE, ROOT, Cache, Held
from tests.kv.view import View, content, known_roots, on_the_wire

OTHER = root_digest({"tenant": b"other", "model": b"m"})


def taken(log: EventLog) -> list[list[Any]]:
    changes = log.take()
    return on_the_wire(events_of(changes)) if changes is not None else []


def logged(pages: int = 16, **index: Any) -> tuple[Cache, EventLog]:
    cache, log = Cache(pages, **index), EventLog()
    cache.index.listener = log
    assert taken(log) == [["AllBlocksCleared"]]
    return cache, log


def test_a_batch_is_what_vllm_sends() -> None:
    cache, log = logged()
    cache.remember(range(8))
    changes = log.take()
    assert changes is not None
    digests = cache.chain(range(8)).digests
    stored = ["BlockStored", digests, None, list(range(8)), PAGE, None, "CPU"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Batch(1.5, events_of(changes)))) == [1.5, [stored], 0]


def test_pages_in_a_row_are_one_event_and_name_the_page_before_them() -> None:
    cache, log = logged()
    cache.remember(range(4))
    taken(log)
    cache.remember(range(12))
    cache.remember([*range(4), 9, 9, 9, 9])
    first = cache.chain(range(12)).digests
    other = cache.chain([*range(4), 9, 9, 9, 9]).digests
    assert taken(log) == [
        ["BlockStored", first[1:], first[0], list(range(4, 12)), PAGE, None, "CPU"],
        ["BlockStored", other[1:], first[0], [9, 9, 9, 9], PAGE, None, "CPU"],
    ]


def test_nothing_new_is_no_event() -> None:
    cache, log = logged()
    cache.remember(range(8))
    taken(log)
    cache.remember(range(8))
    cache.match(range(8))
    assert log.take() is None


def test_removals_come_last_page_first() -> None:
    cache, log = logged(2)
    cache.remember(range(8))
    taken(log)
    cache.index.evict(2)
    assert taken(log) == [["BlockRemoved", cache.chain(range(8)).digests[::-1], "CPU"]]


def test_a_reset_that_forgets_all_says_so_in_one_event() -> None:
    cache, log = logged()
    cache.remember(range(8))
    taken(log)
    cache.remember(range(20, 28))
    cache.index.reset()
    assert taken(log) == [["AllBlocksCleared"]]
    cache.index.reset()
    assert log.take() is None


def test_a_reset_that_leaves_pages_tells_those_that_went() -> None:
    cache, log = logged()
    held = cache.hold(range(4))
    cache.remember(range(20, 28))
    taken(log)
    cache.index.reset()
    assert taken(log) == [["BlockRemoved", cache.chain(range(20, 28)).digests[::-1], "CPU"]]
    cache.let_go(held)


def test_withdrawn_and_overdue_pages_are_removed() -> None:
    cache, log = logged(policy=Ttl(10.0))
    path, pages = cache.hold(range(8))
    cache.let_go((path, pages))
    cache.index.withdraw(path)
    cache.remember(range(20, 24))
    cache.index.advance(11.0)
    view = View()
    view.fold(taken(log))
    assert view.pages == {}


def test_the_same_prompt_of_two_tenants_has_two_hashes_and_neithers_root_is_told() -> None:
    cache, log = logged()
    cache.remember(range(8))
    cache.remember(range(8), OTHER)
    changes = log.take()
    assert changes is not None
    said = msgspec.msgpack.encode(events_of(changes))
    assert ROOT not in said
    assert OTHER not in said
    said = msgspec.msgpack.encode(list(snapshot(cache.index.nodes(), 3)))
    assert ROOT not in said
    assert OTHER not in said
    view = View()
    view.fold(on_the_wire(events_of(changes)))
    assert len(view.pages) == 4


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_snapshot_is_all_that_is_known(at_once: int) -> None:
    cache, _ = logged()
    view = View()
    view.pages[b"stale"] = (None, b"")
    for tokens in (range(12), [*range(4), 9, 9, 9, 9], range(20, 28)):
        cache.remember(tokens)
    cache.index.evict(1)
    cache.remember(range(12))
    for events in snapshot(cache.index.nodes(), at_once):
        view.fold(on_the_wire(events))
    assert view.pages == content(cache.index)
    for events in snapshot([], at_once):
        view.fold(on_the_wire(events))
    assert view.pages == {}


actions = st.one_of(
    st.tuples(st.just("hold"), st.integers(0, 3), st.integers(0, 6), st.integers(0, 2), st.booleans()),
    st.tuples(st.sampled_from(["let_go", "evict", "reset", "take", "advance"]), st.integers(0, 5)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(actions, max_size=60), st.booleans())
def test_events_and_index_never_differ(script: list[tuple[Any, ...]], shares: bool) -> None:
    keep = [array("i", [1] * 8).tobytes()]
    cache, log = logged(24, policy=Ttl(8.0), share=0.3 if shares else 1.0, keep=keep, keep_pages=4)
    view, held, now = View(), list[Held](), 0.0
    for name, *args in script:
        if name == "hold" and len(held) < 3:
            stem, pages, own, other = args
            tokens = [stem] * (PAGE * pages) + [7] * (PAGE * own)
            held.append(cache.hold(tokens, OTHER if other else ROOT))
        elif name == "let_go" and held:
            cache.let_go(held.pop(args[0] % len(held)))
        elif name == "evict":
            cache.index.evict(args[0])
        elif name == "reset":
            cache.index.reset()
        elif name == "advance":
            now += args[0]
            cache.index.advance(now)
        elif name == "take":
            view.fold(taken(log))
            assert view.pages == content(cache.index)
    view.fold(taken(log))
    assert view.pages == content(cache.index)
    assert not known_roots(cache.index) & {parent for parent, _ in view.pages.values()}
