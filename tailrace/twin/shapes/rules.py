"""Rules that read parts of a model from its configuration: what the families of `families` are declared in.

A rule is told which fields hold a size, and what the architecture's own code takes where a file leaves one out. It is
called with the reader, the layer and the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from tailrace.twin.shapes.parts import Attention, Dense, Experts, Feed, Index, Latent, Mixer
from tailrace.twin.shapes.reading import Reader

HIDDEN, LAYERS, HEADS, KV_HEADS = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"

Switch = bool | str
"""True, false, or the field that says so (false where it is absent; "field=true": true where it is absent)."""

Size = int | str
"""A number, or the field that holds it ("field=8": 8 where it is absent)."""


def switched(reader: Reader, switch: Switch) -> bool:
    if isinstance(switch, bool):
        return switch
    field, _, default = switch.partition("=")
    return reader.flag(field, default == "true")


def sized(reader: Reader, size: Size, layer: int = 0, layers: int = 1) -> int:
    """A size that may be zero, or a list of one a layer."""
    if isinstance(size, int):
        return size
    field, _, default = size.partition("=")
    return reader.at(field, layer, layers, int(default) if default else None)


class MixerRule(Protocol):
    def __call__(self, reader: Reader, layer: int, layers: int) -> Mixer: ...


class FeedRule(Protocol):
    def __call__(self, reader: Reader, layer: int, layers: int) -> Feed: ...


Kinds = Callable[[Reader, int], list[str]]
"""What kind each layer is."""

PER_HEAD, WHOLE = "one head", "all heads"
"""Norms on queries and keys: of a head, the same for all, or of all heads together."""


@dataclass(frozen=True)
class Grouped:
    """Attention whose heads share keys. `head_dim` declared in its field beats width over heads; a number is what the
    architecture takes where the field is absent, None the quotient. `qk_norm` as above, if `normed`."""

    heads: Size = HEADS
    kv_heads: Size = KV_HEADS
    kv_default: str = "heads"
    head: str = "head_dim"
    head_dim: int | None = None
    value: str = ""
    bias: Switch = "attention_bias"
    o_bias: Switch = "attention_bias"
    qk_norm: str = ""
    normed: Switch = True
    norm_bias: bool = False
    window: str = ""
    windowed: Switch = True
    chunk: str = ""
    gate: str = ""
    """"wide": as much again as the queries; "heads": a value a head."""
    gated: Switch = True
    sinks: Switch = False
    keyed: Switch = False
    index: Callable[[Reader, int, int], Index | None] | None = None

    def __call__(self, reader: Reader, layer: int, layers: int) -> Attention:
        heads = sized(reader, self.heads, layer, layers)
        kv_heads = self._kv_heads(reader, heads, layer, layers)
        key = self._head_dim(reader, heads, layer, layers)
        value = self._value(reader, key, layer, layers)
        if kv_heads == 0 or heads % kv_heads:
            raise reader.refuse(str(self.heads), f"is {heads}, not a multiple of {kv_heads} KV heads")
        bias = switched(reader, self.bias)
        normed = bool(self.qk_norm) and switched(reader, self.normed)
        each = (1 + self.norm_bias) * key * normed
        wide = self.qk_norm == WHOLE
        gate = {"": 0, "wide": heads * value, "heads": heads}[self.gate] if switched(reader, self.gated) else 0
        slides = bool(self.window) and reader.raw(self.window) is not None and switched(reader, self.windowed)
        return Attention(
            heads, kv_heads, key, value,
            window=reader.count(self.window) if slides else None,
            chunk=reader.count(self.chunk) if self.chunk else None,
            q_bias=bias, kv_bias=bias, o_bias=switched(reader, self.o_bias),
            norm_q=each * (heads if wide else 1), norm_k=each * (kv_heads if wide else 1),
            gate=gate,
            sinks=heads if switched(reader, self.sinks) else 0,
            keyed=switched(reader, self.keyed),
            index=self.index(reader, layer, layers) if self.index else None,
        )  # fmt: skip

    def _kv_heads(self, reader: Reader, heads: int, layer: int, layers: int) -> int:
        if isinstance(self.kv_heads, str) and "=" not in self.kv_heads and reader.raw(self.kv_heads) is None:
            if self.kv_default != "heads":
                return sized(reader, f"{self.kv_heads}={self.kv_default}", layer, layers)
            return reader.take(self.kv_heads, heads)
        return sized(reader, self.kv_heads, layer, layers)

    def _value(self, reader: Reader, key: int, layer: int, layers: int) -> int:
        """Values are as wide as keys unless a field says otherwise."""
        if not self.value:
            return key
        if reader.raw(self.value) is None:
            return reader.take(self.value, key)
        return sized(reader, self.value, layer, layers)

    def _head_dim(self, reader: Reader, heads: int, layer: int, layers: int) -> int:
        if reader.raw(self.head) is None and self.head_dim is None:
            hidden = reader.count(HIDDEN)
            if hidden % heads:
                raise reader.refuse(HIDDEN, f"is {hidden}, not a multiple of {heads} heads, and {self.head} is missing")
            return reader.take(self.head, hidden // heads)
        return reader.at(self.head, layer, layers, self.head_dim)

    def but(self, **changes: object) -> Grouped:
        """The same, but for these."""
        return replace(self, **changes)  # type: ignore[arg-type] # names are checked where families are made


@dataclass(frozen=True)
class Latents:
    """Multi-head latent attention, with DeepSeek's fields."""

    index: Callable[[Reader, int, int], Index | None] | None = None
    gated: Switch = False

    def __call__(self, reader: Reader, layer: int, layers: int) -> Latent:
        heads, value = reader.count(HEADS), reader.count("v_head_dim")
        reader.pass_over(KV_HEADS, "head_dim", "qk_head_dim")  # of the heads that the latent is unfolded to
        return Latent(
            heads,
            None if reader.raw("q_lora_rank") is None else reader.count("q_lora_rank"),
            reader.count("kv_lora_rank"),
            reader.count("qk_nope_head_dim"),
            reader.count("qk_rope_head_dim"),
            value,
            bias=reader.flag("attention_bias", False),
            gate=heads * value if switched(reader, self.gated) else 0,
            index=self.index(reader, layer, layers) if self.index else None,
        )


def sparse_index(reader: Reader, layer: int, layers: int) -> Index | None:
    """DeepSeek's indexer (V3.2). Its keys are kept in FP8 with a scale in float32 for each 128 values, whatever the KV
    is kept as. Layers that `indexer_types` calls shared use the choice of the last full one, and have none."""
    kinds = reader.listed("indexer_types", layers)
    heads, dim = reader.count("index_n_heads"), reader.count("index_head_dim")
    if kinds is not None and kinds[layer] not in ("full", "shared"):
        raise reader.refuse("indexer_types", f"has {str(kinds[layer])[:40]}; known are full and shared")
    if kinds is not None and kinds[layer] == "shared":
        return None
    return Index(heads, dim, reader.count("q_lora_rank"), dim + 4 * -(-dim // 128), norms=2 * dim)


@dataclass(frozen=True)
class Gated:
    """A dense feed-forward."""

    width: str = "intermediate_size"
    gated: bool = True
    bias: Switch = "mlp_bias"
    times: int = 1

    def __call__(self, reader: Reader, layer: int, layers: int) -> Dense:
        width = sized(reader, self.width, layer, layers)
        return Dense(width * self.times, self.gated, switched(reader, self.bias))


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts. `shared` is the width of what all tokens use, where that has a field, and `shared_count`
    the field that says how many of an expert's width it has."""

    experts: Size = "num_experts|num_local_experts|n_routed_experts"
    used: Size = "num_experts_per_tok"
    width: Size = "moe_intermediate_size"
    gated: bool = True
    bias: Switch = False
    shared: str = ""
    shared_count: str = ""
    shared_gate: bool = False
    router_bias: Switch = False
    correction: Switch = False
    fitted: bool = False
    shared_bias: Switch = False
    latent: str = ""
    latent_norm: Switch = False
    empty: str = ""
    beside: FeedRule | None = None
    router_extra: Callable[[Reader, int], int] | None = None
    name: str = "mlp."

    def __call__(self, reader: Reader, layer: int, layers: int) -> Experts:
        count, used = sized(reader, self.experts, layer, layers), sized(reader, self.used, layer, layers)
        width = sized(reader, self.width, layer, layers)
        if not 0 < used <= count:
            raise reader.refuse(str(self.used), f"is {used}, of {count} experts")
        groups = reader.raw("n_group")
        if isinstance(groups, int) and groups > 1 and count % groups:
            raise reader.refuse("n_group", f"is {groups}, which does not divide {count} experts")
        latent = sized(reader, f"{self.latent}=0") if self.latent else 0
        beside = self.beside(reader, layer, layers) if self.beside else None
        return Experts(
            count, used, width, self.gated, switched(reader, self.bias),
            shared=self._shared(reader, width, layer, layers), shared_gated=self.gated, shared_gate=self.shared_gate,
            fitted=self.fitted, shared_bias=switched(reader, self.shared_bias),
            router_bias=switched(reader, self.router_bias), correction=switched(reader, self.correction),
            latent=latent, latent_norm=latent if latent and switched(reader, self.latent_norm) else 0,
            empty=sized(reader, f"{self.empty}=0") if self.empty else 0,
            beside=beside if isinstance(beside, Dense) else None,
            router_extra=self.router_extra(reader, count) if self.router_extra else 0, name=self.name,
        )  # fmt: skip

    def _shared(self, reader: Reader, width: int, layer: int, layers: int) -> int:
        """The width of what every token uses."""
        count = sized(reader, f"{self.shared_count}=0", layer, layers) if self.shared_count else 1
        if not self.shared:
            return count * width if self.shared_count else 0
        return count * sized(reader, f"{self.shared}=0")


def same(kind: str) -> Kinds:
    """All layers are one kind."""
    return lambda reader, layers: [kind] * layers


def named(field: str, otherwise: Kinds, names: Mapping[str, str] | None = None) -> Kinds:
    """Each layer has a name in a list (or a letter in a text), which `names` translates."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        found = reader.raw(field)
        if found is None:
            return otherwise(reader, layers)
        reader.assumed.pop(field, None)
        given = list(found) if isinstance(found, str) else reader.listed(field, layers) or []
        if len(given) < layers:
            raise reader.refuse(field, f"has {len(given)} entries, but there are {layers} layers")
        unknown = sorted({str(one) for one in given[:layers] if names is not None and str(one) not in names})
        if unknown:
            raise reader.refuse(field, f"has {', '.join(unknown)[:60]}; known are {', '.join(names or ())}")
        return [names[str(one)] if names else str(one) for one in given[:layers]]

    return kinds


def every(field: Size, kind: str, other: str, first: int = -1) -> Kinds:
    """One of so many layers is `kind`, the last of each group (`first` -1) or that one of it."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        step = sized(reader, field) if isinstance(field, int) or "=" in field else reader.count(field)
        return [kind if step and layer % step == first % step else other for layer in range(layers)]

    return kinds


def after(field: Size, kind: str = "sparse", first: str = "dense") -> Kinds:
    """The first so many layers are another kind."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        count = min(sized(reader, field), layers)
        return [first] * count + [kind] * (layers - count)

    return kinds


def sparse_step(reader: Reader, layers: int) -> list[str]:
    """Qwen's: one of `decoder_sparse_step` layers, less `mlp_only_layers`."""
    step = reader.count("decoder_sparse_step", 1)
    dense = reader.raw("mlp_only_layers", [])
    return ["sparse" if layer not in dense and (layer + 1) % step == 0 else "dense" for layer in range(layers)]


def moe_frequency(reader: Reader, layers: int) -> list[str]:
    """DeepSeek's: from `first_k_dense_replace` on, one of `moe_layer_freq`; or that is a list of 0 and 1."""
    found = reader.raw("mlp_layer_types")
    if found is not None:
        reader.pass_over("moe_layer_freq", "first_k_dense_replace")  # which are in the list
        return named("mlp_layer_types", same("sparse"), {"dense": "dense", "sparse": "sparse"})(reader, layers)
    frequency = reader.raw("moe_layer_freq", 1)
    if isinstance(frequency, list):
        given = reader.listed("moe_layer_freq", layers) or []
        return ["sparse" if one else "dense" for one in given]
    dense, step = reader.size("first_k_dense_replace", 0), reader.count("moe_layer_freq", 1)
    return ["sparse" if layer >= dense and layer % step == 0 else "dense" for layer in range(layers)]


def windows(otherwise: Kinds | None = None) -> Kinds:
    """`layer_types`, else Qwen's rule: the last layers from `max_window_layers` on slide, if any does."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        if reader.raw("layer_types") is not None or otherwise is not None:
            reader.pass_over("max_window_layers", "use_sliding_window", "sliding_window")  # which is in the list
            names = {
                one: one for one in ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
            }
            return named("layer_types", otherwise or same("full_attention"), names)(reader, layers)
        slides = reader.flag("use_sliding_window", False) and reader.raw("sliding_window") is not None
        full = reader.size("max_window_layers", layers) if slides else layers
        reader.pass_over("max_window_layers", "sliding_window")
        return ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]

    return kinds
