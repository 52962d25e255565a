"""Sampling follows its rules: penalties, filters, noise that depends on seed, position and token alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.backends.reference import gumbel, sample
from tailrace.backends.reference.sampler import log_softmax
from tests.batches import sampling

LOGITS = np.array([[1.0, 3.0, 2.0, -1.0, 3.0, 0.0]], np.float32)


def token(logits: np.ndarray, **values: Any) -> int:
    return int(sample(np.atleast_2d(np.asarray(logits, np.float32)), sampling(1, **values)).tokens[0])


def drawn(logits: np.ndarray, count: int = 400, **values: Any) -> set[int]:
    """All tokens that come up over many seeds."""
    rows = np.repeat(np.asarray(logits, np.float32), count, axis=0)
    result = sample(rows, sampling(count, **{"temperature": 1.0, "seed": np.arange(count), **values}))
    return set(result.tokens.tolist())


def scalar_noise(seed: int, position: int, token: int) -> float:
    """The hash of the specification, one token at a time in plain integers."""
    mask = 0xFFFFFFFF
    a = seed & mask ^ position * 0x9E3779B9 & mask
    b = (seed >> 32) + position * 0x85EBCA6B & mask
    h = token * 0xCC9E2D51 + a & mask
    h = (h ^ h >> 16) * 0x7FEB352D & mask
    h = (h ^ h >> 15) + b & mask
    h = h * 0x846CA68B & mask
    h = ((h ^ h >> 16) ^ a) * 0x9E3779B1 & mask
    h ^= h >> 15
    u = ((h >> 9) + 0.5) * 2.0**-23
    return float(-np.log(-np.log(u)))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 200_000))
@example(7826, 200_000, 135_273)  # the largest hash
@settings(max_examples=60, deadline=None)
def test_noise_is_the_hash_that_is_specified(seed: int, position: int, at: int) -> None:
    noise = gumbel(seed, position, at + 1)
    assert noise[at] == pytest.approx(scalar_noise(seed, position, at), rel=1e-5, abs=1e-5)
    assert np.isfinite(noise).all()


def test_noise_is_gumbel_and_seeds_and_positions_are_independent() -> None:
    noise = np.stack([gumbel(seed, position, 1000) for seed in (1, 2, 1 << 40) for position in (0, 1, 500)])
    assert abs(noise.mean() - 0.5772) < 0.05
    assert abs(noise.std() - np.pi / 6**0.5) < 0.05
    correlation = np.corrcoef(noise)
    assert np.abs(correlation - np.eye(len(noise))).max() < 0.15


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    rows = np.repeat(logits, 4000, axis=0)
    tokens = sample(rows, sampling(4000, temperature=1.0, seed=np.arange(4000) * 7919, position=5)).tokens
    counts = np.bincount(tokens, minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_a_row_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(9, 50)).astype(np.float32)
    seeds = rng.integers(0, 2**63, 9).astype(np.uint64)
    together = sample(logits, sampling(9, temperature=0.9, seed=seeds, position=np.arange(9), top_p=0.9)).tokens
    for row in range(9):
        alone = token(logits[row], temperature=0.9, seed=seeds[row], position=row, top_p=0.9)
        assert alone == together[row]


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert token(LOGITS) == 1


def test_a_high_temperature_reaches_all_and_a_low_one_the_best() -> None:
    assert drawn(LOGITS, temperature=100.0) == set(range(6))
    assert drawn(LOGITS, temperature=0.01) == {1, 4}


def test_top_k_keeps_the_lower_ids_of_equals() -> None:
    assert drawn(LOGITS, temperature=50.0, top_k=1) == {1}
    assert drawn(LOGITS, temperature=50.0, top_k=3) == {1, 2, 4}
    assert drawn(LOGITS, temperature=50.0, top_k=100) == set(range(6))


def test_top_p_keeps_the_smallest_prefix_that_reaches_it() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float64)).astype(np.float32)
    assert drawn(logits, top_p=1e-6) == {0}
    assert drawn(logits, top_p=0.49) == {0}
    assert drawn(logits, top_p=0.6) == {0, 1}
    assert drawn(logits, top_p=0.9) == {0, 1, 2}
    assert drawn(logits, top_p=1.0) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float64)).astype(np.float32)
    # Of the two that top-k keeps the first has 4/7 = 0.571.
    assert drawn(logits, top_k=2, top_p=0.56) == {0}
    assert drawn(logits, top_k=2, top_p=0.6) == {0, 1}
    assert drawn(logits, min_p=0.6, top_p=0.56) == {0}


def test_min_p_counts_from_the_likeliest() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float64)).astype(np.float32)
    assert drawn(logits, min_p=0.55) == {0, 1}
    assert drawn(logits, min_p=0.11) == {0, 1, 2}
    assert drawn(logits, min_p=1.0) == {0}


def test_filters_look_at_probabilities_after_the_temperature() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float64)).astype(np.float32)
    assert drawn(logits, temperature=10.0, min_p=0.55) == {0, 1, 2, 3}


def test_repetition_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    seen = {"seen_start": [0, 2], "seen_token": [1, 3], "seen_count": [0, 0]}
    assert token([1.0, 3.0, 2.0, -1.0], repetition=2.0, **seen) == 2  # 3 / 2 < 2
    assert token([-9.0, -1.0, -1.5, -2.0], repetition=2.0, **seen) == 2  # -1 * 2 < -1.5


def test_presence_and_frequency_count_the_output_alone() -> None:
    seen = {"seen_start": [0, 2], "seen_token": [0, 1], "seen_count": [0, 3]}
    assert token([2.0, 3.0, 1.0], presence=5.0, **seen) == 0  # 0 was in the prompt only
    assert token([2.0, 3.0, 1.0], frequency=0.3, **seen) == 1  # 3 - 0.9 > 2
    assert token([2.0, 3.0, 1.0], frequency=0.4, **seen) == 0  # 3 - 1.2 < 2
    assert token([2.0, 3.0, 1.0], frequency=-5.0, presence=-1.0, **seen) == 1


def test_bias_comes_after_penalties_and_minus_infinity_bans() -> None:
    bias = {"bias_start": [0, 2], "bias_token": [1, 4], "bias_value": [-np.inf, -2.0]}
    assert token(LOGITS[0], **bias) == 2
    assert 1 not in drawn(LOGITS, temperature=100.0, **_repeated(bias, 400))


def _repeated(lists: dict[str, Any], rows: int) -> dict[str, Any]:
    """The same bias for every row."""
    count = len(lists["bias_token"])
    return {
        "bias_start": np.arange(rows + 1) * count,
        "bias_token": np.tile(lists["bias_token"], rows),
        "bias_value": np.tile(lists["bias_value"], rows),
    }


def test_logprobs_are_of_the_raw_logits_best_first() -> None:
    bias = {"bias_start": [0, 1], "bias_token": [3], "bias_value": [100.0]}
    result = sample(LOGITS, sampling(1, temperature=3.0, logprobs=3, **bias))
    expected = LOGITS[0] - np.log(np.exp(LOGITS[0].astype(np.float64)).sum())
    assert result.tokens[0] == 3
    assert result.logprobs[0] == pytest.approx(expected[3], abs=1e-6)
    assert result.top_tokens.tolist() == [[1, 4, 2]]
    np.testing.assert_allclose(result.top_logprobs[0], expected[[1, 4, 2]], atol=1e-6)


def test_a_forced_token_is_scored_and_not_drawn() -> None:
    result = sample(LOGITS, sampling(1, temperature=1.0, forced=5, logprobs=0))
    assert result.tokens[0] == 5
    assert result.logprobs[0] == pytest.approx(float(log_softmax(LOGITS[0])[5]))
    assert result.top_tokens.shape == (1, 0)


def test_padding_of_the_head_is_never_drawn_and_counts_for_nothing() -> None:
    logits = np.array([[1.0, 2.0, 50.0]], np.float32)
    bias = {"bias_start": [0, 2], "bias_token": [1, 2], "bias_value": [-1.5, 100.0]}
    seen = {"seen_start": [0, 1], "seen_token": [2], "seen_count": [0]}
    result = sample(logits, sampling(1, logprobs=2, **bias, **seen), vocab_limit=2)
    assert result.tokens[0] == 0
    assert result.top_tokens.tolist() == [[1, 0]]
    assert np.exp(result.top_logprobs[0]).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("logits", [[-np.inf, -np.inf], [np.nan, 1.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_there_is_nothing_to_choose_the_token_is_none(logits: list[float], temperature: float) -> None:
    assert token(np.array(logits), temperature=temperature) == -1


def test_a_tiny_temperature_is_as_good_as_greedy() -> None:
    assert drawn(LOGITS, temperature=1e-38) == {1, 4}


def test_rows_get_as_many_likely_tokens_as_they_asked_for() -> None:
    result = sample(np.repeat(LOGITS, 3, axis=0), sampling(3, logprobs=[-1, 1, 3]))
    assert result.top_tokens.shape == (3, 3)
    assert result.top_tokens[1, 0] == 1
    assert result.top_tokens[2].tolist() == [1, 4, 2]
    assert result.logprobs[0] == 0


def test_huge_logits_stay_finite() -> None:
    logits = np.array([[1e30, -1e30, 0.0]], np.float32)
    result = sample(logits, sampling(1, temperature=1.0, logprobs=1, top_p=0.5))
    assert result.tokens[0] == 0
    assert np.isfinite(result.logprobs).all()
