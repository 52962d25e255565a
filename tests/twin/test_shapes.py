"""Parameters and KV of models, against what others publish, count and measure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.terms import ModelError
from tailrace.twin.shapes.caches import CacheKind
from tailrace.twin.shapes.model import shape_of
from tailrace.twin.shapes.parts import Latent
from tests.twin.models import (
    GPT_OSS,
    LLAMA_8B,
    MISTRAL_7B,
    MIXTRAL,
    PUBLISHED,
    QWEN3_4B,
    SCOUT,
    TINYLLAMA,
    V3,
    V32,
    config,
    shape,
)

GOLDEN = Path(__file__).parent / "golden"
SMALL: dict[str, dict[str, Any]] = json.loads((GOLDEN / "shapes.json").read_text())
WHOLE: dict[str, int] = json.loads((GOLDEN / "published.json").read_text())

TOTALS = {  # 1e9 parameters, as the model's card, paper or repository says
    "Qwen--Qwen3-0.6B": 0.596, "Qwen--Qwen3-235B-A22B": 235, "Qwen--Qwen3-30B-A3B": 30.5, "Qwen--Qwen3-32B-FP8": 32.8,
    "Qwen--Qwen3-32B": 32.8, "Qwen--Qwen3-8B": 8.2, "Qwen--Qwen3-VL-8B-Instruct": 8.77, "Qwen--Qwen3.5-35B-A3B": 35,
    "XiaomiMiMo--MiMo-V2-Flash": 309, V3: 671, V32: 671, "google--gemma-4-26B-A4B": 25.2, SCOUT: 109,
    "meta-llama--Meta-Llama-3.1-405B": 405, "meta-llama--Meta-Llama-3.1-70B": 70.6, LLAMA_8B: 8.03, MIXTRAL: 46.7,
    "moonshotai--Kimi-K2-Instruct": 1030, "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6, GPT_OSS: 116.8,
    "openai--gpt-oss-20b": 20.9,
}  # fmt: skip

ACTIVE = {  # the same, with half a unit of the last digit that is published; counted with the embedding or without
    "Qwen--Qwen3-235B-A22B": (22, 0.5, True), "Qwen--Qwen3-30B-A3B": (3.3, 0.06, True),
    "Qwen--Qwen3.5-35B-A3B": (3, 0.5, False),
    "XiaomiMiMo--MiMo-V2-Flash": (15, 0.5, True), V3: (37, 0.5, False), V32: (37, 0.5, False),
    "google--gemma-4-26B-A4B": (3.8, 0.05, True), SCOUT: (17, 0.5, True), MIXTRAL: (12.9, 0.05, True),
    "moonshotai--Kimi-K2-Instruct": (32, 0.5, False), "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (3.6, 0.05, True),
    GPT_OSS: (5.13, 0.005, False), "openai--gpt-oss-20b": (3.61, 0.005, False),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_what_is_published(name: str) -> None:
    made = shape(name)
    text_only = name.startswith("google--gemma-4")  # whose card counts the language model
    total = made.text_parameters if text_only else made.parameters
    assert total / 1e9 == pytest.approx(TOTALS[name], rel=0.005)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_what_is_published(name: str) -> None:
    made = shape(name)
    published, half, embedded = ACTIVE[name]
    assert (made.active if embedded else made.multiplied) / 1e9 == pytest.approx(published, abs=half)


@pytest.mark.parametrize("name", WHOLE)
def test_published_models_have_the_parameters_that_transformers_gives_them(name: str) -> None:
    assert shape(name).parameters == WHOLE[name]


@pytest.mark.parametrize("name", SMALL)
def test_small_models_of_every_architecture_have_the_parameters_that_transformers_gives_them(name: str) -> None:
    assert shape_of(SMALL[name]["config"], name).parameters == SMALL[name]["parameters"]


def test_llama_4_scout_has_the_parameters_of_its_files() -> None:
    """Its configuration here leaves out the vision tower, which is the architecture's own and said to be assumed."""
    made = shape(SCOUT)
    assert made.parameters == 108_641_793_536
    assert "vision_config" in made.assumed


def test_towers_are_counted_apart() -> None:
    made = shape("Qwen--Qwen3-VL-8B-Instruct")
    assert made.text_parameters == shape("Qwen--Qwen3-8B").parameters
    assert made.parameters - made.text_parameters == 576_388_336
    text = shape_of(config("Qwen--Qwen3-VL-8B-Instruct"), text_only=True)
    assert text.parameters == made.text_parameters


def test_multi_token_prediction_is_beside_the_model() -> None:
    """DeepSeek-V3: 685 B with it, its embedding and head, which are copies (README of the repository)."""
    made = shape(V3)
    beside = sum(tensor.parameters for tensor in made.mtp)
    copies = 2 * made.vocab * made.hidden
    assert (made.parameters + beside + copies) / 1e9 == pytest.approx(685, rel=0.002)


# The facts of a sizing


def test_llama_8b_keeps_128_kib_a_token() -> None:
    made = shape(LLAMA_8B)
    assert made.kv_bytes_per_token() == 131_072 == 2 * 32 * 8 * 128 * 2
    assert made.kv_bytes(8192) == 2**30


def test_the_numbers_of_the_talks() -> None:
    """1.1 B in 16 bits, 7.3 B in 16 bits, and 80 users of the latter with 4,096 tokens each."""
    assert shape(TINYLLAMA).parameters * 2 / 1e9 == pytest.approx(2.2, abs=0.01)
    mistral = shape(MISTRAL_7B)
    assert mistral.parameters * 2 / 1e9 == pytest.approx(14.6, rel=0.01)
    assert mistral.kv_bytes_per_token() == 131_072
    assert 80 * mistral.kv_bytes(4096) / 1e9 == pytest.approx(42.9, abs=0.05)


def test_a_latent_is_small_against_all_heads_of_all_layers() -> None:
    made = shape(V3)
    assert made.kv_bytes_per_token() == 70_272 == 61 * (512 + 64) * 2
    latents = [mixer for mixer in made.attentions if isinstance(mixer, Latent)]
    heads = sum(cache.token_bytes(2) for latent in latents for cache in latent.unfolded.caches())
    assert len(latents) == 61
    assert heads == 61 * 128 * (192 + 128) * 2
    assert heads / made.kv_bytes_per_token() == pytest.approx(71.1, abs=0.05)


def test_ranks_of_tensor_parallelism_all_keep_the_latent() -> None:
    made = shape(V3)
    assert made.kv_bytes(8192, tp=8) == made.kv_bytes(8192)
    assert shape(LLAMA_8B).kv_bytes(8192, tp=4) == 2**28


def test_gpt_oss_keeps_what_a_live_engine_reported() -> None:
    """vLLM: 5.38 GiB of KV for 78,384 tokens. Layers with a window keep the window alone."""
    made = shape(GPT_OSS)
    assert made.kv_bytes_per_token() == 73_728
    assert 5.38 * 2**30 / made.kv_bytes_per_token() == pytest.approx(78_384, rel=0.001)
    assert made.kv_bytes(100_000) == 36_864 * (100_000 + 128)


@pytest.mark.parametrize(
    ("fields", "head"),
    [
        (QWEN3_4B, 128),
        (config("openai--gpt-oss-20b"), 64),
        ({**MISTRAL_7B, "hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128}, 128),  # Mistral-Small-24B
        ({"model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
          "vocab_size": 262208, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
          "sliding_window": 1024}, 256),
    ],
)  # fmt: skip
def test_a_declared_head_size_beats_the_quotient(fields: dict[str, Any], head: int) -> None:
    made = shape_of(fields)
    assert fields["hidden_size"] // fields["num_attention_heads"] != head
    assert {attention.key for attention in made.attentions if not isinstance(attention, Latent)} == {head}


def test_sparse_attention_keeps_the_keys_of_its_indexer_too() -> None:
    """A key of 128 values in FP8 and its scale in float32, in each of 61 layers."""
    index = [cache for _, cache in shape(V32).caches if cache.kind is CacheKind.INDEX]
    assert sum(cache.token_bytes(2) for cache in index) == 61 * (128 + 4)
    assert shape(V32).kv_bytes_per_token() == 70_272 + 61 * 132


def test_chunked_layers_keep_their_chunk_and_the_others_all() -> None:
    made = shape(SCOUT)
    kinds = [cache.kind for _, cache in made.caches]
    assert (kinds.count(CacheKind.CHUNKED), kinds.count(CacheKind.FULL)) == (36, 12)
    assert made.kv_bytes(100_000) == 4096 * (36 * 8192 + 12 * 100_000)


def test_linear_attention_keeps_a_state_that_does_not_grow() -> None:
    made = shape("Qwen--Qwen3.5-35B-A3B")
    assert made.kv_bytes_per_token() == 10 * 2 * 2 * 256 * 2
    grown = made.kv_bytes(65_536) - made.kv_bytes(32_768)
    assert grown == 32_768 * made.kv_bytes_per_token()
    state = made.kv_bytes(1) - made.kv_bytes_per_token()
    mixed = 2 * 16 * 128 + 32 * 128
    assert state == 30 * (4 * 32 * 128 * 128 + 2 * 3 * mixed)


def test_layers_may_differ_in_a_list() -> None:
    varied = shape({**MISTRAL_7B, "num_key_value_heads": [8] * 16 + [4] * 16})
    assert varied.kv_bytes_per_token() == 131_072 * 3 / 4
    with pytest.raises(ModelError, match="num_key_value_heads has 3 entries, but there are 32 layers"):
        shape({**MISTRAL_7B, "num_key_value_heads": [8, 8, 8]})


def test_what_a_file_leaves_to_its_architecture_is_taken_and_named() -> None:
    """google/gemma-3-4b-it, whose text has little more than what differs from the class."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
              "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
              "vision_use_head": False}  # fmt: skip
    made = shape_of({"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 256})
    assert made.parameters == 4_300_079_472
    assert made.assumed["vocab_size"] == 262_208
    assert made.assumed["num_key_value_heads"] == 4


def test_fields_may_differ_by_layer() -> None:
    """Newer files say so in `per_layer_config`; what is not understood there is refused too."""
    other = {"per_layer_config": {"3": {"num_key_value_heads": 4, "head_dim": 64}}}
    assert shape({**MISTRAL_7B, **other}).kv_bytes_per_token() == 2 * 2 * (31 * 8 * 128 + 4 * 64)
    with pytest.raises(ModelError, match="per_layer_config has num_memory_banks, which is not understood"):
        shape({**MISTRAL_7B, "per_layer_config": {"3": {"num_memory_banks": 2}}})


def test_compressed_attention_keeps_an_entry_for_several_tokens() -> None:
    """DeepSeek V4: a window in every layer, and an entry for each 4 (with its index) or 128 tokens in most."""
    made = shape_of(SMALL["deepseek_v4"]["config"])
    window, entry, index = 16 * 20 * 2, 20 * 2, 24 + 4
    assert made.kv_bytes(1024) == 7 * window + 3 * 256 * (entry + index) + 2 * 8 * entry


# What is not understood is refused by name


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_unknown_field_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ModelError, match="num_memory_banks is not understood"):
        shape(name, num_memory_banks=4)
    nested = copy.deepcopy(config(name))
    if "text_config" in nested:
        nested["text_config"]["num_memory_banks"] = 4
        with pytest.raises(ModelError, match=r"text_config\.num_memory_banks is not understood"):
            shape_of(nested)


ABSENT_IS_NONE = {
    "sliding_window", "n_shared_experts", "first_k_dense_replace", "shared_expert_intermediate_size", "q_lora_rank",
    "num_nextn_predict_layers", "moe_shared_expert_intermediate_size", "num_global_key_value_heads",
}  # fmt: skip
"""Parts that a model has only where a field says so."""


@pytest.mark.parametrize(
    "name", [LLAMA_8B, MIXTRAL, GPT_OSS, V32, "XiaomiMiMo--MiMo-V2-Flash", "Qwen--Qwen3.5-35B-A3B"]
)
def test_no_size_can_be_left_out_without_a_word(name: str) -> None:
    """Where a field that matters is missing, the model is refused, or the value that was taken instead is named."""
    whole = config(name)
    before = shape_of(whole, name)
    inner = whole.get("text_config", whole)
    for field in [key for key, value in inner.items() if type(value) in (int, bool) and key not in ABSENT_IS_NONE]:
        less = {key: value for key, value in inner.items() if key != field}
        try:
            after = shape_of({**whole, "text_config": less} if "text_config" in whole else less, name)
        except ModelError:
            continue
        same = (after.parameters, after.kv_bytes(99_999)) == (before.parameters, before.kv_bytes(99_999))
        assert same or set(after.assumed) - set(before.assumed), field


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "brand_new"}, "'brand_new' is not known"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": -4096}, "hidden_size is -4096"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32, not a multiple of 5 KV heads"),
        ({"attention_bias": True}, "attention_bias is True, which is not supported"),
        ({"num_experts": 8}, "num_experts is not understood"),
        ({"vision_config": {"model_type": "eye"}}, "the vision tower 'eye' is not known"),
        ({"audio_config": {"model_type": "ear"}}, "the audio tower 'ear' is not known"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        shape({**MISTRAL_7B, **changes})


def test_a_kind_of_layer_that_is_not_known_is_named() -> None:
    with pytest.raises(ModelError, match="layer_types has 'memory'"):
        shape(LLAMA_8B, layer_types=["full_attention"] * 31 + ["memory"])


def test_two_names_of_a_field_must_agree() -> None:
    assert shape(GPT_OSS).experts[0].used == 4
    with pytest.raises(ModelError, match="num_experts_per_tok and experts_per_token say different things"):
        shape(GPT_OSS, experts_per_token=8)
