"""Memory: which model fits which device, and what is said when it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.terms import InvalidInput
from tailrace.twin.catalogue import devices
from tailrace.twin.fit import Fit, Reserve, fit
from tailrace.twin.shapes.split import Parallel, objections
from tests.twin.models import LLAMA_8B, LLAMA_405B, MIXTRAL, QWEN3_4B, V3, weights


def _fit(name: str | dict[str, Any], device: str, form: str | None = None, **asked: Any) -> Fit:
    key, found = devices.builtin().find(device)
    parallel = Parallel(**{axis: asked.pop(axis) for axis in ("tp", "pp", "dp", "ep") if axis in asked})
    return fit(weights(name, form), key, found, parallel, **asked)


def test_an_rtx_4090_holds_the_tokens_that_vllm_had_room_for() -> None:
    """vLLM 0.19, Llama-3.1-8B in BF16: 2,588 pages of 16 tokens. The overhead that is assumed is from this run."""
    pages = _fit(LLAMA_8B, "rtx-4090", context=16).users
    assert pages == pytest.approx(2588, rel=0.002)


def test_users_share_what_weights_and_overhead_leave() -> None:
    found = _fit(LLAMA_8B, "h100", context=8192, reserve=Reserve(1.0, 0))
    assert found.kv_budget == 81_559 * 2**20 - 16_060_522_496
    assert found.users == found.kv_budget // 2**30 == 64
    assert _fit(LLAMA_8B, "h100", context=8192, tp=2, reserve=Reserve(1.0, 0)).users == 144


def test_data_parallel_ranks_each_have_users_of_their_own() -> None:
    one, four = (_fit(LLAMA_8B, "h100", context=8192, dp=dp) for dp in (1, 4))
    assert (four.weight_bytes, four.users) == (one.weight_bytes, 4 * one.users)


@pytest.mark.parametrize(
    ("name", "device", "form", "tp", "least"),
    [
        (LLAMA_405B, "h100", None, 1, 11),  # bf16 on one of 80 GB
        (V3, "h200", None, 2, 5),  # fp8 on two of 141 GB
        (MIXTRAL, "t4", "int4", 1, 2),  # 8x7B at four bits on 16 GB
        (QWEN3_4B, "t4", "fp32", 1, 2),
    ],
)
def test_what_does_not_fit_says_how_many_would_do(
    name: Any, device: str, form: str | None, tp: int, least: int
) -> None:
    found = _fit(name, device, form, tp=tp, context=4096)
    assert not found.fits
    assert found.users == 0
    assert found.needs is not None
    assert found.needs.devices >= least
    again = _fit(
        name, device, form, context=4096, **{axis: getattr(found.needs, axis) for axis in ("tp", "pp", "dp", "ep")}
    )
    assert again.fits
    assert not objections(weights(name, form), found.needs)


def test_memory_of_a_mixture_follows_all_of_its_experts() -> None:
    """122 B at four bits take 70 GB, whatever ten of them are active: not 48."""
    moe = {
        "model_type": "qwen3_moe", "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024, "vocab_size": 248320, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    held = weights(moe, "int4")
    assert held.shape.parameters / 1e9 == pytest.approx(120, rel=0.02)
    assert held.shape.active / 1e9 < 9
    assert not _fit(moe, "l40s", "int4", context=4096).fits
    assert held.bytes / 1e9 == pytest.approx(64, rel=0.02)


def test_a_request_that_is_larger_than_the_memory_does_not_fit() -> None:
    """131,072 tokens take 17 GB, and a 4090 has 5 GB left: never a number of users, always what it would take."""
    found = _fit(LLAMA_8B, "rtx-4090", context=131_072)
    assert (found.fits, found.users) == (False, 0)
    assert found.kv_budget > 0
    assert found.needs == Parallel(tp=2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"context": 200_000}, "--context is 200,000, but meta-llama--Meta-Llama-3.1-8B has at most 131,072"),
        ({"context": 0}, "at least 1"),
        ({"context": 16, "users": 0}, "at least 1"),
        ({"context": 16, "kv": "nf4"}, "--kv 'nf4' is not known"),
        ({"context": 16, "tp": 6}, "cannot be divided by TP 6"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        _fit(LLAMA_8B, "h100", **asked)


def test_kv_in_eight_bits_holds_twice_the_users() -> None:
    wide, narrow = (_fit(LLAMA_8B, "h100", context=8192, kv=kv) for kv in ("bf16", "fp8"))
    assert narrow.request_bytes * 2 == wide.request_bytes
    assert narrow.users in (2 * wide.users, 2 * wide.users + 1)


def test_no_device_is_large_enough_for_what_leaves_no_room() -> None:
    found = _fit(LLAMA_8B, "t4", context=16, reserve=Reserve(0.9, 20_000_000_000))
    assert found.needs is None
