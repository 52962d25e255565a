"""Rules that read parts of a model from its configuration: what the families of `families` are declared in.

A rule is told which fields hold a size, and what the architecture's own code takes where a file leaves one out. It is
called with the reader, the layer and the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
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
