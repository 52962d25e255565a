"""Layers with a window: their pages are let go as requests move on, prefixes are found as far as the windows reach
back, and tokens are what they are with every page kept."""

from __future__ import annotations

import pytest

from tailrace.backends import PAGE_SIZE, Batch
from tailrace.backends.groups import first_page, most_pages
from tailrace.engine.config import EngineConfig
from tailrace.terms import InvalidInput
from tests.fakes import Driver

LONG = [(7 * at + at // 5) % 500 for at in range(1500)]
WINDOW = 100
CONFIG = EngineConfig(kv_tokens=4096, max_context=2048, step_tokens=128, max_running=4, windows=(WINDOW,))


def held(driver: Driver) -> int:
    """Pages of the sliding group that requests hold."""
    return sum(len(table.held) for request in driver.core.scheduler.running for table in request.tables)


def in_use(driver: Driver) -> int:
    """Those of them that are of a position."""
    running = driver.core.scheduler.running
    return sum(len(table.pages) - table.first for request in running for table in request.tables)


def test_a_long_request_never_holds_more_than_its_window_and_a_step() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", LONG, 300)
    most, decoding = 0, 0
    while driver.core.has_work:
        driver.step()
        most = max(most, held(driver))
        if len(driver.tokens.get("a", [])) > 2:
            decoding = max(decoding, held(driver))
    driver.assert_alone()
    driver.assert_at_rest()
    assert most == most_pages(WINDOW, len(LONG), CONFIG.step_tokens) == 19  # 99 tokens, 63 of a piece, 128 of the step
    assert decoding == most_pages(WINDOW, len(LONG), 1) == 11


def test_pages_that_fell_out_of_the_window_can_be_evicted_while_the_request_runs() -> None:
    config = EngineConfig(
        kv_tokens=4096, max_context=2048, step_tokens=128, max_running=4, windows=(WINDOW,), window_pages=(19,)
    )
    driver = Driver(config)
    driver.submit("a", LONG, 8)
    driver.run()
    driver.assert_alone()
    (window,) = driver.core.scheduler.windows
    assert window.evictions["pressure"] > 60
    assert driver.core.scheduler.index.evictions["pressure"] == 0
    assert not driver.core.scheduler.preemptions


def test_a_request_that_is_done_leaves_its_last_window_to_the_next_turn() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", LONG[:1000], 40)
    driver.run()
    driver.submit("b", [*LONG[:1000], *driver.tokens["a"], 1, 2, 3], 8)
    driver.run()
    driver.assert_alone()
    assert driver.first["b"].cached == 1039 // PAGE_SIZE * PAGE_SIZE


def test_a_prefix_is_found_as_far_as_a_window_has_its_pages() -> None:
    """A pool of three windows: what lies further back in a long prompt is gone there, and known in full attention."""
    config = EngineConfig(
        kv_tokens=4096, max_context=2048, step_tokens=128, max_running=4, windows=(WINDOW,), window_pages=(36,)
    )
    driver = Driver(config)
    driver.submit("a", LONG, 8)
    driver.run()
    driver.submit("early", [*LONG[:800], 9], 8)
    driver.run()
    driver.assert_alone()
    assert driver.first["early"].cached < 800
    assert len(driver.core.scheduler.index) > 800 // PAGE_SIZE  # all of it is known in full attention


def test_what_a_prefix_lacked_is_given_back_to_it() -> None:
    config = EngineConfig(
        kv_tokens=4096, max_context=2048, step_tokens=128, max_running=4, windows=(WINDOW,), window_pages=(36,)
    )
    driver = Driver(config)
    for number in range(2):
        driver.submit(f"a{number}", LONG, 8)
        driver.run()
        driver.submit(f"early{number}", [*LONG[:800], number], 8)
        driver.run()
    pages = len(driver.core.scheduler.index)
    driver.submit("early2", [*LONG[:800], 7, 7], 8)
    driver.run()
    driver.assert_alone()
    assert driver.first["early2"].cached == 800
    assert len(driver.core.scheduler.index) == pages
    driver.assert_at_rest()


def test_known_pages_that_a_request_follows_give_way_to_its_own_where_there_is_no_other_room() -> None:
    """Alone in a pool that cannot hold its own pages and the equal ones that it follows: it must still end."""
    config = EngineConfig(
        kv_tokens=1024, max_context=1024, step_tokens=64, max_running=2, windows=(WINDOW,), window_pages=(15,)
    )
    driver = Driver(config)
    driver.submit("a", LONG[:400], 1)
    driver.run()
    for number in range(2):  # the sides of the prefix go, its pages stay
        driver.submit(f"other{number}", [number, 5] * 30, 30)
        driver.run()
    driver.submit("b", LONG[:400] + [1] * 100, 520)
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()
    assert driver.first["b"].cached == 0
    assert len(driver.core.scheduler.index) == 1019 // PAGE_SIZE


@pytest.mark.parametrize("cache", [True, False])
def test_preemption_gives_all_windows_back(cache: bool) -> None:
    config = EngineConfig(
        kv_tokens=2048,
        max_context=512,
        step_tokens=64,
        max_running=6,
        prefix_cache=cache,
        windows=(WINDOW,),
        window_pages=(26,),
    )
    driver = Driver(config)
    for number in range(6):
        driver.submit(f"r{number}", [number, *LONG[:20]], 400)
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()
    assert driver.core.scheduler.preemptions
    driver.core.reset_prefix()
    (window,) = driver.core.scheduler.windows
    assert window.pool.free == window.pool.size == 26
    assert not len(window)


def test_a_failed_step_takes_back_the_sides_that_it_was_to_write() -> None:
    count = 0

    def fail(batch: Batch) -> Exception | None:
        nonlocal count
        count += 1
        return OSError("gone") if count == 12 else None

    driver = Driver(CONFIG, fail=fail)
    driver.submit("a", LONG[:640], 2)
    driver.run()
    assert count == 6
    driver.submit("b", LONG[:640] + LONG[:900], 2)
    driver.run()
    assert driver.finish_of("b") == "error"
    driver.submit("c", LONG[:640] + LONG[:900], 2)
    driver.run()
    driver.assert_alone()
    assert driver.first["c"].cached >= 640


def test_pinned_prefixes_keep_what_their_end_goes_on_to_see() -> None:
    prefix = LONG[:500]
    config = EngineConfig(
        kv_tokens=4096,
        max_context=1024,
        step_tokens=128,
        max_running=2,
        windows=(WINDOW,),
        window_pages=(26,),
        kv_pin=(tuple(prefix),),
    )
    pinned = 31 - first_page(WINDOW, 31 * PAGE_SIZE)
    assert config.pinned_sliding_pages == (pinned,)
    driver = Driver(config)
    driver.submit("a", [*prefix, 3], 2)
    driver.run()
    for number in range(4):
        driver.submit(f"other{number}", [number, *LONG[:700]], 40)
        driver.run()
    (window,) = driver.core.gauges.windows
    assert (window.window, window.pinned_pages) == (WINDOW, pinned)
    driver.submit("b", [*prefix, 4, 5], 2)
    driver.run()
    assert driver.first["b"].cached == 31 * PAGE_SIZE
    driver.assert_at_rest()


def test_a_pool_that_cannot_hold_one_request_is_refused() -> None:
    with pytest.raises(InvalidInput, match="19 pages for one request"):
        EngineConfig(kv_tokens=4096, max_context=2048, step_tokens=128, windows=(WINDOW,), window_pages=(18,))
