"""A tier below the pool: sessions come back from it with the tokens that they would have got anyway, whatever it loses,
however long it takes, and nothing stays held."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.config import EngineConfig
from tailrace.engine.mover import Load
from tailrace.engine.transfer import LOAD_LIMIT, LOOKUP_LIMIT, Transfers
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
    driver.transfers.cost.of("disk").a_byte = 1.0
    assert alone(driver, "b", SESSION) == first
    assert not tier.loads
    assert driver.core.gauges.tiers["disk"].declined == 1


class Told:
    """A `LoadCost` that says what a test tells it: seconds a page of each tier, and a token, later ones dearer where
    `growth` is not 0. It keeps what it has heard."""

    def __init__(self, page: dict[str, float], token: float, growth: float = 0.0) -> None:
        self.page, self.token, self.growth = page, token, growth
        self.heard: list[tuple[object, ...]] = []

    def load_seconds(self, tier: str, pages: int, page_bytes: int, before: int = 0) -> float:
        assert page_bytes == FakeBackend(1).page_bytes
        return self.page[tier] * (pages + before)

    def compute_seconds(self, tokens: int, after: int = 0) -> float:
        return tokens * (self.token + self.growth * after)

    def loaded(self, tier: str, pages: int, page_bytes: int, seconds: float, latency: float) -> None:
        self.heard.append(("loaded", tier, pages))

    def computed(self, tokens: int, seconds: float) -> None:
        self.heard.append(("computed",))

    def declined(self, tier: str) -> None:
        self.heard.append(("declined", tier))


def test_a_model_of_cost_can_be_plugged_in_and_hears_what_happened() -> None:
    near, (other, first) = MemoryTier(), shared()
    near.pages |= other.pages
    other.known.update(key.digest for key in other.pages)
    cost = Told({"disk": 17.0, "valkey": 15.0}, token=1.0)
    driver = Driver(CONFIG, tier=[near, other], cost=cost)
    assert alone(driver, "b", SESSION) == first
    assert (len(near.loads), len(other.loads)) == (0, 93)
    assert ("declined", "disk") in cost.heard
    assert ("loaded", "valkey", 93) in cost.heard
    (event,) = driver.events_of("b", EventKind.LOADING)
    assert (event.predicted, event.computing) == (93 * 15.0, 1488.0)
    assert alone(Driver(CONFIG, tier=[near, other], cost=(dear := Told(cost.page, token=0.5))), "c", SESSION) == first
    assert dear.heard.count(("declined", "disk")) == dear.heard.count(("declined", "valkey")) == 1
    assert ("computed",) in dear.heard


def test_what_a_prompt_has_already_counts_for_a_cost_that_grows_with_it() -> None:
    """The same pages are worth a load behind others that memory has, not at a prompt's beginning."""
    tier = MemoryTier()
    first = alone(Driver(CONFIG, tier=tier), "a", SESSION)
    cost = Told({"disk": 20.0}, token=1.0, growth=0.001)
    driver = Driver(CONFIG, tier=tier, cost=cost)
    assert alone(driver, "b", SESSION) == first
    assert not tier.loads
    tier.pages.clear()
    driver = Driver(CONFIG, tier=tier, cost=cost)
    alone(driver, "half", SESSION[:752])
    late = MemoryTier()
    alone(Driver(CONFIG, tier=late), "a", SESSION)
    tier.pages |= late.pages
    assert alone(driver, "c", SESSION) == first
    assert len(tier.loads) == 93 - 47


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
    gauges = driver.core.gauges.tiers["disk"]
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
    driver.transfers.movers[0].room = 10
    driver.submit("a", SESSION, 8)
    while driver.core.has_work:  # the thread does not come by
        driver.step()
    assert driver.transfers.movers[0].dropped == 94 - 10
    assert driver.core.gauges.tiers["disk"].queued == 10
    driver.transfer()
    assert len(tier.pages) == 10
    driver.transfers.movers[0].room = 100
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
    assert not driver.core.gauges.tiers


@QUICK
@given(
    config=configs(),
    scenario=st.lists(arrivals(), min_size=2, max_size=14),
    pace=st.lists(st.sampled_from([0, 0, 1, 2, 5, 100]), min_size=1, max_size=20),
    failing=st.sets(st.integers(0, 60), max_size=20),
    lost=st.sets(st.integers(1, 30), max_size=2),
    before=st.lists(arrivals(), max_size=6),
    kinds=st.sampled_from(["near", "asked", "near asked"]),
)
def test_whatever_the_tier_does_tokens_are_those_of_alone_and_pages_return(
    config: EngineConfig,
    scenario: list[Arrival],
    pace: list[int],
    failing: set[int],
    lost: set[int],
    before: list[Arrival],
    kinds: str,
) -> None:
    """`pace`: pages that the thread moves after each step; `failing`: loads and stores that lose their page; `lost`:
    steps that fail; `before`: what an earlier server has left in the tier."""
    tiers = [MemoryTier(name=kind, asked=kind == "asked") for kind in kinds.split()]
    for n, one in enumerate(before):
        earlier = EngineConfig(kv_tokens=4096, windows=config.windows)
        driver = Driver(earlier, vocab=VOCAB, eos_ids=[7], tier=tiers[n % len(tiers)])
        driver.submit(f"b{n}", one.prompt, one.max_tokens, tenant=one.outer.get("tenant", ""))
        driver.run()
    counts = {"tier": 0, "step": 0}

    def counted(name: str, among: set[int]) -> bool:
        counts[name] += 1
        return counts[name] - 1 in among

    for tier in tiers:
        tier.fail = lambda: counted("tier", failing)
        tier.known.clear()
    driver = Driver(
        config,
        vocab=VOCAB,
        eos_ids=[7],
        clock=FakeClock(1000.0),
        duration=lambda batch: 0.01 + 0.001 * len(batch.tokens),
        fail=lambda batch: OSError("gone") if counted("step", lost) else None,
        tier=tiers,
    )
    bound = 300 + sum((len(one.prompt) + one.max_tokens) * 6 for one in scenario)
    step = 0
    while step <= 40 or driver.core.has_work or driver.core.scheduler.loads or driver.core.scheduler.awaiting:
        for n, one in enumerate(scenario):
            if one.at == step:
                driver.submit(f"r{n}", one.prompt, one.max_tokens, **one.params, **one.outer)
            if one.abort_after is not None and one.at + one.abort_after == step:
                driver.core.abort([f"r{n}"])
        if step % 3 == 0:
            driver.core.prepare()
        driver.step()
        driver.transfer(pace[step % len(pace)] if step < 200 else 1000)
        driver.clock.advance(0.001)
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
    transfers = Transfers([disk()], driver.backend)
    nodes = driver.core.scheduler.index.match(request.chain, 93)
    from tailrace.kv.tiers import key_of

    for node in nodes:
        transfers.store(key_of(node), node.page)
    transfers.close()
    assert transfers.stats["disk"].queued == 0
    ended = threading.Event()
    again = Transfers([disk()], backend)
    again.notify = ended.set
    assert again.movers[0].tier.lookup(request.chain, 0, 93) == 93
    again.begin(Load(request, 0, range(50), [key_of(node) for node in nodes[:50]], 0.1))
    assert ended.wait(30)
    (load,) = again.finished()
    assert load.done == 50
    assert again.cost.of("disk").a_byte != 5e-9
    for at, node in enumerate(nodes[:50]):
        assert backend.read_page(at) == driver.backend.read_page(node.page)
    again.close()
    assert not any(thread.name.startswith("kv-") for thread in threading.enumerate())


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv", "pwritev", "pwrite"])
def test_a_disk_whose_calls_fail_now_and_then_costs_no_token(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk() -> DiskTier:
        page_bytes = FakeBackend(1).page_bytes
        return DiskTier(tmp_path, 1 << 20, numerics="fake", page_bytes=page_bytes, page_tokens=16)

    first = alone(Driver(CONFIG, tier=disk()), "a", SESSION)
    real, calls = getattr(os, call), []
    every = 10 if call in ("pwritev", "pwrite") else 40  # pages are written several at a time

    def fail(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) % every == every // 2:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    driver = Driver(CONFIG, tier=disk())
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for turn in range(3):
            assert alone(driver, f"b{turn}", SESSION) == first
            alone(driver, f"other{turn}", [turn, *SESSION[:400]])
            driver.core.reset_prefix()
    assert len(calls) >= every // 2
    gauges = driver.core.gauges.tiers["disk"]
    reads = call in ("open", "preadv")  # the first that fails is a load's
    assert (gauges.misses["error"] > 0, gauges.refused > 0) == (reads, not reads)
    assert sum(gauges.misses.values()) == gauges.misses["error"]
    assert gauges.hits > 0
    driver.assert_at_rest()


# --- several tiers


def far(**options: object) -> MemoryTier:
    """One that has to be asked what it has."""
    return MemoryTier(name="valkey", asked=True, **options)  # type: ignore[arg-type]


def shared() -> tuple[MemoryTier, list[int]]:
    """A server with the pages of the session, and the session's answer."""
    tier = far()
    first = alone(Driver(CONFIG, tier=tier), "a", SESSION)
    tier.known.clear()
    tier.questions = 0
    return tier, first


def test_pages_are_stored_in_all_tiers_from_one_copy() -> None:
    near, other = MemoryTier(), far()
    driver = Driver(CONFIG, tier=[near, other])
    alone(driver, "a", SESSION)
    assert near.pages == other.pages
    assert len(near.pages) == 94
    assert driver.transfers is not None
    assert len(driver.transfers._buffers) == 94  # the thread did not come by while they were copied
    alone(driver, "b", [5] * 900)
    assert len(driver.transfers._buffers) == 94


def test_pages_come_from_the_nearest_tier_that_has_them() -> None:
    near, (other, first) = MemoryTier(), shared()
    for key in list(other.pages)[:40]:
        near.pages[key] = other.pages[key]
    driver = Driver(CONFIG, tier=[near, other])
    assert alone(driver, "b", SESSION) == first
    assert driver.first["b"].cached == 1488
    assert (len(near.loads), len(other.loads)) == (40, 53)
    tiers = driver.core.gauges.tiers
    assert (tiers["disk"].hits, tiers["valkey"].hits) == (640, 848)
    assert (tiers["disk"].loads, tiers["valkey"].loads) == (1, 1)
    (loading,) = driver.events_of("b", EventKind.LOADING)
    assert loading.tier == "disk+valkey"
    fold = Fold("b")
    for event in driver.events_of("b"):
        fold.add(event)
    assert fold.timeline().loaded_from == {"disk": 640, "valkey": 848}
    driver.assert_at_rest()


def test_a_page_that_one_tier_has_lost_ends_what_the_others_load() -> None:
    near, (other, first) = MemoryTier(), shared()
    for key in list(other.pages)[:40]:
        near.pages[key] = other.pages[key]
    driver = Driver(CONFIG, tier=[near, other])
    driver.submit("b", SESSION, 8)
    driver.step()
    driver.transfer(1)  # the question
    driver.step()
    near.pages.pop(list(other.pages)[10])
    driver.run()
    assert driver.tokens["b"] == first
    assert driver.first["b"].cached == 160
    (loaded,) = driver.events_of("b", EventKind.LOADED)
    assert (loaded.cached, loaded.cause, loaded.tier) == (160, "missing", "disk")
    driver.assert_at_rest()


def test_a_request_waits_for_what_a_tier_says_while_others_go_on() -> None:
    tier, first = shared()
    clock = FakeClock()
    driver = Driver(CONFIG, tier=tier, clock=clock, duration=lambda _: 0.01)
    driver.submit("running", [9] * 20, 40)
    driver.step()
    driver.transfer(1)
    driver.step()
    tier.questions = 0
    driver.submit("b", SESSION, 8)
    for _ in range(3):
        driver.step()
    assert not driver.events_of("b", EventKind.ADMITTED)
    assert len(driver.tokens["running"]) >= 2
    driver.transfer(1)
    driver.run()
    assert driver.tokens["b"] == first
    assert tier.questions == 1
    looking, looked = driver.events_of("b", EventKind.LOOKING), driver.events_of("b", EventKind.LOOKED)
    assert (len(looking), looking[0].cached) == (1, 1488)
    assert [event.cause for event in looked] == [""]
    fold = Fold("b")
    fold.add(Event("b", EventKind.RECEIVED, 1000.0))
    for event in driver.events_of("b"):
        fold.add(event)
    timeline = fold.timeline()
    assert timeline.phases[Phase.KV_LOOKUP] == pytest.approx(looked[0].at - looking[0].at)
    assert timeline.phases[Phase.KV_LOOKUP] > 0
    assert timeline.loaded_from == {"valkey": 1488}


def test_an_engine_with_nothing_else_to_do_rests_until_it_is_told() -> None:
    tier, first = shared()
    driver = Driver(CONFIG, tier=tier)
    woken: list[bool] = []
    driver.core.wake = lambda: woken.append(True)
    driver.submit("b", SESSION, 8)
    driver.step()
    assert not driver.core.has_work
    assert not driver.core.idle
    driver.transfer(1)
    assert woken == [True]
    assert driver.core.has_work
    driver.run()
    assert driver.tokens["b"] == first


def test_a_tier_that_does_not_answer_keeps_one_request_waiting_a_moment_and_no_other() -> None:
    tier, first = shared()
    clock = FakeClock()
    driver = Driver(CONFIG, tier=tier, clock=clock, duration=lambda _: 0.01)
    driver.submit("b", SESSION, 8)
    driver.step()
    clock.advance(LOOKUP_LIMIT - 0.001)
    driver.step()
    assert not driver.events_of("b", EventKind.ADMITTED)
    clock.advance(0.002)
    while "b" not in driver.last:
        driver.step()
    assert driver.tokens["b"] == first
    assert driver.first["b"].cached == 0
    assert [event.cause for event in driver.events_of("b", EventKind.LOOKED)] == ["late"]
    driver.submit("c", [token + 1 for token in SESSION], 8)
    while "c" not in driver.last:
        driver.step()
    assert not driver.events_of("c", EventKind.LOOKING)
    assert driver.core.gauges.tiers["valkey"].late_lookups == 1
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()


def test_a_tier_that_is_down_is_neither_asked_nor_given_anything() -> None:
    tier, first = shared()
    tier.up = False
    before = dict(tier.pages)
    driver = Driver(CONFIG, tier=tier)
    assert alone(driver, "b", SESSION) == first
    alone(driver, "c", [5] * 100)
    assert tier.questions == 0
    assert tier.pages == before
    gauges = driver.core.gauges.tiers["valkey"]
    assert (gauges.up, gauges.queued, gauges.dropped) == (False, 0, 0)


def test_what_the_near_tier_has_is_not_asked_for() -> None:
    near, (other, _) = MemoryTier(), shared()
    near.pages |= other.pages
    driver = Driver(CONFIG, tier=[near, other])
    alone(driver, "b", SESSION)
    assert other.questions == 0
    assert len(near.loads) == 93


def test_each_tier_has_a_price_of_its_own() -> None:
    near, (other, first) = MemoryTier(), shared()
    near.pages |= other.pages
    driver = Driver(CONFIG, tier=[near, other])
    assert driver.transfers is not None
    driver.transfers.computed(1000, 1.0)
    driver.transfers.cost.of("disk").a_byte = 1.0
    assert alone(driver, "b", SESSION) == first
    assert not near.loads
    assert not other.questions  # the near one has them all: what a far one could do better is not known
    (declined,) = driver.events_of("b", EventKind.DECLINED)
    assert (declined.tier, declined.cached) == ("disk", 1488)
    other.known.update(key.digest for key in other.pages)
    driver = Driver(CONFIG, tier=[near, other])
    assert driver.transfers is not None
    driver.transfers.computed(1000, 1.0)
    driver.transfers.cost.of("disk").a_byte = 1.0
    assert alone(driver, "c", SESSION) == first
    assert len(other.loads) == 93


def test_a_tier_that_hangs_in_a_load_keeps_the_others_working() -> None:
    near, (other, first) = MemoryTier(), shared()
    clock = FakeClock()
    driver = Driver(CONFIG, tier=[near, other], clock=clock)
    assert driver.transfers is not None
    driver.submit("b", SESSION, 8)
    driver.step()
    driver.transfers.movers[1].work()  # the question; then its thread hangs
    driver.step()
    assert driver.core.scheduler.loads
    clock.advance(LOAD_LIMIT + 0.1)
    while "b" not in driver.last:
        driver.step()
        driver.transfers.movers[0].work()
    assert driver.tokens["b"] == first
    while driver.transfers.movers[0].work():
        pass
    assert len(near.pages) == 94
    driver.core.reset_prefix()
    driver.submit("c", SESSION, 8)
    while "c" not in driver.last:
        driver.step()
        driver.transfers.movers[0].work()
    assert driver.first["c"].cached == 1488
    assert driver.core.gauges.tiers["disk"].hits == 1488
    driver.run()
    driver.assert_at_rest()
