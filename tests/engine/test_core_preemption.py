"""Preempted requests with a tier below the pool: what they had computed comes back from where it is, or is computed
again, with the same tokens; the timeline says which, and why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.backends import PAGE_SIZE
from tailrace.engine.config import EngineConfig
from tailrace.engine.mover import Load
from tailrace.kv.tiers import key_at
from tailrace.ledger.timeline import Fold, Resume, Timeline, as_json
from tailrace.terms import Event, EventKind
from tests.engine.test_core_properties import QUICK, VOCAB, Arrival, arrivals
from tests.fakes import Driver, FakeClock, MemoryTier

CROWDED = EngineConfig(kv_tokens=256, step_tokens=128, max_running=5)
"""Five requests of 120 tokens in 16 pages."""


def crowd(driver: Driver, count: int = 5) -> None:
    for n in range(count):
        driver.submit(f"r{n}", [(n * 97 + 13 * at) % 500 for at in range(40)], 80, ignore_eos=True)


def run(driver: Driver, pace: int = 1000, limit: int = 5000) -> None:
    """Steps to the end; the transfers' thread moves `pace` pages after each step."""
    for _ in range(limit):
        if not driver.core.has_work and not driver.core.scheduler.loads:
            return
        driver.step()
        driver.transfer(pace)
    raise AssertionError(f"not done: {driver.core.gauges}")


def resumes(driver: Driver, request: str) -> list[Resume]:
    return timeline_of(driver, request).resumes


def timeline_of(driver: Driver, request: str) -> Timeline:
    fold = Fold(request)
    fold.add(Event(request, EventKind.RECEIVED, 1000.0))
    for event in driver.events_of(request):
        fold.add(event)
    return fold.timeline()


def preempted_once(driver: Driver) -> str:
    """Steps until a request has been preempted; its name. The transfers' thread does not come by."""
    for _ in range(1000):
        driver.step()
        for event in driver.events:
            if event.kind is EventKind.PREEMPTED:
                return event.request
    raise AssertionError("nobody was preempted")


def test_tokens_are_the_same_with_the_tier_and_without_and_less_is_computed() -> None:
    plain, tiered = Driver(CROWDED), Driver(CROWDED, tier=MemoryTier())
    for driver in (plain, tiered):
        crowd(driver)
        run(driver)
        driver.assert_alone()
        driver.assert_at_rest()
        assert driver.core.gauges.preemptions > 2
    assert plain.tokens == tiered.tokens
    ram, tier, computed = tiered.core.gauges.resumed
    assert tier > 30
    assert computed < 16 * tiered.core.gauges.preemptions  # the last, incomplete page of each
    assert ram + tier + computed == sum(one.had for n in range(5) for one in resumes(tiered, f"r{n}"))
    assert tiered.backend.computed < plain.backend.computed
    assert plain.core.gauges.resumed[1] == 0


def test_pages_that_wait_to_be_stored_are_loaded_from_the_queue() -> None:
    """Under load nothing is stored before the queue is half full; here nothing ever is."""
    tier = MemoryTier()
    driver = Driver(CROWDED, tier=tier)
    assert driver.transfers is not None
    mover = driver.transfers.movers[0]
    mover._may_store = lambda: False  # type: ignore[method-assign]  # the thread is as busy as it can be
    crowd(driver)
    run(driver)
    driver.assert_alone()
    gauges = driver.core.gauges.tiers["disk"]
    assert not tier.pages
    assert gauges.requeued * PAGE_SIZE == driver.core.gauges.resumed[1] > 0
    assert not tier.loads


@pytest.mark.parametrize("store", ["disk", "valkey"])
def test_pages_are_found_in_the_queue_of_any_tier(store: str) -> None:
    """The other one has given up its pages or is never going to get them: they wait for `store` alone."""
    tiers = [MemoryTier(name="disk"), MemoryTier(name="valkey", asked=True)]
    driver = Driver(CROWDED, tier=tiers)
    assert driver.transfers is not None
    for mover in driver.transfers.movers:
        mover._may_store = lambda: False  # type: ignore[method-assign]
        mover.room = 1000 if mover.tier.name == store else 0
    crowd(driver)
    run(driver)
    driver.assert_alone()
    driver.assert_at_rest()
    loaded = driver.core.gauges.resumed[1]
    assert loaded > 0
    assert driver.core.gauges.tiers[store].requeued * PAGE_SIZE == loaded
    found = [one for n in range(5) for one in resumes(driver, f"r{n}") if one.loaded]
    assert {one.tier for one in found} == {store}
    assert not any(tier.loads for tier in tiers)


def test_what_comes_back_from_two_tiers_is_counted_together() -> None:
    """The one has lost every other page, which the other one still has."""
    tiers = [MemoryTier(name="disk"), MemoryTier(name="valkey")]
    driver = Driver(CROWDED, tier=tiers)
    crowd(driver)
    for _ in range(5000):
        if not driver.core.has_work and not driver.core.scheduler.loads:
            break
        driver.step()
        driver.transfer()
        for tier, odd in zip(tiers, (0, 1), strict=True):
            for key in [key for key in tier.pages if key.digest[0] % 2 == odd]:
                del tier.pages[key]
    driver.assert_alone()
    driver.assert_at_rest()
    found = [one for n in range(5) for one in resumes(driver, f"r{n}")]
    assert any(one.tier == "disk+valkey" and one.loaded > PAGE_SIZE for one in found)
    assert all(one.had == one.ram + one.loaded + one.computed for one in found)
    assert sum(one.loaded for one in found) == driver.core.gauges.resumed[1]
    for tier in tiers:
        assert driver.core.gauges.tiers[tier.name].loads > 0


def test_a_page_that_was_handed_on_in_the_same_step_is_rescued() -> None:
    """All full pages of a preempted request are in the queue or in the tier, also the one that its senior has got."""
    driver = Driver(CROWDED, tier=MemoryTier())
    crowd(driver)
    name = preempted_once(driver)
    assert driver.transfers is not None
    request = driver.core._held[name]
    request.extend_chain()
    assert request.chain is not None
    full = request.lost // PAGE_SIZE
    assert driver.core.scheduler.index.match(request.chain, full)[full - 1 :] == []  # the last one has gone
    for at in range(full):
        assert key_at(request.chain, at).digest in driver.transfers.movers[0]._waiting


def test_pages_of_the_preempted_push_out_others_where_the_queue_is_full() -> None:
    driver = Driver(CROWDED, tier=MemoryTier())
    assert driver.transfers is not None
    driver.transfers.movers[0].room = 8
    crowd(driver)
    name = preempted_once(driver)
    request = driver.core._held[name]
    request.extend_chain()
    assert request.chain is not None
    full = request.lost // PAGE_SIZE
    assert 0 < full <= 8
    assert {key_at(request.chain, at).digest for at in range(full)} <= set(driver.transfers.movers[0]._urgent)
    assert driver.core.gauges.tiers["disk"].queued == 8
    assert driver.core.gauges.tiers["disk"].dropped > 0
    run(driver)
    driver.assert_alone()
    driver.assert_at_rest()


def test_a_page_that_is_pushed_out_while_it_is_read_keeps_its_bytes() -> None:
    driver = Driver(CROWDED, tier=MemoryTier())
    transfers = driver.transfers
    assert transfers is not None
    transfers.movers[0].room = 1
    driver.submit("a", list(range(100, 132)), 1)
    driver.step()
    driver.step()
    (copy,) = transfers.movers[0]._stores.values()
    key, before = copy.key, bytes(copy.data)
    node = driver.core.scheduler.index.nodes()[1]
    from tailrace.kv.tiers import key_of

    assert key_of(node).digest != key.digest
    transfers.store(key_of(node), node.page, urgent=True)
    assert list(transfers.movers[0]._urgent) == [node.digest]
    assert bytes(copy.data) == before
    request = driver.core.scheduler.take(driver.submitted["a"], 0.0)
    load = Load(request, 0, [0], [key], 0.0)
    transfers.begin(load)
    driver.transfer()
    assert load.done == 0  # pushed out, and not in the tier either: a miss


def test_the_timeline_says_what_came_back_from_where() -> None:
    clock = FakeClock()
    driver = Driver(CROWDED, tier=MemoryTier(), clock=clock, duration=lambda _: 0.1)
    crowd(driver)
    run(driver)
    found = [one for n in range(5) for one in resumes(driver, f"r{n}")]
    assert len(found) == driver.core.gauges.preemptions
    for one in found:
        assert one.cause == "pages"
        assert one.away is not None
        assert one.away > 0.0
        assert one.had == one.ram + one.loaded + one.computed
    loaded = [one for one in found if one.loaded]
    assert loaded
    for one in loaded:
        assert (one.tier, one.why_not) == ("disk", "")
        assert one.load is not None
        assert one.load_predicted is not None
        assert one.load_predicted > 0.0
    body = as_json(next(timeline_of(driver, f"r{n}") for n in range(5) if resumes(driver, f"r{n}")))
    assert isinstance(body["resumes"], list)
    assert body["resumes"][0]["tokens"]["had"] == sum(
        body["resumes"][0]["tokens"][name] for name in ("ram", "loaded", "computed")
    )


@pytest.mark.parametrize("why", ["slower", "absent", "late"])
def test_the_timeline_says_why_nothing_was_loaded(why: str) -> None:
    driver = Driver(CROWDED, tier=MemoryTier())
    transfers = driver.transfers
    assert transfers is not None
    if why == "slower":
        transfers.computed(1_000_000, 1.0)
        transfers.cost.of("disk").latency = 1e9
    elif why == "absent":
        transfers.movers[0].room = 0
    crowd(driver)
    if why == "late":
        stuck = Driver(CROWDED).core.scheduler.take(driver.submitted["r4"], 0.0)
        load = Load(stuck, 0, [], [], 0.0)
        load.begun, load.cancelled = 1.0, True
        driver.core.scheduler.loads.append(load)
        while driver.core.scheduler.preemptions == 0 or not any(
            event.kind is EventKind.DECLINED for event in driver.events
        ):
            driver.step()
        driver.core.scheduler.loads.remove(load)
    else:
        run(driver)
    found = [one for n in range(5) for one in resumes(driver, f"r{n}") if one.why_not]
    assert found
    assert {one.why_not for one in found} == {why}
    assert all(one.loaded == 0 for one in found)
    for one in found:
        assert one.tier == ("disk" if why == "slower" else "")
        assert (one.load_predicted is not None) is (why == "slower")
        assert (one.computing_predicted is not None) is (why == "slower")
    if why != "late":
        driver.assert_alone()
        driver.assert_at_rest()


def test_a_load_declined_before_is_offered_again_after_a_preemption() -> None:
    """When it was first admitted the tier had two pages, not worth a load; now it has what the request has computed."""
    tier = MemoryTier()
    driver = Driver(EngineConfig(kv_tokens=4096), tier=tier)
    crowd(driver, 1)
    run(driver)
    driver = Driver(CROWDED, tier=tier)
    transfers = driver.transfers
    assert transfers is not None
    transfers.computed(1_000_000, 1.0)
    transfers.cost.of("disk").latency = 1e9
    for n in range(1, 4):
        driver.submit(f"s{n}", [n] * 40, 80)
    crowd(driver, 1)  # the last to come: the first to be preempted
    driver.step()
    driver.step()
    timeline = timeline_of(driver, "r0")
    assert timeline.load_declined is not None
    assert timeline.load_declined.why_not == "slower"
    assert as_json(timeline)["kv_load_declined"] is not None
    transfers.cost.of("disk").latency = transfers.cost.of("disk").a_byte = 0.0
    run(driver)
    driver.assert_alone()
    assert [one for one in resumes(driver, "r0") if one.loaded]


def test_an_abort_during_the_load_of_a_preempted_request_frees_everything() -> None:
    driver = Driver(CROWDED, tier=MemoryTier())
    crowd(driver)
    for _ in range(2000):
        driver.step()  # the transfers' thread does not come by: a load stays under way
        loads = [load for load in driver.core.scheduler.loads if load.request.preemptions]
        if loads:
            break
    else:
        raise AssertionError("no preempted request was loading")
    driver.core.abort([load.request.id for load in loads])
    driver.step()
    run(driver)
    driver.assert_alone()
    driver.assert_at_rest()
    assert {driver.finish_of(load.request.id) for load in loads} == {"abort"}
    gauges = driver.core.gauges
    assert gauges.cached_pages + driver.core.scheduler.pool.free == gauges.pages


def test_a_step_that_fails_spills_nothing_that_was_never_written() -> None:
    """Preempted in the plan after a step that then fails: pages which that step was to fill never get to the tier."""
    for failing in range(3, 60, 14):
        count = iter(range(10**6))
        tier = MemoryTier()
        driver = Driver(
            CROWDED, tier=tier, fail=lambda _, n=count, at=failing: OSError("gone") if next(n) == at else None
        )
        crowd(driver)
        run(driver)
        driver.assert_alone()
        driver.assert_at_rest()
        again = Driver(EngineConfig(kv_tokens=4096), tier=tier)
        crowd(again)
        run(again)
        again.assert_alone()


@settings(QUICK, max_examples=25)
@given(
    scenario=st.lists(arrivals(), min_size=3, max_size=12),
    kv_tokens=st.sampled_from([240, 256, 320, 400]),
    step_tokens=st.sampled_from([16, 64, 200]),
    most=st.integers(1, 3),
    room=st.sampled_from([1, 3, 10, 1000]),
    pace=st.lists(st.sampled_from([0, 0, 1, 3, 100]), min_size=1, max_size=10),
    failing=st.sets(st.integers(0, 60), max_size=8),
    kinds=st.sampled_from(["near", "asked", "near asked"]),
)
def test_whatever_is_preempted_tokens_are_those_without_a_tier(
    scenario: list[Arrival],
    kv_tokens: int,
    step_tokens: int,
    most: int,
    room: int,
    pace: list[int],
    failing: set[int],
    kinds: str,
) -> None:
    config = EngineConfig(
        kv_tokens=kv_tokens, max_context=230, step_tokens=step_tokens, max_running=6, max_preemptions=most
    )
    counter = iter(range(10**9))
    tiers = [MemoryTier(lambda: next(counter) in failing, name=kind, asked=kind == "asked") for kind in kinds.split()]
    for with_tiers in (tiers, None):
        driver = Driver(config, vocab=VOCAB, eos_ids=[7], tier=with_tiers)
        for mover in driver.transfers.movers if driver.transfers is not None else ():
            mover.room = room
        step = 0
        while step <= 40 or driver.core.has_work or driver.core.scheduler.loads or driver.core.scheduler.awaiting:
            for n, one in enumerate(scenario):
                if one.at == step:
                    outer = {name: value for name, value in one.outer.items() if name != "deadline"}
                    driver.submit(f"r{n}", one.prompt, max(20, one.max_tokens), **one.params, **outer)
                if one.abort_after is not None and one.at + one.abort_after == step:
                    driver.core.abort([f"r{n}"])
            if step % 3 == 0:
                driver.core.prepare()
            driver.step()
            driver.transfer(pace[step % len(pace)] if step < 200 else 1000)
            driver.clock.advance(0.001)
            step += 1
            assert step < 10_000, driver.core.gauges
        driver.assert_alone()
        driver.assert_at_rest()
        assert driver.core.gauges.cached_pages + driver.core.scheduler.pool.free == config.pages
