"""A simulated replica does what the real engine does, event by event, and going through steps at once changes none."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.engine.config import EngineConfig
from tests.twin.simulate.support import COST, Call, engine_events, simulated_events

calls = st.lists(
    st.builds(
        lambda gap, pieces, output, answer: (
            gap,
            [token for token, count in pieces for _ in range(count)],
            output,
            answer,
        ),
        st.sampled_from([0.0, 0.001, 0.02, 0.2, 1.0]),
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60)), min_size=1, max_size=3),
        st.integers(1, 70),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=14,
)
configs = st.builds(
    lambda policy, **rest: EngineConfig(kv_policy=policy, kv_ttl=0.5 if policy == "ttl" else 0.0, **rest),
    policy=st.sampled_from(["lru", "lfu", "cost", "ttl"]),
    kv_tokens=st.integers(12, 40).map(lambda pages: 16 * pages),
    step_tokens=st.sampled_from([4, 16, 64]),
    max_running=st.integers(1, 6),
    max_waiting=st.sampled_from([3, 100]),
    prefix_cache=st.booleans(),
    decode_share=st.sampled_from([0.25, 0.75, 1.0]),
    prefill_beside_decodes=st.sampled_from([0, 5]),
    max_preemptions=st.integers(0, 2),
    age_seconds=st.sampled_from([0.05, 10.0]),
    draft_tokens=st.just(0),
)


def timed(gaps: Sequence[tuple[float, list[int], int, int]]) -> list[Call]:
    at, made = 0.5, []
    for gap, prompt, output, answer in gaps:
        at += gap
        made.append(Call(at, prompt, output, answer))
    return made


@given(calls, configs)
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_replica_emits_the_events_of_the_real_engine(
    gaps: Sequence[tuple[float, list[int], int, int]], config: EngineConfig
) -> None:
    """Admissions and what is cached of them, chunks, stalls, preemptions, tokens: the same ones at the same times."""
    events, timelines = simulated_events(timed(gaps), config, COST)
    assert events == engine_events(timed(gaps), config, COST)
    assert len(timelines) == len(gaps)
    assert all(timeline.covered > 0.99 for timeline in timelines)


@given(calls, configs)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_steps_gone_through_at_once_are_those_gone_through_one_by_one(
    gaps: Sequence[tuple[float, list[int], int, int]], config: EngineConfig
) -> None:
    assert simulated_events(timed(gaps), config, COST) == simulated_events(timed(gaps), config, COST, at_once=False)
