"""Requests that share a prefix compute it once, wait for one another no longer than that, and cannot tell."""

from array import array

import pytest

from tailrace.engine.config import EngineConfig
from tailrace.terms import EventKind
from tests.fakes import Driver

STEM = [(11 * at) % 499 for at in range(1024)]


def config(**changes: object) -> EngineConfig:
    sizes: dict[str, object] = {"kv_tokens": 8192, "step_tokens": 256, "max_running": 32}
    return EngineConfig(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("step_tokens", [48, 256, 512, 2048])
def test_sixteen_cold_requests_compute_their_common_prefix_once(step_tokens: int) -> None:
    driver = Driver(config(step_tokens=step_tokens))
    for n in range(16):
        driver.submit(f"r{n}", [*STEM, n, 500, 501], max_tokens=4)
    driver.run()
    assert driver.backend.computed == 1024 + 16 * 3 + 16 * 3
    driver.assert_alone()
    cached = sorted(driver.last[f"r{n}"].cached for n in range(16))
    assert cached == [0] + [1024] * 15
    causes = [e.cause for e in driver.events if e.kind is EventKind.ADMITTED]
    assert causes.count("prefix") >= 12
    driver.assert_at_rest()


def test_the_same_sixteen_warm_compute_only_what_differs() -> None:
    driver = Driver(config())
    driver.submit("warm", [*STEM, 1], max_tokens=1)
    driver.run()
    before = driver.backend.computed
    for n in range(16):
        driver.submit(f"r{n}", [*STEM, n, 500, 501], max_tokens=4)
    steps = driver.run()
    assert driver.backend.computed - before == 16 * 3 + 16 * 3
    assert steps <= 6
    driver.assert_alone()


def test_followers_are_admitted_in_the_step_after_the_prefix_is_launched() -> None:
    driver = Driver(config(step_tokens=1200))
    for n in range(3):
        driver.submit(f"r{n}", [*STEM, n], max_tokens=2)
    driver.step()
    assert driver.core.gauges.running == 1
    driver.step()
    assert driver.core.gauges.running == 3


def test_unrelated_requests_do_not_wait_for_anybody_s_prefix() -> None:
    driver = Driver(config())
    for n in range(4):
        driver.submit(f"r{n}", [*STEM, n], max_tokens=2)
    driver.submit("other", [7] * 30, max_tokens=2)
    driver.step()
    driver.step()
    driver.step()
    assert driver.finish_of("other") == "length"


@pytest.mark.parametrize("when", range(5))
def test_followers_go_on_by_themselves_when_the_one_they_wait_for_is_aborted(when: int) -> None:
    driver = Driver(config())
    for n in range(5):
        driver.submit(f"r{n}", [*STEM, n], max_tokens=3)
    for _ in range(when):
        driver.step()
    driver.core.abort(["r0"])
    driver.run()
    assert driver.backend.computed <= 1024 + 256 + 5 * 4
    assert all(driver.finish_of(f"r{n}") == "length" for n in range(1, 5))
    driver.assert_alone()
    driver.assert_at_rest()


def test_followers_go_on_when_the_one_they_wait_for_is_preempted() -> None:
    driver = Driver(config())
    for n in range(4):
        driver.submit(f"r{n}", [*STEM, n], max_tokens=3)
    driver.step()
    driver.step()
    scheduler = driver.core.scheduler
    (leader,) = scheduler.running
    scheduler.preempt(leader, driver.core._next, "test")
    driver.run()
    driver.assert_alone()
    assert all(driver.finish_of(f"r{n}") == "length" for n in range(4))


def test_a_full_hit_still_computes_the_last_token() -> None:
    driver = Driver(config())
    driver.submit("a", STEM[:64], max_tokens=3)
    driver.run()
    before = driver.backend.computed
    driver.submit("b", STEM[:64], max_tokens=3)
    driver.run()
    assert driver.last["b"].cached == 48
    assert driver.backend.computed - before == 16 + 2
    driver.submit("c", STEM[:65], max_tokens=3)
    driver.run()
    assert driver.last["c"].cached == 64
    driver.assert_alone()


def test_pages_of_the_output_are_known_to_the_next_turn() -> None:
    driver = Driver(config())
    driver.submit("turn1", STEM[:100], max_tokens=60)
    driver.run()
    history = [*STEM[:100], *driver.tokens["turn1"]]
    driver.submit("turn2", [*history, 1, 2, 3], max_tokens=5)
    driver.run()
    assert driver.last["turn2"].cached == 144  # the last token of turn1 was never computed
    driver.assert_alone()


def test_an_earlier_request_that_stopped_early_changes_nothing_for_a_later_one() -> None:
    for stop in (None, 3, 20):
        driver = Driver(config(step_tokens=40))
        driver.submit("b", [*STEM[:90], 5], max_tokens=40)
        driver.run()
        ids = tuple(driver.tokens["b"][stop : stop + 1]) if stop is not None else ()
        driver.submit("b again", [*STEM[:90], 5], max_tokens=40, stop_ids=ids)
        driver.submit("a", [*STEM[:90], 6], max_tokens=40)
        driver.run()
        driver.assert_alone()


def test_tenants_never_share_pages() -> None:
    driver = Driver(config())
    for _ in range(2):
        for tenant in ("a", "b"):
            name = f"{tenant}{len(driver.submitted)}"
            driver.submit(name, STEM[:500], max_tokens=2, tenant=tenant)
            driver.run()
    assert [driver.last[r].cached for r in ("a0", "b1", "a2", "b3")] == [0, 0, 496, 496]
    driver.assert_alone()


def test_tenants_do_not_wait_for_one_another_s_prefix() -> None:
    driver = Driver(config(step_tokens=2048))
    driver.submit("a", STEM[:500], max_tokens=2, tenant="a")
    driver.submit("b", STEM[:500], max_tokens=2, tenant="b")
    driver.step()
    assert driver.core.gauges.running == 2
    driver.run()
    assert driver.backend.computed == 2 * (500 + 1)
    driver.assert_alone()


@pytest.mark.parametrize(
    "digest", [lambda parent, tokens: b"same", lambda parent, tokens: bytes(array("i", tokens)[:1])], ids=["one", "few"]
)
def test_a_colliding_hash_costs_hits_and_never_a_token(digest) -> None:
    driver = Driver(config(), digest=digest)
    for n in range(6):
        driver.submit(f"same{n}", [*STEM[:100], n], max_tokens=20, tenant=f"t{n % 2}")
        driver.submit(f"other{n}", [n, *STEM[: 50 * n]], max_tokens=20)
        driver.run()
    for n in range(6):
        driver.submit(f"again{n}", [n, *STEM[: 50 * n]], max_tokens=20)
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()


def test_without_the_cache_nothing_is_shared_and_nothing_is_kept() -> None:
    driver = Driver(config(prefix_cache=False))
    for n in range(3):
        driver.submit(f"r{n}", [*STEM[:100], n], max_tokens=4)
    driver.run()
    assert driver.backend.computed == 3 * (101 + 3)
    gauges = driver.core.gauges
    assert (gauges.cached_pages, gauges.prefix_queries, gauges.prefix_hits) == (0, 0, 0)
    driver.assert_alone()


def test_hits_are_counted_in_tokens() -> None:
    driver = Driver(config())
    for n in range(3):
        driver.submit(f"r{n}", [*STEM[:100], n], max_tokens=1)
        driver.run()
    gauges = driver.core.gauges
    assert (gauges.prefix_queries, gauges.prefix_hits) == (303, 2 * 96)


@pytest.mark.parametrize("step_tokens", [16, 64, 512, 2048])
def test_chunks_of_every_size_give_the_same_tokens(step_tokens: int) -> None:
    driver = Driver(config(step_tokens=step_tokens))
    driver.submit("a", (STEM * 2)[:1500], max_tokens=20)
    driver.run()
    driver.assert_alone()
    assert max(tokens for _, tokens in driver.backend.steps) == min(step_tokens, 1500)


@pytest.mark.parametrize("pages", range(3, 10))
@pytest.mark.parametrize("length", [16, 17, 31, 33, 40])
@pytest.mark.parametrize("other", [0, 20])
def test_a_preempted_twin_whose_pages_are_all_known_goes_on_at_once_as_itself(
    pages: int, length: int, other: int
) -> None:
    """It is admitted with a single token left to compute, in a step in which nobody else runs; the row that it gets
    was another's."""
    driver = Driver(config(kv_tokens=16 * pages, step_tokens=64, max_running=4))
    most = min(64, 16 * pages - length)
    if other:
        driver.submit("other", STEM[100 : 100 + other], max_tokens=16 * pages - other, temperature=0.9, seed=1)
    for twin in "ab":
        driver.submit(twin, STEM[:length], max_tokens=most, temperature=0.5, seed=7)
    driver.run()
    driver.assert_alone()
    assert driver.tokens["a"] == driver.tokens["b"]
    driver.assert_at_rest()


def test_why_no_more_was_cached_is_said() -> None:
    driver = Driver(config(kv_tokens=1024, max_running=1))

    def missed(name: str, prompt: list[int], **options: object) -> str:
        driver.submit(name, prompt, max_tokens=1, **options)  # type: ignore[arg-type]
        driver.run()
        [event] = [e for e in driver.events if e.request == name and e.kind is EventKind.ADMITTED]
        return event.missed

    prompt, other = STEM[:512], [(7 * at + 3) % 499 for at in range(1000)]
    assert missed("first", prompt) == "new"
    assert missed("again", prompt) == ""
    assert missed("longer", [*prompt, *range(40)]) == "new"
    assert missed("scored", prompt, prompt_logprobs=0) == "scoring"
    assert missed("others", other) == "new"
    assert missed("evicted", prompt) == "pressure"
    driver.core.reset_prefix()
    assert missed("reset", prompt) == "reset"
    uncached = Driver(config(prefix_cache=False))
    uncached.submit("r", prompt, max_tokens=1)
    uncached.run()
    assert [e.missed for e in uncached.events if e.kind is EventKind.ADMITTED] == ["off"]
