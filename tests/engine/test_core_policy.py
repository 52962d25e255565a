"""Who runs when: gaps and first tokens stay bounded, nothing starves, preemption always makes progress."""

import itertools
from collections import Counter

import pytest

from tailrace.engine.config import EngineConfig
from tailrace.terms import EventKind
from tests.fakes import Driver, FakeClock


def prompt(length: int, first: int) -> list[int]:
    return [(first * 97 + 13 * at) % 509 for at in range(length)]


def gaps(driver: Driver, request: str) -> list[float]:
    times = [event.at for event in driver.events_of(request, EventKind.TOKEN)]
    return [after - before for before, after in itertools.pairwise(times)]


# --- gaps and first tokens beside a long prompt


@pytest.mark.parametrize("beside", [0, 64])
def test_a_long_prompt_neither_stops_decoding_nor_a_short_prompt(beside: int) -> None:
    clock = FakeClock()
    config = EngineConfig(
        kv_tokens=32768, max_context=24000, step_tokens=512, max_running=8, prefill_beside_decodes=beside
    )
    driver = Driver(config, clock=clock, duration=lambda batch: 0.01 + 0.001 * len(batch.tokens), check_every=10)
    step = 0.01 + 0.001 * (beside + 5 if beside else 512)
    for n in range(4):
        driver.submit(f"stream{n}", prompt(30, n), max_tokens=350 if beside else 60)
    for _ in range(5):
        driver.step()
    driver.submit("long", prompt(20_000, 50), max_tokens=4)
    for _ in range(3):
        driver.step()
    begun = clock.now
    driver.step(intake=lambda: driver.submit("short", prompt(50, 60), max_tokens=4))
    driver.run()
    assert max(gap for n in range(4) for gap in gaps(driver, f"stream{n}")) <= step + 1e-6
    first = driver.events_of("short", EventKind.TOKEN)[0].at
    assert first - begun <= 3 * step + 1e-6
    assert all(driver.finish_of(r) == "length" for r in driver.submitted)
    driver.assert_alone()


def test_a_steady_flow_of_short_prompts_does_not_stop_a_long_one() -> None:
    driver = Driver(EngineConfig(kv_tokens=16384, step_tokens=128, max_running=16))
    driver.submit("long", prompt(4000, 1), max_tokens=2)
    steps = 0
    while "long" not in driver.last:
        driver.submit(f"short{steps}", prompt(120, steps + 2), max_tokens=1)
        driver.step()
        steps += 1
        assert steps < 4 * 4000 / 128 + 20
    assert sum(r.startswith("short") for r in driver.last) > steps / 2
    driver.run()
    driver.assert_alone()


def test_a_steady_flow_of_decodes_does_not_stop_prompts() -> None:
    driver = Driver(EngineConfig(kv_tokens=8192, step_tokens=16, max_running=16))
    for n in range(15):
        driver.submit(f"stream{n}", prompt(10, n), max_tokens=400)
    for _ in range(40):
        driver.step()
    driver.submit("late", prompt(100, 30), max_tokens=3)
    before = [len(driver.tokens[f"stream{n}"]) for n in range(15)]
    for _ in range(100 // 4 + 8):
        driver.step()
    assert driver.finish_of("late") == "length"
    stalls = Counter(event.cause for event in driver.events if event.kind is EventKind.STALLED)
    assert set(stalls) <= {"budget"}
    shares = [len(driver.tokens[f"stream{n}"]) - before[n] for n in range(15)]
    assert min(shares) >= 20
    assert max(shares) - min(shares) <= 2
    driver.core.abort([f"stream{n}" for n in range(15)])
    driver.run()
    driver.assert_alone()


def test_more_decodes_than_a_step_holds_take_turns() -> None:
    driver = Driver(EngineConfig(kv_tokens=4096, step_tokens=4, max_running=10))
    for n in range(10):
        driver.submit(f"r{n}", prompt(3, n), max_tokens=40)
    driver.run()
    driver.assert_alone()
    assert max(tokens for _, tokens in driver.backend.steps) <= 4


def test_several_prompts_share_a_step() -> None:
    driver = Driver(EngineConfig(kv_tokens=4096, step_tokens=256, max_running=8))
    for n in range(4):
        driver.submit(f"r{n}", prompt(60, n), max_tokens=1)
    driver.step()
    driver.step()
    assert driver.backend.steps == [(4, 240)]
    driver.run()
    driver.assert_alone()


# --- order of admission


def finished_order(driver: Driver) -> list[str]:
    return [event.request for event in driver.events if event.kind is EventKind.FINISHED]


ONE = EngineConfig(kv_tokens=2048, step_tokens=64, max_running=1, max_waiting=500)


def test_equals_are_served_in_the_order_of_arrival() -> None:
    driver = Driver(ONE)
    for n in range(8):
        driver.submit(f"r{n}", prompt(20, n), max_tokens=3)
    driver.run()
    assert finished_order(driver) == [f"r{n}" for n in range(8)]


def test_a_better_priority_goes_first() -> None:
    driver = Driver(ONE)
    for n, priority in enumerate([2, 0, 1, -1, 0]):
        driver.submit(f"r{n}", prompt(20, n), max_tokens=3, priority=priority)
    driver.run()
    assert finished_order(driver) == ["r3", "r1", "r4", "r2", "r0"]


def test_waiting_raises_a_priority_so_that_nothing_starves() -> None:
    clock = FakeClock()
    driver = Driver(ONE, clock=clock, duration=lambda batch: 1.0)
    driver.submit("low", prompt(20, 1), max_tokens=3, priority=5)
    steps = 0
    while "low" not in driver.last:
        driver.submit(f"high{steps}", prompt(20, steps + 2), max_tokens=3)
        driver.step()
        steps += 1
        assert steps < 200
    assert clock.now - 1000.0 >= 50.0
    driver.core.abort(list(driver.submitted))
    driver.run()


def test_a_tenant_s_flood_does_not_delay_another_tenant() -> None:
    driver = Driver(ONE)
    for n in range(40):
        driver.submit(f"flood{n}", prompt(20, n), max_tokens=3, tenant="flood")
    driver.submit("light", prompt(20, 99), max_tokens=3, tenant="light")
    driver.run()
    assert finished_order(driver).index("light") <= 2


# --- requests that do not fit


def test_what_does_not_fit_is_passed_over_and_does_not_block() -> None:
    driver = Driver(EngineConfig(kv_tokens=512, step_tokens=128, max_running=8))
    driver.submit("holds", prompt(200, 1), max_tokens=60)
    driver.step()
    driver.submit("big", prompt(400, 2), max_tokens=10)
    for n in range(4):
        driver.submit(f"small{n}", prompt(20, n + 3), max_tokens=2)
    for _ in range(6):
        driver.step()
    assert all(driver.finish_of(f"small{n}") == "length" for n in range(4))
    assert "big" not in driver.last
    driver.run()
    driver.assert_alone()
    (admitted,) = driver.events_of("big", EventKind.ADMITTED)
    assert admitted.cause == "pages"


@pytest.mark.parametrize("small", [20, 100])
def test_a_big_request_does_not_starve_behind_a_flow_of_small_ones(small: int) -> None:
    driver = Driver(EngineConfig(kv_tokens=1024, step_tokens=256, max_running=8))
    for n in range(6):
        driver.submit(f"first{n}", prompt(small, n), max_tokens=10 + n)
    driver.step()
    driver.submit("big", prompt(900, 500), max_tokens=20)
    steps = 0
    while "big" not in driver.last:
        for k in range(2):
            if driver.core.gauges.waiting < 6:
                driver.submit(f"small{steps}-{k}", prompt(small, 2 * steps + k + 10), max_tokens=10 + steps % 7)
        driver.step()
        steps += 1
        assert steps < 150
    driver.run()
    driver.assert_alone()
    assert sum(driver.finish_of(r) == "length" for r in driver.submitted) == len(driver.submitted)


# --- preemption


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_too_small_a_pool_preempts_boundedly_and_everybody_gets_his_tokens(cache: bool, most: int) -> None:
    config = EngineConfig(kv_tokens=256, step_tokens=64, max_running=8, max_preemptions=most, prefix_cache=cache)
    driver = Driver(config)
    for n in range(8):
        driver.submit(f"r{n}", prompt(20, n), max_tokens=200, temperature=0.5 * (n % 2), seed=n)
    driver.run()
    driver.assert_alone()
    assert all(driver.finish_of(f"r{n}") == "length" for n in range(8))
    preempted = Counter(event.request for event in driver.events if event.kind is EventKind.PREEMPTED)
    assert bool(preempted) == (most > 0)
    assert max(preempted.values(), default=0) <= most
    assert driver.core.gauges.preemptions == preempted.total()
    driver.assert_at_rest()


def test_the_oldest_is_never_preempted_and_the_latest_goes_first() -> None:
    driver = Driver(EngineConfig(kv_tokens=256, step_tokens=64, max_running=4))
    for n in range(4):
        driver.submit(f"r{n}", prompt(20, n), max_tokens=150)
    driver.run()
    victims = [event.request for event in driver.events if event.kind is EventKind.PREEMPTED]
    assert victims[0] == "r3"
    assert "r0" not in victims
    assert finished_order(driver)[0] == "r0"


def test_a_worse_priority_is_preempted_before_a_later_arrival() -> None:
    driver = Driver(EngineConfig(kv_tokens=256, step_tokens=64, max_running=4))
    for n, priority in enumerate([0, 9, 0, 0]):
        driver.submit(f"r{n}", prompt(20, n), max_tokens=150, priority=priority)
    driver.run()
    victims = [event.request for event in driver.events if event.kind is EventKind.PREEMPTED]
    assert victims[0] == "r1"
    driver.assert_alone()


def test_a_preempted_request_resumes_from_its_cached_pages() -> None:
    driver = Driver(EngineConfig(kv_tokens=512, step_tokens=64, max_running=4))
    for n in range(3):
        driver.submit(f"r{n}", prompt(100, n), max_tokens=100)
    driver.run()
    driver.assert_alone()
    resumed = [e for e in driver.events if e.kind is EventKind.ADMITTED and e.cause == "pages"]
    assert resumed
    assert any(event.cached > 0 for event in resumed)


def test_prompt_log_probabilities_survive_preemption() -> None:
    config = EngineConfig(kv_tokens=256, step_tokens=32, max_running=4, scored_rows=16)
    driver = Driver(config)
    alone = Driver(config)
    for n in range(4):
        driver.submit(f"r{n}", prompt(40, n), max_tokens=120, prompt_logprobs=1, logprobs=1)
    driver.run()
    assert driver.core.gauges.preemptions
    for n in range(4):
        alone.submit(f"r{n}", prompt(40, n), max_tokens=120, prompt_logprobs=1, logprobs=1)
        alone.run()
        assert driver.first[f"r{n}"].prompt_logprobs == alone.first[f"r{n}"].prompt_logprobs
        assert driver.logprobs[f"r{n}"] == alone.logprobs[f"r{n}"]
        assert driver.tokens[f"r{n}"] == alone.tokens[f"r{n}"]


def test_a_request_that_computes_what_is_cached_can_still_fill_the_pool_alone() -> None:
    driver = Driver(EngineConfig(kv_tokens=256, step_tokens=64, max_running=2))
    driver.submit("cached", prompt(120, 1), max_tokens=2)
    driver.run()
    driver.submit("again", prompt(120, 1), max_tokens=136, prompt_logprobs=0)
    driver.run()
    assert driver.finish_of("again") == "length"
    driver.assert_alone()
    driver.assert_at_rest()


def test_two_that_write_the_same_text_can_still_fill_the_pool_together() -> None:
    driver = Driver(EngineConfig(kv_tokens=512, step_tokens=64, max_running=2))
    for request in ("one", "two"):
        driver.submit(request, prompt(100, 1), max_tokens=150)
    driver.run()
    assert driver.core.gauges.preemptions == 0
    driver.assert_alone()
    assert driver.tokens["one"] == driver.tokens["two"]


def test_the_phases_of_a_request_lie_side_by_side() -> None:
    clock = FakeClock()
    config = EngineConfig(kv_tokens=256, step_tokens=48, max_running=6)
    driver = Driver(config, clock=clock, duration=lambda batch: 0.01 + 0.001 * len(batch.tokens))
    for n in range(8):
        driver.submit(f"r{n}", prompt(50, n), max_tokens=60)
    driver.run()
    for n in range(8):
        events = driver.events_of(f"r{n}")
        assert [event.at for event in events] == sorted(event.at for event in events)
        covered = 0.0
        waiting, last = events[0].at, 0.0
        for event in events:
            if event.kind is EventKind.ADMITTED:
                covered += event.at - waiting
                last = event.at
            elif event.kind in (EventKind.CHUNK, EventKind.STALLED, EventKind.TOKEN) and event.at > last:
                assert event.begin >= last - 1e-9
                covered += event.at - event.begin
                last = event.at
            elif event.kind is EventKind.PREEMPTED:
                waiting = event.at
        assert covered == pytest.approx(events[-1].at - events[0].at)


def test_a_short_prompt_behind_a_queue_of_long_ones_goes_on_at_once() -> None:
    driver = Driver(EngineConfig(kv_tokens=65536, max_context=4096, step_tokens=256, max_running=32, max_waiting=200))
    for n in range(100):
        driver.submit(f"long{n}", prompt(2000, n), max_tokens=2)
    driver.step()
    driver.submit("short", prompt(30, 300), max_tokens=1)
    for _ in range(3):
        driver.step()
    assert driver.finish_of("short") == "length"
    driver.core.abort(list(driver.submitted))
    driver.run()
    driver.assert_at_rest()


def test_admission_leaves_a_page_for_each_that_may_grow() -> None:
    driver = Driver(EngineConfig(kv_tokens=512, step_tokens=512, max_running=16))
    for n in range(20):
        driver.submit(f"r{n}", prompt(30, n), max_tokens=10)
    driver.run()
    assert driver.core.gauges.preemptions == 0
    driver.assert_alone()
