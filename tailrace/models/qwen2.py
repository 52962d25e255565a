"""Qwen 2 and 2.5: Llama's layers with biases on q, k and v, and a window in the later layers if it is switched on."""

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

CLASSES = ("Qwen2ForCausalLM",)


def configure(fields: Fields) -> ModelConfig:
    """The shape that the configuration describes. Raises ModelError for what is missing, wrong or not supported."""
    check_common(fields, CLASSES)
    fields.only("attention_bias", True)
    fields.only("mlp_bias", False)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = layers_of(fields)
    trained = fields.count("max_position_embeddings", 32768)
    rope = read_rope(fields, trained)
    max_context, extended_context = rope.contexts(trained)
    return ModelConfig(
        model_type="qwen2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads_of(fields, heads, default=32),
        head_dim=head_dim_of(fields, hidden, heads),
        intermediate=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        max_context=max_context,
        extended_context=extended_context,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=qwen_windows(fields, layers),
        tied=fields.flag("tie_word_embeddings", False),
        attention_bias=True,
    )


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
    x = ops.add(x, ops.linear(attended, layer.o))
    inner = ops.rms_norm(x, layer.post_norm, eps)
    hidden = ops.silu_mul(ops.linear(inner, layer.gate), ops.linear(inner, layer.up))
    return ops.add(x, ops.linear(hidden, layer.down))
