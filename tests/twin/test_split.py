"""What ranks hold, and which degrees of parallelism a model has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.terms import InvalidInput
from tailrace.twin.shapes.split import Parallel, Weights, check, copies, objections, ranks, stages
from tests.twin.models import GPT_OSS, LLAMA_8B, MIXTRAL, SCOUT, V3, weights

QWEN_MOE = "Qwen--Qwen3-235B-A22B"


def _against(made: Weights, **degrees: int) -> str:
    return "; ".join(objections(made, Parallel(**degrees)))


@pytest.mark.parametrize(
    ("name", "degrees", "words"),
    [
        (LLAMA_8B, {"tp": 3}, "TP 3 does not divide 32 heads"),
        (SCOUT, {"tp": 16}, "TP 16 does not divide 40 heads"),
        (LLAMA_8B, {"ep": 2, "tp": 2}, "EP needs experts"),
        (MIXTRAL, {"tp": 4, "ep": 3}, "EP 3 does not divide TP x DP = 4"),
        (MIXTRAL, {"tp": 16, "ep": 16}, "EP 16 does not divide 8 experts"),
        (LLAMA_8B, {"pp": 33}, "PP 33 is more than the 32 layers"),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"tp": 3}, "8 groups of heads and TP 3"),
    ],
)
def test_a_degree_that_does_not_divide_is_said_to(name: str, degrees: dict[str, int], words: str) -> None:
    made = weights(name)
    assert words in _against(made, **degrees)
    with pytest.raises(InvalidInput, match="cannot be divided by"):
        check(made, Parallel(**degrees))


def test_tiles_of_quantised_weights_are_not_cut() -> None:
    """1536 by 8 is one and a half tiles of 128: engines refuse that, and take 16 bits or whole experts."""
    assert "has groups of (128, 128)" in _against(weights(QWEN_MOE, "fp8-block"), tp=8)
    assert not _against(weights(QWEN_MOE), tp=8)
    assert not _against(weights(QWEN_MOE, "fp8-block"), tp=8, ep=8)


def test_microscaled_experts_are_padded_instead() -> None:
    """gpt-oss: 2880 by 8 is 360, which becomes 384 in whole groups of 32."""
    made = weights(GPT_OSS)
    assert not _against(made, tp=8)
    padded = ranks(made, Parallel(tp=8))[0]
    assert padded.weight_bytes > ranks(made, Parallel(tp=8, ep=8))[0].weight_bytes > made.bytes / 8


def test_kv_heads_are_repeated_where_there_are_more_ranks() -> None:
    made = weights(LLAMA_8B)
    assert [copies(made.shape, tp) for tp in (1, 2, 8, 16, 32)] == [1, 1, 1, 2, 4]
    assert copies(weights(V3).shape, 8) == 8
    more = 16 * ranks(made, Parallel(tp=16))[0].parameters - made.shape.parameters
    norms = (2 * 32 + 1) * 4096 * 15
    assert more == norms + 32 * 2 * 8 * 128 * 4096  # each key and value projection twice


def test_the_vocabulary_is_padded_before_it_is_divided() -> None:
    made = weights("openai--gpt-oss-20b")
    held = [p for p in made.pieces if p[1].name == "lm_head"]
    assert held[0][1].rows == 201_088
    odd = ranks(weights("Qwen--Qwen3-0.6B"), Parallel(tp=16))[0]
    assert odd.parameters > 596_049_920 / 16


def test_stages_are_even_and_spare_the_ends() -> None:
    assert [len(stage) for stage in stages(61, 8)] == [7, 8, 8, 8, 8, 8, 7, 7]
    assert [len(stage) for stage in stages(32, 4)] == [8, 8, 8, 8]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([LLAMA_8B, MIXTRAL, GPT_OSS, "Qwen--Qwen3.5-35B-A3B"]),
    st.integers(1, 8),
    st.integers(1, 5),
    st.booleans(),
)
def test_ranks_together_hold_the_whole_model(name: str, tp: int, pp: int, spread: bool) -> None:
    made = weights(name)
    parallel = Parallel(tp=tp, pp=pp, ep=tp if spread and made.shape.experts else 1)
    if objections(made, parallel):
        return
    held = ranks(made, parallel)
    assert [layer for rank in held for layer in rank.layers] == list(range(len(made.shape.layers)))
    assert tp * sum(rank.weight_bytes for rank in held) >= made.bytes
    if tp == 1 and not made.shape.tied:
        assert sum(rank.weight_bytes for rank in held) == made.bytes


def test_experts_are_spread_and_attention_is_repeated() -> None:
    """EP over DP ranks: each has all of attention, and an eighth of the experts."""
    made = weights(V3)
    rank = ranks(made, Parallel(dp=8, ep=8))[0]
    experts = sum(tensor.parameters for _, tensor, _ in made.pieces if tensor.part == "routed experts")
    assert rank.parameters == made.shape.parameters - experts * 7 // 8
