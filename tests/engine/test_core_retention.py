"""What an engine keeps of what it has computed: as its policy, its tenants' shares and its pinned prefixes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.engine.config import EngineConfig
from tailrace.engine.loading import attention_parity, check_pins
from tailrace.engine.spec import EngineSpec
from tailrace.kv.prefix import CAUSES
from tailrace.models import open_checkpoint
from tailrace.models.load import model_config
from tailrace.terms import InvalidInput, ModelError
from tests.fakes import Driver

STEM = [(11 * at) % 499 for at in range(1024)]
SYSTEM = tuple(STEM[:40])  # two pages and a half


def config(**changes: object) -> EngineConfig:
    sizes: dict[str, object] = {"kv_tokens": 320, "max_context": 224, "step_tokens": 256, "max_running": 4}
    return EngineConfig(**(sizes | changes))  # type: ignore[arg-type]


def cached(driver: Driver, name: str, prompt: list[int], **outer: object) -> int:
    """Prompt tokens that a request finds, when it is served alone."""
    driver.submit(name, prompt, max_tokens=1, **outer)
    driver.run()
    return driver.last[name].cached


def evictions(driver: Driver) -> dict[str, int]:
    return dict(zip(CAUSES, driver.core.gauges.evictions, strict=True))


def test_what_has_not_been_used_for_the_time_to_live_is_not_found_again() -> None:
    driver = Driver(config(kv_policy="ttl", kv_ttl=60.0))
    assert cached(driver, "first", STEM[:100]) == 0
    driver.clock.advance(59.0)
    assert cached(driver, "soon", STEM[:100]) == 96
    driver.clock.advance(59.0)
    assert cached(driver, "used again", STEM[:100]) == 96
    driver.clock.advance(61.0)
    assert cached(driver, "late", STEM[:100]) == 0
    assert evictions(driver) == {"pressure": 0, "ttl": 6, "quota": 0, "reset": 0}
    driver.assert_alone()
    driver.assert_at_rest()


def test_a_tenant_that_floods_the_pool_loses_its_own_pages() -> None:
    driver = Driver(config(kv_tenant_share=0.4))
    cached(driver, "mine", STEM[:100], tenant="a")
    for n in range(8):
        cached(driver, f"flood {n}", [n, *STEM[200:260]], tenant="b")
    assert cached(driver, "mine again", STEM[:100], tenant="a") == 96
    assert evictions(driver)["quota"] > 0
    assert evictions(driver)["pressure"] == 0
    driver.assert_alone()
    driver.assert_at_rest()


def test_without_shares_the_same_flood_takes_everything() -> None:
    driver = Driver(config())
    cached(driver, "mine", STEM[:100], tenant="a")
    for n in range(8):
        cached(driver, f"flood {n}", [n, *STEM[200:260]], tenant="b")
    assert cached(driver, "mine again", STEM[:100], tenant="a") == 0
    assert evictions(driver)["pressure"] > 0


def test_a_pinned_prefix_is_kept_from_the_first_request_that_computes_it() -> None:
    driver = Driver(config(kv_pin=(SYSTEM,)))
    assert driver.core.gauges.pinned_pages == 0
    assert cached(driver, "first", [*SYSTEM, 1, 2, 3]) == 0
    assert driver.core.gauges.pinned_pages == 2
    for n in range(8):
        cached(driver, f"other {n}", [n, *STEM[300:500]])
    driver.core.reset_prefix()
    assert cached(driver, "later", [*SYSTEM, 4, 5, 6]) == 32
    gauges = driver.core.gauges
    assert gauges.pinned_pages + gauges.cached_pages + driver.core.scheduler.pool.free == gauges.pages
    driver.assert_alone()
    driver.assert_at_rest()


def test_a_request_of_the_longest_context_fits_beside_the_pinned_prefixes() -> None:
    driver = Driver(config(kv_pin=(SYSTEM,), tenants=3))
    for tenant in "abc":
        cached(driver, tenant, [*SYSTEM, 1], tenant=tenant)
    assert driver.core.gauges.pinned_pages == 6
    for n in range(4):
        driver.submit(f"long {n}", [n, *STEM[300:400]], max_tokens=123, ignore_eos=True, tenant="abcd"[n])
    driver.run()
    assert all(driver.finish_of(f"long {n}") == "length" for n in range(4))
    driver.assert_alone()
    driver.assert_at_rest()


def test_a_big_request_does_not_starve_beside_pinned_prefixes() -> None:
    """What else is admitted has to fit beside it in what the pinned ones leave."""
    pinned = tuple(STEM[:384])
    driver = Driver(config(kv_tokens=1024, max_context=640, max_running=8, kv_pin=(pinned,)))
    cached(driver, "pins", [*pinned, 1])
    assert driver.core.gauges.pinned_pages == 24
    for n in range(5):
        driver.submit(f"first {n}", [n, *STEM[500:600]], max_tokens=20 + n, ignore_eos=True)
    driver.step()
    driver.submit("big", [9, *STEM[500:960]], max_tokens=10)
    steps = 0
    while "big" not in driver.last:
        if driver.core.gauges.waiting < 6:
            driver.submit(f"small {steps}", [10 + steps, *STEM[500:600]], max_tokens=20 + steps % 7, ignore_eos=True)
        driver.step()
        steps += 1
        assert steps < 150, "the flow of small ones never lets it in"
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()


def test_tenants_that_were_not_reckoned_with_pin_nothing_once_the_room_is_taken() -> None:
    driver = Driver(config(kv_pin=(SYSTEM,), tenants=1))
    for tenant in "ab":
        cached(driver, tenant, [*SYSTEM, 1], tenant=tenant)
    assert driver.core.gauges.pinned_pages == 2


def test_a_step_that_fails_pins_nothing() -> None:
    failing = [OSError("gone")]
    driver = Driver(config(kv_pin=(SYSTEM,)), fail=lambda batch: failing.pop() if failing else None)
    driver.submit("fails", [*SYSTEM, 1], max_tokens=1)
    driver.run()
    assert driver.finish_of("fails") == "error"
    assert driver.core.gauges.pinned_pages == 0
    assert cached(driver, "works", [*SYSTEM, 1]) == 0
    assert driver.core.gauges.pinned_pages == 2
    driver.assert_at_rest()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_pin": (tuple(STEM[:112]),)}, "7 pages"),
        ({"kv_pin": (SYSTEM,), "tenants": 4}, "each of 4 API keys"),
        ({"kv_pin": (SYSTEM,), "max_context": 0}, "lower --max-context"),
        ({"kv_pin": (tuple(STEM[:15]),)}, "15 tokens fills no page"),
        ({"kv_pin": (tuple([-1] * 16),)}, "no token id"),
        ({"kv_pin": (SYSTEM,), "prefix_cache": False}, "prefix cache"),
    ],
)
def test_prefixes_that_cannot_be_pinned_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        config(**changes)
    assert refused.value.param == "kv_pin"


def test_as_much_as_leaves_room_for_the_longest_context_can_be_pinned() -> None:
    assert config(kv_pin=(tuple(STEM[:96]),)).pinned_pages == 6
    assert config(kv_pin=(SYSTEM, tuple(STEM[:50])), tenants=2).pinned_pages == 6  # alike but for the third page


def test_token_ids_that_the_model_does_not_have_are_refused() -> None:
    check_pins(EngineSpec("m", kv_pin=(SYSTEM,)), 512)
    with pytest.raises(ModelError, match="another model"):
        check_pins(EngineSpec("m", kv_pin=((1, 600),)), 512)


def test_attention_costs_smollm2_as_much_as_its_weights_after_3072_tokens(smollm2: Path) -> None:
    assert attention_parity(model_config(open_checkpoint(smollm2))) == 3072
