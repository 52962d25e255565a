"""A tier below the pool: sessions come back from it with the tokens that they would have got anyway, whatever it loses,
however long it takes, and nothing stays held."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.config import EngineConfig
from tailrace.engine.core import LOAD_LIMIT
from tailrace.engine.transfer import Load, Transfers
from tailrace.kv.tiers.disk import DiskTier
from tailrace.ledger.timeline import Fold
from tailrace.terms import Event, EventKind, Phase
from tests.engine.test_core_properties import QUICK, VOCAB, Arrival, arrivals, check, configs
from tests.fakes import Driver, FakeBackend, FakeClock, MemoryTier

SESSION = [(7 * at + at // 5) % 500 for at in range(1500)]
CONFIG = EngineConfig(kv_tokens=4096, step_tokens=256)


def alone(driver: Driver, request: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """The request's tokens; it runs by itself, and all that is to be stored is."""
    driver.submit(request, prompt, max_tokens)
    driver.run()
    driver.assert_alone([request])
    return driver.tokens[request]


def test_a_session_comes_back_after_a_restart() -> None:
    tier = MemoryTier()
    first = alone(Driver(CONFIG, tier=tier), "a", SESSION)
    driver = Driver(CONFIG, tier=tier)
    assert alone(driver, "b", SESSION) == first
    assert driver.first["b"].cached == 1488  # 93 pages: the last token has to be computed
    assert driver.backend.computed == 1500 - 1488 + 7
    assert len(tier.loads) == 93
    driver.assert_at_rest()


def test_answers_are_kept_too() -> None:
    tier = MemoryTier()
    answer = alone(Driver(CONFIG, tier=tier), "a", SESSION[:100], 60)
    driver = Driver(CONFIG, tier=tier)
    alone(driver, "b", [*SESSION[:100], *answer, 1, 2, 3])
    assert driver.first["b"].cached == 144  # of 163; the last token drawn was never computed


def test_it_loads_only_what_the_pool_has_not() -> None:
    tier = MemoryTier()
    alone(Driver(CONFIG, tier=tier), "a", SESSION)
    driver = Driver(CONFIG, tier=tier)
    alone(driver, "short", SESSION[:321])
    tier.loads.clear()
    alone(driver, "b", SESSION)
    assert driver.first["b"].cached == 1488
    assert len(tier.loads) == 93 - 20


def test_a_session_whose_pages_were_evicted_comes_back() -> None:
    tier = MemoryTier()
    driver = Driver(EngineConfig(kv_tokens=2048, step_tokens=256), tier=tier)
    first = alone(driver, "a", SESSION)
    alone(driver, "other", [token + 1 for token in SESSION])
    assert alone(driver, "b", SESSION) == first
    assert driver.first["b"].cached == 1488
    assert tier.loads


def test_others_go_on_while_one_loads_and_those_with_its_prefix_wait_for_it() -> None:
    tier = MemoryTier()
    alone(Driver(CONFIG, tier=tier), "a", SESSION)
    driver = Driver(CONFIG, tier=tier)
    driver.submit("running", [9] * 20, 40)
    driver.step()
    driver.submit("b", SESSION, 8)
    driver.submit("same", SESSION, 8)
    for _ in range(10):
        driver.step()
        driver.transfer(1)
    assert len(driver.tokens["running"]) >= 9
    assert "b" not in driver.tokens
    assert not driver.events_of("same", EventKind.ADMITTED)
    driver.run()
    driver.assert_alone()
    assert len(tier.loads) == 93
    assert driver.first["same"].cached == 1488


def test_while_all_wait_for_pages_there_is_nothing_to_do_but_there_is_afterwards() -> None:
    tier = MemoryTier()
    alone(Driver(CONFIG, tier=tier), "a", SESSION)
    driver = Driver(CONFIG, tier=tier)
    woken: list[bool] = []
    driver.core.wake = lambda: woken.append(True)
    driver.submit("b", SESSION, 8)
    driver.submit("same", SESSION, 8)
    driver.step()
    assert not driver.core.has_work
    assert not driver.core.idle
    driver.step()
    assert not driver.core.has_work
    driver.transfer(92)
    assert not woken
    driver.transfer()
    assert woken == [True]
    assert driver.core.has_work


@pytest.mark.parametrize("missing", [0, 1, 50, 92])
def test_what_the_tier_has_lost_is_computed(missing: int) -> None:
    tier = MemoryTier()
    first = alone(Driver(CONFIG, tier=tier), "a", SESSION)
    driver = Driver(CONFIG, tier=tier)
    driver.submit("b", SESSION, 8)
    driver.step()  # it has looked them up
    count = iter(range(1000))
    tier.fail = lambda: next(count) == missing
    driver.run()
    assert driver.tokens["b"] == first
    assert driver.first["b"].cached == 16 * missing
    (loaded,) = driver.events_of("b", EventKind.LOADED)
    assert (loaded.cached, loaded.cause) == (16 * missing, "missing")
    assert alone(driver, "c", SESSION) == first
    driver.assert_at_rest()


def test_a_tier_that_raises_is_only_misses() -> None:
    tier = MemoryTier()
    first = alone(Driver(CONFIG, tier=tier), "a", SESSION)

    def broken() -> bool:
        raise RuntimeError("a bug")

    driver = Driver(CONFIG, tier=tier)
    tier.fail = broken
    assert alone(driver, "b", SESSION) == first
    assert driver.first["b"].cached == 0
    driver.assert_at_rest()


def test_pages_of_one_tenant_are_nothing_to_another() -> None:
    tier = MemoryTier()
    driver = Driver(CONFIG, tier=tier)
    driver.submit("a", SESSION, 8, tenant="one")
    driver.run()
    driver = Driver(CONFIG, tier=tier)
    driver.submit("b", SESSION, 8, tenant="two")
    driver.run()
    driver.assert_alone()
    assert driver.first["b"].cached == 0
    assert not tier.loads


def test_computing_is_chosen_where_it_is_quicker_and_counted() -> None:
    tier = MemoryTier()
    first = alone(Driver(CONFIG, tier=tier), "a", SESSION)
    driver = Driver(CONFIG, tier=tier)
    assert driver.transfers is not None
    driver.transfers.cost.computed(1_000_000, 1.0)
    driver.transfers.cost.a_byte = 1.0
    assert alone(driver, "b", SESSION) == first
    assert not tier.loads
    assert driver.core.gauges.tier is not None
    assert driver.core.gauges.tier.declined == 1


def test_the_timeline_names_the_time_of_a_load() -> None:
    tier = MemoryTier()
    alone(Driver(CONFIG, tier=tier), "a", SESSION)
    clock = FakeClock()
    driver = Driver(CONFIG, tier=tier, clock=clock, duration=lambda _: 0.01)
    driver.submit("b", SESSION, 8)
    driver.step()
    clock.advance(0.3)
    driver.run()
    fold = Fold("b")
    fold.add(Event("b", EventKind.RECEIVED, 1000.0))
    for event in driver.events_of("b"):
        fold.add(event)
    timeline = fold.timeline()
    assert timeline.phases[Phase.KV_LOAD] == pytest.approx(0.3)
    assert timeline.covered == 1.0
    assert (timeline.cached_tokens, timeline.loaded_tokens, timeline.computed_tokens) == (1488, 1488, 12)
    assert timeline.load_predicted > 0.0
    gauges = driver.core.gauges.tier
    assert gauges is not None
    assert (gauges.loads, gauges.hits) == (1, 1488)
    assert gauges.load_seconds == pytest.approx(0.3)


def test_pages_stay_held_until_the_thread_has_let_go_of_them() -> None:
    tier = MemoryTier()
    alone(Driver(CONFIG, tier=tier), "a", SESSION)
    driver = Driver(CONFIG, tier=tier)
    driver.submit("b", SESSION, 8)
    driver.step()
    driver.transfer(10)
    driver.core.abort(["b"])
    driver.step()
    assert driver.core.idle
    assert driver.core.gauges.used_pages == 93
    driver.run()
    driver.assert_at_rest()
    assert len(tier.loads) == 10
    assert driver.core.scheduler.pool.free == CONFIG.pages


def test_a_request_does_not_wait_for_ever() -> None:
    tier = MemoryTier()
    first = alone(Driver(CONFIG, tier=tier), "a", SESSION)
    clock = FakeClock()
    driver = Driver(CONFIG, tier=tier, clock=clock)
    driver.submit("b", SESSION, 8)
    driver.step()
    clock.advance(LOAD_LIMIT + 0.1)
    while "b" not in driver.last:  # the thread hangs
        driver.step()
    assert driver.tokens["b"] == first
    assert driver.first["b"].cached == 0
    assert [event.cause for event in driver.events_of("b", EventKind.PREEMPTED)] == ["kv_load"]
    alone(driver, "c", [5] * 1000)  # nothing is offered meanwhile
    driver.transfer()
    driver.run()
    driver.assert_at_rest()


def test_deadlines_hold_during_a_load() -> None:
    tier = MemoryTier()
    alone(Driver(CONFIG, tier=tier), "a", SESSION)
    clock = FakeClock()
    driver = Driver(CONFIG, tier=tier, clock=clock)
    driver.submit("b", SESSION, 8, deadline=clock() + 1.0)
    driver.step()
    clock.advance(2.0)
    driver.step()
    assert driver.finish_of("b") == "timeout"
    driver.run()
    driver.assert_at_rest()


def test_twenty_sessions_with_secrets_in_a_pool_for_two() -> None:
    """Each comes back from the tier with its own secret, never with another's; tests/fakes.py draws tokens from what
    the pages hold."""
    tier = MemoryTier()
    driver = Driver(EngineConfig(kv_tokens=512, step_tokens=64, max_running=4), tier=tier)
    secrets = {n: [*SESSION[:64], *([n + 1] * 100)] for n in range(20)}
    answers: dict[int, list[int]] = {}
    for turn in range(3):
        for n, prompt in secrets.items():
            driver.submit(f"{n} turn {turn}", prompt, 6, tenant=str(n % 2))
            if n % 4 == 3:
                driver.run()
        driver.run()
        driver.assert_alone()
        for n in secrets:
            assert answers.setdefault(n, driver.tokens[f"{n} turn {turn}"]) == driver.tokens[f"{n} turn {turn}"]
    assert len(tier.loads) > 100
    driver.assert_at_rest()


def test_the_queue_is_bounded_and_what_it_drops_is_stored_when_it_is_used_again() -> None:
    tier = MemoryTier()
    driver = Driver(CONFIG, tier=tier)
    assert driver.transfers is not None
    driver.transfers._room = 10
    driver.submit("a", SESSION, 8)
    while driver.core.has_work:  # the thread does not come by
        driver.step()
    assert driver.transfers.dropped == 94 - 10
    assert driver.core.gauges.tier is not None
    assert driver.core.gauges.tier.queued == 10
    driver.transfer()
    assert len(tier.pages) == 10
    driver.transfers._room = 100
    alone(driver, "b", SESSION)
    assert len(tier.pages) == 93  # those that it found


def test_a_step_that_fails_stores_nothing() -> None:
    tier = MemoryTier()
    driver = Driver(CONFIG, tier=tier, fail=lambda batch: OSError("gone"))
    driver.submit("a", SESSION, 8)
    driver.run()
    assert driver.finish_of("a") == "error"
    assert not tier.pages


def test_nothing_is_stored_before_start_up_is_over_or_without_a_prefix_cache() -> None:
    tier = MemoryTier()
    driver = Driver(CONFIG, tier=tier)
    driver.core._storing = False
    alone(driver, "warm-up", SESSION[:40])
    assert not tier.pages
    off = EngineConfig(kv_tokens=4096, prefix_cache=False)
    driver = Driver(off, tier=tier)
    alone(driver, "a", SESSION[:40])
    assert not tier.pages
    assert driver.core.gauges.tier is None


@QUICK
@given(
    config=configs(),
    scenario=st.lists(arrivals(), min_size=2, max_size=14),
    pace=st.lists(st.sampled_from([0, 0, 1, 2, 5, 100]), min_size=1, max_size=20),
    failing=st.sets(st.integers(0, 60), max_size=20),
    lost=st.sets(st.integers(1, 30), max_size=2),
    before=st.lists(arrivals(), max_size=6),
)
def test_whatever_the_tier_does_tokens_are_those_of_alone_and_pages_return(
    config: EngineConfig,
    scenario: list[Arrival],
    pace: list[int],
    failing: set[int],
    lost: set[int],
    before: list[Arrival],
) -> None:
    """`pace`: pages that the thread moves after each step; `failing`: loads and stores that lose their page; `lost`:
    steps that fail; `before`: what an earlier server has left in the tier."""
    tier = MemoryTier()
    for n, one in enumerate(before):
        earlier = EngineConfig(kv_tokens=4096, windows=config.windows)
        driver = Driver(earlier, vocab=VOCAB, eos_ids=[7], tier=tier)
        driver.submit(f"b{n}", one.prompt, one.max_tokens, tenant=one.outer.get("tenant", ""))
        driver.run()
    counts = {"tier": 0, "step": 0}

    def counted(name: str, among: set[int]) -> bool:
        counts[name] += 1
        return counts[name] - 1 in among

    tier.fail = lambda: counted("tier", failing)
    driver = Driver(
        config,
        vocab=VOCAB,
        eos_ids=[7],
        clock=FakeClock(1000.0),
        duration=lambda batch: 0.01 + 0.001 * len(batch.tokens),
        fail=lambda batch: OSError("gone") if counted("step", lost) else None,
        tier=tier,
    )
    bound = 300 + sum((len(one.prompt) + one.max_tokens) * 6 for one in scenario)
    step = 0
    while step <= 40 or driver.core.has_work or driver.core.scheduler.loads:
        for n, one in enumerate(scenario):
            if one.at == step:
                driver.submit(f"r{n}", one.prompt, one.max_tokens, **one.params, **one.outer)
            if one.abort_after is not None and one.at + one.abort_after == step:
                driver.core.abort([f"r{n}"])
        if step % 3 == 0:
            driver.core.prepare()
        driver.step()
        driver.transfer(pace[step % len(pace)] if step < 200 else 1000)
        step += 1
        assert step <= bound, driver.core.gauges
    if not lost:
        check(driver, scenario, config)
    driver.assert_alone()
    driver.assert_at_rest()
    gauges = driver.core.gauges
    assert gauges.cached_pages + gauges.pinned_pages + driver.core.scheduler.pool.free == gauges.pages
    driver.core.reset_prefix()
    assert driver.core.scheduler.pool.free == config.pages - gauges.pinned_pages


def test_the_thread_moves_pages_and_ends(tmp_path: Path) -> None:
    """The real thread, and the real disk."""
    backend = FakeBackend(64)

    def disk() -> DiskTier:
        return DiskTier(tmp_path, 1 << 20, numerics="fake", page_bytes=backend.page_bytes, page_tokens=16)

    driver = Driver(CONFIG, tier=MemoryTier())
    alone(driver, "a", SESSION)
    request = driver.core.scheduler.take(driver.submitted["a"], 0.0)
    request.extend_chain()
    assert request.chain is not None
    transfers = Transfers(disk(), driver.backend)
    nodes = driver.core.scheduler.index.match(request.chain, 93)
    from tailrace.kv.tiers import key_of

    for node in nodes:
        transfers.store(key_of(node), node.page)
    transfers.close()
    assert transfers.stats.queued == 0
    ended = threading.Event()
    again = Transfers(disk(), backend)
    again.notify = ended.set
    assert again.tier.lookup(request.chain, 0, 93) == 93
    again.begin(Load(request, 0, range(50), [key_of(node) for node in nodes[:50]], 0.1))
    assert ended.wait(30)
    (load,) = again.finished()
    assert load.done == 50
    assert again.cost.a_byte != 5e-9
    for at, node in enumerate(nodes[:50]):
        assert backend.read_page(at) == driver.backend.read_page(node.page)
    again.close()
    assert not any(thread.name == "kv-transfer" for thread in threading.enumerate())
