"""Whatever arrives, leaves and fails, in whatever pool: a request's tokens are those that it gets alone, pages balance,
and there is always progress."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.backends import Batch
from tailrace.engine.config import EngineConfig
from tailrace.kv.retention import POLICIES
from tailrace.terms import EventKind
from tests.fakes import Driver, FakeClock

VOCAB = 64
STEMS = [[(a * at + at // 3) % VOCAB for at in range(160)] for a in (3, 5)]


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario. `at` and `abort_after` count steps; `late` submits while a step runs."""

    at: int
    prompt: list[int]
    max_tokens: int
    params: dict[str, Any]
    abort_after: int | None
    late: bool
    outer: dict[str, Any] = field(default_factory=dict)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    stem = draw(st.sampled_from(STEMS))
    cut = draw(st.integers(0, 9)) * 16 + draw(st.sampled_from([0, 0, 1, 15]))
    own = draw(st.lists(st.integers(0, VOCAB - 1), max_size=20))
    return [*stem[:cut], *own] or [1]


def params() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.7]),
            "seed": st.integers(0, 3),
            "stop_ids": st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
            "ignore_eos": st.booleans(),
            "min_tokens": st.integers(0, 8),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "logit_bias": st.dictionaries(st.integers(0, 70), st.sampled_from([-100.0, 1.0]), max_size=2),
            "logprobs": st.integers(-1, 2),
            "prompt_logprobs": st.sampled_from([-1, -1, -1, 0, 1]),
        },
    )


def arrivals() -> st.SearchStrategy[Arrival]:
    return st.builds(
        Arrival,
        at=st.integers(0, 25),
        prompt=prompts(),
        max_tokens=st.sampled_from([1, 1, 2, 5, 20, 60]),
        params=params(),
        abort_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),
        late=st.booleans(),
        outer=st.fixed_dictionaries(
            {},
            optional={
                "priority": st.integers(-1, 2),
                "tenant": st.sampled_from(["", "a"]),
                "deadline": st.sampled_from([0.0, 0.0, 1000.5, 1003.0, 1100.0]),
            },
        ),
    )


@st.composite
def configs(draw: st.DrawFn, policy: str = "lru") -> EngineConfig:
    """Pools that are too small for what comes, with and without tenants' shares and pinned prefixes."""
    kv_tokens = draw(st.sampled_from([240, 256, 400, 1024, 4096]))
    windows = draw(st.sampled_from([(), (), (1,), (20,), (100,), (40, 130)]))
    pinned = draw(st.sampled_from([(), (), (tuple(STEMS[0][:40]), tuple(STEMS[1][:16]))]))
    longest = kv_tokens - 2 * 48 if pinned else 230  # two tenants with three pages each
    return EngineConfig(
        kv_tokens=kv_tokens,
        max_context=draw(st.sampled_from([longest] if pinned else [0, longest])),
        step_tokens=draw(st.sampled_from([16, 17, 64, 200, 512])),
        max_running=draw(st.integers(1, 6)),
        max_waiting=draw(st.sampled_from([4, 64])),
        prefix_cache=bool(pinned) or draw(st.booleans()),
        decode_share=draw(st.sampled_from([0.25, 0.75, 1.0])),
        prefill_beside_decodes=draw(st.sampled_from([0, 0, 5])),
        oldest_share=draw(st.sampled_from([0.25, 1.0])),
        scored_rows=draw(st.sampled_from([1, 7, 64])),
        max_preemptions=draw(st.integers(0, 3)),
        max_passed=draw(st.sampled_from([1, 8])),
        age_seconds=draw(st.sampled_from([0.1, 10.0])),
        kv_policy=policy,
        kv_ttl=draw(st.sampled_from([0.05, 1.0])) if policy == "ttl" else 0.0,
        attention_parity=draw(st.sampled_from([20.0, 24_576.0])),
        kv_tenant_share=draw(st.sampled_from([1.0, 1.0, 0.3])),
        kv_pin=pinned,
        tenants=2,
        draft_tokens=draw(st.sampled_from([0, 3, 7, 20])),
        draft_rows=draw(st.sampled_from([2, 8, 64])),
        windows=windows,
    )


def play(driver: Driver, scenario: list[Arrival]) -> None:
    """Lets the requests arrive and leave at their steps, and steps until all have ended. AssertionError where that
    takes more steps than any waiting, preempting and passing over can explain."""
    bound = 60 + sum((len(one.prompt) + one.max_tokens) * 6 for one in scenario)
    leaves = {(one.at + one.abort_after, n) for n, one in enumerate(scenario) if one.abort_after is not None}
    step = 0
    last = max((one.at + (one.abort_after or 0) for one in scenario), default=0)

    def arrive(late: bool) -> None:
        for n, one in enumerate(scenario):
            if one.at == step and one.late == late:
                driver.submit(f"r{n}", one.prompt, one.max_tokens, **one.params, **one.outer)
        gone = [f"r{n}" for at, n in leaves if at == step and scenario[n].late == late]
        driver.core.abort(gone)

    while step <= last or driver.core.has_work:
        arrive(False)
        if step % 3 == 0:
            driver.core.prepare()
        driver.step(intake=lambda: arrive(True))
        step += 1
        assert step <= bound, driver.core.gauges


def check(driver: Driver, scenario: list[Arrival], config: EngineConfig) -> None:
    """Everybody has got one end, the tokens of alone, and nothing is held."""
    assert set(driver.last) == {f"r{n}" for n in range(len(scenario))}
    driver.assert_alone()
    driver.assert_at_rest()
    for request in driver.last:
        kinds = [event.kind for event in driver.events_of(request)]
        assert sum(kind in (EventKind.FINISHED, EventKind.FAILED) for kind in kinds) == 1
        assert kinds[-1] in (EventKind.FINISHED, EventKind.FAILED)
        given_tokens = sum(event.computed for event in driver.events_of(request, EventKind.TOKEN))
        assert given_tokens == len(driver.tokens[request])
        lost = [event for event in driver.events_of(request, EventKind.PREEMPTED) if event.cause != "kv_load"]
        assert len(lost) <= config.max_preemptions
        if driver.finish_of(request) in ("stop", "length"):
            times = [event.at for event in driver.events_of(request)]
            assert times == sorted(times)
    for n, one in enumerate(scenario):
        request = f"r{n}"
        wanted = len(driver.tokens[request]) if one.params.get("logprobs", -1) >= 0 else 0
        assert len(driver.logprobs[request]) == wanted
        if driver.tokens[request]:
            scored = one.params.get("prompt_logprobs", -1) >= 0
            assert len(driver.first[request].prompt_logprobs) == (len(one.prompt) if scored else 0)
            assert all(driver.first[request].prompt_logprobs[1:])


QUICK = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("policy", POLICIES)
@settings(QUICK, max_examples=60)
@given(data=st.data(), scenario=st.lists(arrivals(), min_size=1, max_size=14))
def test_tokens_are_those_of_the_request_alone(policy: str, data: st.DataObject, scenario: list[Arrival]) -> None:
    config = data.draw(configs(policy))
    driver = Driver(
        config,
        vocab=VOCAB,
        eos_ids=[7],
        clock=FakeClock(1000.0),
        duration=lambda batch: 0.01 + 0.001 * len(batch.tokens),
        period=data.draw(st.sampled_from([0, 1, 5])),
    )
    play(driver, scenario)
    check(driver, scenario, config)


@pytest.mark.parametrize("policy", POLICIES)
@settings(QUICK, max_examples=15)
@given(
    data=st.data(),
    scenario=st.lists(arrivals(), min_size=1, max_size=10),
    failing=st.sets(st.integers(1, 30), min_size=1, max_size=4),
)
def test_failing_steps_fail_their_requests_alone(
    policy: str, data: st.DataObject, scenario: list[Arrival], failing: set[int]
) -> None:
    config = data.draw(configs(policy))
    count = 0

    def fail(batch: Batch) -> Exception | None:
        nonlocal count
        count += 1
        return OSError("gone") if count in failing else None

    driver = Driver(config, vocab=VOCAB, eos_ids=[7], fail=fail, period=data.draw(st.sampled_from([0, 3])))
    play(driver, scenario)
    assert set(driver.last) == {f"r{n}" for n in range(len(scenario))}
    driver.assert_alone()
    driver.assert_at_rest()


@settings(QUICK, max_examples=25)
@given(config=configs(), scenario=st.lists(arrivals(), min_size=2, max_size=10))
def test_a_hash_that_always_collides_changes_no_token(config: EngineConfig, scenario: list[Arrival]) -> None:
    driver = Driver(config, vocab=VOCAB, eos_ids=[7], digest=lambda parent, tokens: tokens[:1])
    play(driver, scenario)
    assert set(driver.last) == {f"r{n}" for n in range(len(scenario))}
    driver.assert_alone()
    driver.assert_at_rest()


@pytest.mark.parametrize(("cache", "policy"), [(False, "lru"), *((True, policy) for policy in POLICIES)])
def test_pages_return_to_their_base_over_2000_requests_of_every_kind(cache: bool, policy: str) -> None:
    count = 0

    def fail(batch: Batch) -> Exception | None:
        nonlocal count
        count += 1
        return OSError("gone") if count % 97 == 0 else None

    config = EngineConfig(
        kv_tokens=640,
        step_tokens=96,
        max_running=6,
        max_waiting=12,
        prefix_cache=cache,
        kv_policy=policy,
        kv_ttl=5.0 if policy == "ttl" else 0.0,
    )
    driver = Driver(config, vocab=VOCAB, eos_ids=[7], fail=fail, check_every=20, period=3 if cache else 0)
    for n in range(2000):
        stem = STEMS[n % 2][: 16 * (n % 5)]
        length = 1 if n % 4 == 0 else 3 + n % 23
        if n % 50 == 9:
            driver.submit(f"r{n}", [1] * 700, length)  # refused
        else:
            driver.submit(f"r{n}", [*stem, n % VOCAB, n // VOCAB], length, stop_ids=(n % 9,), seed=n, tenant=str(n % 3))
        if n % 7 == 3:
            driver.core.abort([f"r{n - 2}"])
        if n % 2:
            driver.step()
        if n % 200 == 199:
            driver.run()
            driver.assert_at_rest()
            gauges = driver.core.gauges
            assert gauges.cached_pages + driver.core.scheduler.pool.free == gauges.pages
            if not cache:
                assert driver.core.scheduler.pool.free == gauges.pages
    ends = {driver.finish_of(f"r{n}") for n in range(2000)}
    assert ends == {"stop", "length", "abort", "error"}
    driver.assert_alone()
    driver.core.reset_prefix()
    assert driver.core.scheduler.pool.free == config.pages
