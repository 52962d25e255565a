"""A configuration is understood in full or refused by the field's name; weights fit it or are refused by theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tailrace.backends.kvdtype import BF16, parse
from tailrace.models import describe, load_model, open_checkpoint
from tailrace.models.fields import Fields
from tailrace.models.rope import RopeConfig, build_rope, read_rope
from tailrace.terms import ModelError
from tests.models.test_checkpoint import GOLDEN, copy, edit


def rope_of(**config: Any) -> RopeConfig:
    return read_rope(Fields("config.json", config), config.get("max_position_embeddings", 4096))


YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "finetuned": True, **YARN}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
        ),
        ({"rope_scaling": None}, {}),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        ),
    ],
)
def test_old_and_new_ways_of_writing_a_rope_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert rope_of(**old) == rope_of(**new)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type is 'longrope', which is not supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_type is 'mrope', which is not supported"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters: rope_type is 'su'"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_type is 3"),
        ({"rope_parameters": [1]}, "rope_parameters is not an object"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}},
            "type is 'linear', but rope_type is 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; expected 1 or more"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 1e999}}, "factor is inf"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}},
            "beta_fast is not a field of the linear rope",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 3}}, "alpha is not a field of the dynamic rope"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "expected less than high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention is not a field"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0, but the rope's own"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, "contradicts"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0; expected more than 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25, which is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": "no"}}, "truncate is 'no'"),
    ],
)
def test_a_rope_that_is_not_understood_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rope_of(**config)


def test_contexts_that_ropes_serve() -> None:
    assert rope_of().contexts(4096) == (4096, 4096)
    assert rope_of(rope_scaling={"type": "linear", "factor": 4.0}).contexts(4096) == (16384, 16384)
    assert rope_of(rope_scaling={"type": "dynamic", "factor": 4.0}).contexts(4096) == (4096, 16384)
    assert rope_of(rope_scaling={"type": "yarn", **YARN}).contexts(4096) == (4096, 4096)
    assert rope_of(rope_scaling={"type": "yarn", "factor": 4.0}).contexts(4096) == (16384, 16384)
    assert rope_of(rope_parameters=LLAMA3).contexts(131072) == (131072, 131072)


def test_the_dynamic_rope_is_the_plain_one_up_to_the_trained_context() -> None:
    rope = rope_of(rope_scaling={"type": "dynamic", "factor": 4.0})
    plain = build_rope(rope_of(), 64, 4096)
    assert np.array_equal(build_rope(rope, 64, 100).inv_freq, plain.inv_freq)
    assert np.array_equal(build_rope(rope, 64, 4096).inv_freq, plain.inv_freq)
    assert (build_rope(rope, 64, 4097).inv_freq[1:] < plain.inv_freq[1:]).all()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"model_type": "gemma3"}, "model_type 'gemma3' is not supported; supported are llama"),
        ("llama", {"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ("llama", {"model_type": ["llama"]}, "model_type is missing"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported; expected 'silu'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ("llama", {"vision_config": {"x": 1}}, "vision_config is"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
        ("llama", {"sliding_window": 128}, "sliding_window is 128, but llama models have no window"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ("llama", {"architectures": ["Qwen2ForCausalLM"]}, "architectures is"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map says that the model needs code of its own"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"hidden_size": 32.5}, "hidden_size is 32.5"),
        ("llama", {"hidden_size": True}, "hidden_size is True"),
        ("llama", {"hidden_size": 10**400}, "hidden_size is an absurdly large number"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("llama", {"num_attention_heads": 6, "head_dim": ...}, "not a multiple of num_attention_heads"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4"),
        ("llama", {"head_dim": 7}, "head_dim is 7; expected an even number"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
        ("mistral-window", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral-window", {"use_sliding_window": False}, "use_sliding_window is false, but sliding_window is 16"),
        ("qwen2", {"attention_bias": False}, "attention_bias is False"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config is"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "names sliding_attention, but use_sliding"),
        ("qwen2", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types must name"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must name"),
        ("qwen3", {"num_experts": 128}, "num_experts is 128"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = edit(copy(name, tmp_path / "model"), **fields)
    with pytest.raises(ModelError, match=message) as refused:
        load_model(open_checkpoint(folder))
    assert str(folder) in str(refused.value)


MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("deepseek_v3", r"model_type 'deepseek_v3' is not supported \(latent attention: kv_lora_rank\); supported are"),
        ("llama", "kv_lora_rank is 512, which is not supported"),
    ],
)
def test_latent_attention_is_refused_before_anybody_counts_its_kv(kind: str, message: str, tmp_path: Path) -> None:
    """Keys and values of its heads are not what it keeps: bytes counted from them would be wrong, with any KV type."""
    folder = edit(copy("llama", tmp_path / "model"), model_type=kind, **MLA)
    for kept in (BF16, parse("k8v4")):
        with pytest.raises(ModelError, match=message) as refused:
            describe(open_checkpoint(folder), kv_dtype=kept)
        assert str(folder) in str(refused.value)


def tensors(folder: Path, change: dict[str, np.ndarray | None]) -> Path:
    """Replaces tensors of a float32 checkpoint; None takes one away."""
    path = folder / "model.safetensors"
    found = load_file(path) | change
    save_file({name: array for name, array in found.items() if array is not None}, path)
    return folder


ZEROS = np.zeros((96, 32), np.float32)


@pytest.mark.parametrize(
    ("name", "fields", "change", "message"),
    [
        (
            "llama-biased",
            {},
            {"model.layers.1.mlp.up_proj.weight": None},
            r"layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        ("llama-biased", {}, {"model.layers.0.self_attn.o_proj.bias": None}, r"o_proj\.bias is missing"),
        ("llama-biased", {}, {"model.norm.weight": np.zeros(31, np.float32)}, r"norm\.weight has the shape \[31\]"),
        ("llama-biased", {}, {"model.norm.weight": np.zeros((1, 32), np.float32)}, r"has the shape \[1, 32\]"),
        ("llama-biased", {"attention_bias": False}, {}, r"self_attn\.[kqvo]_proj\.bias is not one that llama models"),
        ("llama-biased", {"vocab_size": 97}, {}, r"embed_tokens\.weight has the shape \[96, 32\]"),
        ("llama-biased", {"tie_word_embeddings": False}, {}, r"lm_head\.weight is missing, and tie_word_embeddings"),
        ("llama-biased", {"tie_word_embeddings": ...}, {}, r"lm_head\.weight is missing, and tie_word_embeddings"),
        (
            "llama-biased",
            {},
            {"lm_head.weight": ZEROS},
            r"tie_word_embeddings is true, but tensor lm_head\.weight differs",
        ),
        ("llama-biased", {}, {"lm_head.weight": ZEROS[:95]}, r"lm_head\.weight has the shape \[95, 32\]"),
        ("llama-biased", {}, {"rope_freqs.weight": np.ones(12, np.float32)}, "belongs in a GGUF file"),
        ("qwen3-biased-window", {}, {"model.layers.0.self_attn.q_norm.weight": None}, r"q_norm\.weight is missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    name: str, fields: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tensors(edit(copy(name, tmp_path / "model"), **fields), change)
    with pytest.raises(ModelError, match=message) as refused:
        load_model(open_checkpoint(folder))
    assert str(folder) in str(refused.value)


def test_a_tied_model_may_store_the_same_head_again(tmp_path: Path) -> None:
    folder = copy("llama-biased", tmp_path / "model")
    same = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    model = load_model(open_checkpoint(tensors(folder, {"lm_head.weight": same})))
    assert model.head is model.embedding
    assert sum(weight is model.embedding for weight in model.weights()) == 1


def test_tables_that_follow_from_the_configuration_are_left_alone(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_model(open_checkpoint(tensors(copy("llama-biased", tmp_path / "m"), {name: np.ones(12, np.float32)})))


def test_windows_of_each_layer(tmp_path: Path) -> None:
    def windows(name: str, **fields: Any) -> tuple[int | None, ...]:
        folder = edit(copy(name, tmp_path / name), **fields)
        return tuple(spec.window for spec in load_model(open_checkpoint(folder)).attentions)

    assert windows("llama") == (None, None)
    assert windows("mistral-window") == (16, 16)
    assert windows("mistral-window", sliding_window=...) == (4096, 4096)
    assert windows("mistral-full") == (None, None)
    assert windows("qwen2") == (None, None)
    assert windows("qwen2", sliding_window=8, max_window_layers=0) == (None, None)
    assert windows("qwen2-window") == (None, 16, 16)
    assert windows("qwen2-window", layer_types=..., max_window_layers=2) == (None, None, 16)
    assert windows("qwen3-biased-window") == (10, None)


def test_weights_come_once_and_in_order() -> None:
    model = load_model(open_checkpoint(GOLDEN / "models" / "llama"))
    names = [weight.name for weight in model.weights()]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert len(names) == len(set(names)) == 3 + 2 * 9


def test_what_info_says_of_a_model() -> None:
    checkpoint = open_checkpoint(GOLDEN / "models" / "qwen3-biased-window")
    info = describe(checkpoint)
    stored = sum(np.prod(weight.shape) for weight in checkpoint.tensors.values())
    assert info.parameters == info.active_parameters == stored
    assert info.weight_bytes == 4 * stored
    # Declared head_dim 12, not hidden / heads = 8; 2 kv heads, 2 layers, keys and values, two bytes each.
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 12 * 2
    assert info.kv_bytes_per_context == 2 * 2 * 12 * 2 * (512 + 512)  # one window is 10, but a step takes all of it
    assert [(group.window, len(group.layers)) for group in info.groups] == [(None, 1), (10, 1)]
    assert list(info.formats.values()) == [(len(checkpoint.tensors), 4 * stored)]


def test_kv_bytes_count_grouped_heads_once(tmp_path: Path) -> None:
    """Shapes of Llama 3.1 8B's attention in one thin layer: 2 * 8 * 128 * 2 bytes a token and layer."""
    hidden, inner, vocab = 32, 4, 8
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (32 * 128, hidden),
        "model.layers.0.self_attn.k_proj.weight": (8 * 128, hidden),
        "model.layers.0.self_attn.v_proj.weight": (8 * 128, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, 32 * 128),
        "model.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "model.layers.0.mlp.up_proj.weight": (inner, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    save_file({name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": vocab}
    config |= {"max_position_embeddings": 8192, "rope_theta": 500000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = describe(open_checkpoint(tmp_path))
    assert 32 * info.kv_bytes_per_token == 128 * 1024
    assert 32 * info.kv_bytes_per_context == 1 << 30
