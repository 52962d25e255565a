"""What the decoder architectures share: a model's shape, the binding of its weights, the frame around the layers.

An architecture's own file says what its configuration means, which tensors a layer has, and what a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.backends import Attention, Ops, Rope, T, Weight
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.fields import Fields
from tailrace.models.rope import ROPE_FACTORS, RopeConfig
from tailrace.terms import ModelError


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `windows` has one entry a layer (None is full attention). `max_context` is what the model
    serves by itself, `extended_context` the most that may be asked for (see `RopeConfig.contexts`)."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    extended_context: int
    rms_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tied: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """What each layer's attention is."""
        scale = self.head_dim**-0.5
        return tuple(
            Attention(index, self.heads, self.kv_heads, self.head_dim, scale, window)
            for index, window in enumerate(self.windows)
        )

    @property
    def window(self) -> int | None:
        """The smallest window of any layer, None when all attend in full."""
        return min((window for window in self.windows if window is not None), default=None)


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer's weights, in the order in which they are used. What an architecture does not have is None."""

    attention: Attention
    input_norm: Weight
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    post_norm: Weight
    gate: Weight
    up: Weight
    down: Weight
    q_bias: Weight | None = None
    k_bias: Weight | None = None
    v_bias: Weight | None = None
    o_bias: Weight | None = None
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    gate_bias: Weight | None = None
    up_bias: Weight | None = None
    down_bias: Weight | None = None

    def weights(self) -> Iterator[Weight]:
        """All that it has, in a fixed order."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Weight):
                yield value


LayerForward = Callable[[Ops[Any], Any, Layer, "Model"], Any]
"""ops, x [tokens, hidden], the layer, the model; gives x after the layer."""


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder ready to run: `backends.Forward`."""

    config: ModelConfig
    rope: Rope
    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Weight
    head: Weight
    layer_forward: LayerForward
    variant: str = ""
    """What was done to the weights since they were read (see `quantise`), as a word for names and identities."""

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(layer.attention for layer in self.layers)

    @property
    def hidden(self) -> int:
        return self.config.hidden

    @property
    def vocab(self) -> int:
        return self.config.vocab

    def forward(self, ops: Ops[T]) -> T:
        """Logits of the wanted rows: [wanted, vocab]."""
        x = ops.embed(self.embedding)
        for layer in self.layers:
            x = self.layer_forward(ops, x, layer, self)
        x = ops.rms_norm(ops.wanted(x), self.norm, self.config.rms_eps)
        return ops.linear(x, self.head)

    def weights(self) -> Iterator[Weight]:
        """Every weight once, in a fixed order: embedding, layers, norm, and the head where it is not the embedding."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.weights()
        yield self.norm
        if not self.config.tied:
            yield self.head


class Binder:
    """Takes weights from a checkpoint by name, checks their shapes, and knows which nobody took."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._left = set(checkpoint.tensors)

    def take(self, name: str, *shape: int) -> Weight:
        """The weight of this name and shape. Raises ModelError when it is missing or has another shape."""
        found = self.checkpoint.tensors.get(name)
        if found is None:
            raise ModelError(f"{self.checkpoint.path}: tensor {name} is missing")
        if found.shape != shape:
            raise ModelError(
                f"{self.checkpoint.path}: tensor {name} has the shape {list(found.shape)}; the configuration says "
                f"{list(shape)}"
            )
        self._left.discard(name)
        return found

    def take_if(self, wanted: bool, name: str, *shape: int) -> Weight | None:
        return self.take(name, *shape) if wanted else None

    def head(self, config: ModelConfig, embedding: Weight) -> Weight:
        """The output head: its own tensor, or the embedding where the configuration ties them. A tied model may store
        the head as well, if it is the same."""
        name = "lm_head.weight"
        if not config.tied:
            if name not in self.checkpoint.tensors:
                raise ModelError(
                    f"{self.checkpoint.path}: tensor {name} is missing, and tie_word_embeddings does not say that the "
                    "embedding is the output head too"
                )
            return self.take(name, config.vocab, config.hidden)
        if name in self.checkpoint.tensors:
            head = self.take(name, config.vocab, config.hidden)
            if head.format != embedding.format or not np.array_equal(head.data, embedding.data):
                raise ModelError(
                    f"{self.checkpoint.path}: tie_word_embeddings is true, but tensor {name} differs from "
                    "model.embed_tokens.weight"
                )
        return embedding

    def finish(self, unused: tuple[str, ...] = ()) -> None:
        """Raises ModelError for a tensor that nobody took, since ignoring it might change the numbers. Tables that
        follow from the configuration are the exception, and names that begin as one of `unused`."""
        for name in sorted(self._left):
            if not name.startswith(unused) and not name.endswith("rotary_emb.inv_freq") and name != ROPE_FACTORS:
                raise ModelError(f"{self.checkpoint.path}: tensor {name} is not one that {self._kind} models have")

    @property
    def _kind(self) -> str:
        return str(self.checkpoint.config.get("model_type"))


def bind_layer(binder: Binder, config: ModelConfig, index: int, *, head_norms: bool = False) -> Layer:
    """The weights of one layer under Hugging Face's names."""
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden, config.intermediate
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    take, take_if = binder.take, binder.take_if
    attention_bias, output_bias, mlp_bias = config.attention_bias, config.output_bias, config.mlp_bias
    return Layer(
        config.attentions[index],
        input_norm=take(prefix + "input_layernorm.weight", hidden),
        q=take(prefix + "self_attn.q_proj.weight", q_width, hidden),
        k=take(prefix + "self_attn.k_proj.weight", kv_width, hidden),
        v=take(prefix + "self_attn.v_proj.weight", kv_width, hidden),
        o=take(prefix + "self_attn.o_proj.weight", hidden, q_width),
        post_norm=take(prefix + "post_attention_layernorm.weight", hidden),
        gate=take(prefix + "mlp.gate_proj.weight", inner, hidden),
        up=take(prefix + "mlp.up_proj.weight", inner, hidden),
        down=take(prefix + "mlp.down_proj.weight", hidden, inner),
        q_bias=take_if(attention_bias, prefix + "self_attn.q_proj.bias", q_width),
        k_bias=take_if(attention_bias, prefix + "self_attn.k_proj.bias", kv_width),
        v_bias=take_if(attention_bias, prefix + "self_attn.v_proj.bias", kv_width),
        o_bias=take_if(output_bias, prefix + "self_attn.o_proj.bias", hidden),
        q_norm=take_if(head_norms, prefix + "self_attn.q_norm.weight", config.head_dim),
        k_norm=take_if(head_norms, prefix + "self_attn.k_norm.weight", config.head_dim),
        gate_bias=take_if(mlp_bias, prefix + "mlp.gate_proj.bias", inner),
        up_bias=take_if(mlp_bias, prefix + "mlp.up_proj.bias", inner),
        down_bias=take_if(mlp_bias, prefix + "mlp.down_proj.bias", hidden),
    )


MAX_LAYERS = 4096
"""More than any model has; what is larger is a damaged configuration."""

FOREIGN = (
    *("quantization_config", "compression_config", "vision_config", "audio_config", "text_config", "num_experts"),
    *(
        "num_local_experts",
        "n_routed_experts",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "attn_logit_softcapping",
    ),
    *("final_logit_softcapping", "query_pre_attn_scalar", "logit_scale", "logits_scaling", "embedding_multiplier"),
    *("residual_multiplier", "attention_multiplier", "clip_qkv", "use_qk_norm", "qk_layernorm", "attention_chunk_size"),
    *("no_rope_layers", "no_rope_layer_interval", "dual_chunk_attention_config", "alibi", "kv_lora_rank"),
    *("is_encoder_decoder", "add_cross_attention", "per_layer_config", "use_bidirectional_attention", "block_configs"),
    *(
        "scale_emb",
        "scale_depth",
        "dim_model_base",
        "embedding_scale",
        "residual_scale",
        "attention_scale",
        "softmax_scale",
    ),
    *("rope_interleave", "rope_interleaved", "rope_local_base_freq", "mrope_section", "sink_tokens", "use_mup"),
)
"""Fields of other models. Set here, they would change the numbers in a way that these architectures do not know."""


def check_common(fields: Fields, classes: tuple[str, ...]) -> None:
    """Refuses what no decoder here does: another activation, quantised weights, experts, images, code of its own."""
    fields.only("hidden_act", "silu", "swish")
    fields.absent(FOREIGN)
    fields.only("is_causal", True)
    fields.only("position_embedding_type", "rotary", "rope")
    architectures = fields.values.get("architectures")
    if architectures and (not isinstance(architectures, list) or not set(map(str, architectures)) <= set(classes)):
        raise fields.refuse("architectures", f"is {architectures!r}; expected {' or '.join(classes)}")
    own_code = fields.values.get("auto_map")
    if isinstance(own_code, dict) and "AutoModelForCausalLM" in own_code:
        raise fields.refuse("auto_map", "says that the model needs code of its own, which is never run")


def head_dim_of(fields: Fields, hidden: int, heads: int, default: int | None = None) -> int:
    """The declared head_dim, or hidden / heads. Raises ModelError when that is not whole, or odd."""
    if not fields.has("head_dim") and default is None and hidden % heads:
        raise fields.refuse("hidden_size", f"is {hidden}, not a multiple of num_attention_heads, {heads}")
    head_dim = fields.count("head_dim", default or hidden // heads)
    if head_dim % 2 or head_dim < 4:
        raise fields.refuse("head_dim", f"is {head_dim}; expected an even number of at least 4")
    return head_dim


def layers_of(fields: Fields) -> int:
    """The declared number of layers."""
    return fields.count("num_hidden_layers", most=MAX_LAYERS)


def kv_heads_of(fields: Fields, heads: int, default: int | None = None) -> int:
    """The declared number of key-value heads. When the field is null it is that of the heads, when it is absent it is
    the architecture's own default (None: that of the heads too). Raises ModelError when it does not divide them."""
    absent = "num_key_value_heads" not in fields.values
    kv_heads = fields.count("num_key_value_heads", default if absent and default else heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} heads")
    return kv_heads


def qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Each layer's window as Qwen writes it: `layer_types`, or every layer from `max_window_layers` on, and only if
    `use_sliding_window`."""
    used = fields.flag("use_sliding_window", False)
    window = fields.count("sliding_window", 4096) if used else None
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.values.get("max_window_layers", 28) if used else 0
        if type(first) is not int or first < 0:
            raise fields.refuse("max_window_layers", f"is {first!r}; expected a whole number")
        return tuple(window if index >= first else None for index in range(layers))
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in map(str, types)):
        raise fields.refuse("layer_types", f"must name full_attention or sliding_attention for each of {layers} layers")
    if window is None and "sliding_attention" in types:
        raise fields.refuse("layer_types", "names sliding_attention, but use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
