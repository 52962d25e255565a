"""Llama 2 and 3 and what shares their layers: SmolLM2, TinyLlama, and Mistral with or without a sliding window."""

from __future__ import annotations

from typing import Any

from tailrace.backends import Ops
from tailrace.models.decoder import (
    Binder,
    Layer,
    Model,
    ModelConfig,
    bind_layer,
    check_common,
    head_dim_of,
    kv_heads_of,
    layers_of,
)
from tailrace.models.fields import Fields
from tailrace.models.rope import read_rope

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM")


def configure(fields: Fields) -> ModelConfig:
    """The shape that the configuration describes. Raises ModelError for what is missing, wrong or not supported."""
    check_common(fields, CLASSES)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = layers_of(fields)
    mistral = fields.text("model_type") == "mistral"
    trained = fields.count("max_position_embeddings", 131072 if mistral else 2048)
    rope = read_rope(fields, trained)
    max_context, extended_context = rope.contexts(trained)
    biased = fields.flag("attention_bias", False)
    return ModelConfig(
        model_type=fields.text("model_type"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads_of(fields, heads, default=8 if mistral else None),
        head_dim=head_dim_of(fields, hidden, heads),
        intermediate=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        max_context=max_context,
        extended_context=extended_context,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=(_window(fields, layers),) * layers,
        tied=fields.flag("tie_word_embeddings", False),
        attention_bias=biased,
        output_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _window(fields: Fields, layers: int) -> int | None:
    """Mistral's window, the same in every layer. Llama has none, whatever its configuration says of one."""
    default = 4096 if fields.text("model_type") == "mistral" else None
    given = fields.values.get("sliding_window", default)
    window = None if given is None else fields.count("sliding_window", default)
    if fields.text("model_type") == "llama" and window is not None:
        raise fields.refuse("sliding_window", f"is {window}, but llama models have no window (mistral models do)")
    if window is not None and not fields.flag("use_sliding_window", True):
        raise fields.refuse("use_sliding_window", f"is false, but sliding_window is {window}")
    expected = "full_attention" if window is None else "sliding_attention"
    fields.only("layer_types", [expected] * layers)
    return window


def bind(binder: Binder, config: ModelConfig, index: int) -> Layer:
    """The weights of one layer."""
    return bind_layer(binder, config, index)


def layer_forward(ops: Ops[Any], x: Any, layer: Layer, model: Model) -> Any:
    """Pre-norm attention with rope, then a gated MLP, each added to the stream."""
    eps, head_dim = model.config.rms_eps, model.config.head_dim
    inner = ops.rms_norm(x, layer.input_norm, eps)
    q = ops.rope(ops.linear(inner, layer.q, layer.q_bias), model.rope, head_dim)
    k = ops.rope(ops.linear(inner, layer.k, layer.k_bias), model.rope, head_dim)
    v = ops.linear(inner, layer.v, layer.v_bias)
    attended = ops.attention(q, k, v, layer.attention)
    x = ops.add(x, ops.linear(attended, layer.o, layer.o_bias))
    inner = ops.rms_norm(x, layer.post_norm, eps)
    gate = ops.linear(inner, layer.gate, layer.gate_bias)
    up = ops.linear(inner, layer.up, layer.up_bias)
    return ops.add(x, ops.linear(ops.silu_mul(gate, up), layer.down, layer.down_bias))
