"""Qwen 3 (dense): each head's query and key are normalised before the rope; head_dim is declared apart."""

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
    qwen_windows,
)
from tailrace.models.fields import Fields
from tailrace.models.rope import read_rope

CLASSES = ("Qwen3ForCausalLM",)


def configure(fields: Fields) -> ModelConfig:
    """The shape that the configuration describes. Raises ModelError for what is missing, wrong or not supported."""
    check_common(fields, CLASSES)
    fields.only("mlp_bias", False)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = layers_of(fields)
    trained = fields.count("max_position_embeddings", 32768)
    rope = read_rope(fields, trained)
    max_context, extended_context = rope.contexts(trained)
    biased = fields.flag("attention_bias", False)
    return ModelConfig(
        model_type="qwen3",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads_of(fields, heads, default=32),
        head_dim=head_dim_of(fields, hidden, heads, default=128),
        intermediate=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        max_context=max_context,
        extended_context=extended_context,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=qwen_windows(fields, layers),
        tied=fields.flag("tie_word_embeddings", False),
        attention_bias=biased,
        output_bias=biased,
    )


def bind(binder: Binder, config: ModelConfig, index: int) -> Layer:
    """The weights of one layer."""
    return bind_layer(binder, config, index, head_norms=True)


def layer_forward(ops: Ops[Any], x: Any, layer: Layer, model: Model) -> Any:
    """Pre-norm attention with head norms and rope, then a gated MLP, each added to the stream."""
    eps, head_dim = model.config.rms_eps, model.config.head_dim
    assert layer.q_norm is not None  # `bind` takes it
    assert layer.k_norm is not None
    inner = ops.rms_norm(x, layer.input_norm, eps)
    q = ops.head_norm(ops.linear(inner, layer.q, layer.q_bias), layer.q_norm, eps)
    k = ops.head_norm(ops.linear(inner, layer.k, layer.k_bias), layer.k_norm, eps)
    v = ops.linear(inner, layer.v, layer.v_bias)
    q, k = ops.rope(q, model.rope, head_dim), ops.rope(k, model.rope, head_dim)
    attended = ops.attention(q, k, v, layer.attention)
    x = ops.add(x, ops.linear(attended, layer.o, layer.o_bias))
    inner = ops.rms_norm(x, layer.post_norm, eps)
    hidden = ops.silu_mul(ops.linear(inner, layer.gate), ops.linear(inner, layer.up))
    return ops.add(x, ops.linear(hidden, layer.down))
