"""Families with parts that no other has: Gemma 3n and 4, DeepSeek V4, Nemotron NAS, LongCat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tailrace.twin.shapes.caches import Cache, CacheKind
from tailrace.twin.shapes.families.dense import FULL, SLIDING
from tailrace.twin.shapes.family import Family
from tailrace.twin.shapes.kinds import every, named, same, windows
from tailrace.twin.shapes.parts import Attention, Dense, Experts, Feed, Index
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import PER_HEAD, Gated, Grouped, Latents, Mixture
from tailrace.twin.shapes.tensors import Part, Split, Tensor, vector

# Gemma 4

GEMMA4 = Grouped(head_dim=256, qk_norm=PER_HEAD)


def _borrows(reader: Reader, layer: int, layers: int) -> bool:
    """Whether a layer reads the keys and values of an earlier one of its kind: the last so many do."""
    shared = reader.size("num_kv_shared_layers", 0)
    return bool(shared) and layer >= layers - shared


def _gemma4_sliding(reader: Reader, layer: int, layers: int) -> Attention:
    made = GEMMA4.but(window="sliding_window")(reader, layer, layers)
    return replace(made, borrows=_borrows(reader, layer, layers))


def _gemma4_full(reader: Reader, layer: int, layers: int) -> Attention:
    """Layers that look at all have heads of another size, and where values are made of keys, another number of them."""
    rule = GEMMA4.but(keyed="attention_k_eq_v")
    if reader.raw("per_layer_config") is None:
        rule = rule.but(head="global_head_dim", head_dim=512)
    if reader.flag("attention_k_eq_v", False) and reader.raw("num_global_key_value_heads") is not None:
        rule = rule.but(kv_heads="num_global_key_value_heads")
    reader.pass_over("num_global_key_value_heads")
    return replace(rule(reader, layer, layers), borrows=_borrows(reader, layer, layers))


def _gemma4_feed(reader: Reader, layer: int, layers: int) -> Feed:
    """A dense feed-forward, and beside it experts where there are any."""
    wide = 2 if reader.flag("use_double_wide_mlp", False) and _borrows(reader, layer, layers) else 1
    dense = Gated(bias=False, times=wide)
    if not reader.flag("enable_moe_block", False):
        reader.pass_over("num_experts", "top_k_experts", "moe_intermediate_size")
        return dense(reader, layer, layers)
    extra = reader.count("hidden_size") + reader.count("num_experts")
    mixture = Mixture("num_experts", "top_k_experts", beside=dense, router_extra=lambda _, __: extra, name="")
    return mixture(reader, layer, layers)


def _gemma4_more(reader: Reader, layer: int, layers: int, kind: str) -> tuple[Tensor, ...]:
    """Embeddings of its own for each layer; three more norms where there are experts; a scale."""
    made = [replace(vector(Part.OTHER, "layer_scalar", 1), buffer=True)]
    if reader.flag("enable_moe_block", False):
        made.append(vector(Part.NORM, "experts.norms", 3 * reader.count("hidden_size")))
    return (*made, *_per_layer(reader))


def _per_layer(reader: Reader) -> tuple[Tensor, ...]:
    inner, hidden = reader.size("hidden_size_per_layer_input", 256), reader.count("hidden_size")
    if not inner:
        return ()
    return (
        Tensor(Part.OTHER, "per_layer_input_gate", inner, hidden),
        Tensor(Part.OTHER, "per_layer_projection", hidden, inner),
        vector(Part.NORM, "post_per_layer_input_norm", hidden),
    )


def _per_layer_top(reader: Reader, hidden: int) -> tuple[Tensor, ...]:
    inner, layers = reader.size("hidden_size_per_layer_input", 256), reader.count("num_hidden_layers")
    vocab = reader.count("vocab_size_per_layer_input", 262144)
    if not inner:
        return ()
    return (
        Tensor(Part.OTHER, "embed_tokens_per_layer", vocab, layers * inner, Split.VOCAB, rounded=False, looked_up=True),
        Tensor(Part.OTHER, "per_layer_model_projection", layers * inner, hidden),
        vector(Part.NORM, "per_layer_projection_norm", inner),
    )


# DeepSeek V4

RATIOS = {0: SLIDING, 4: "sparse", 128: "heavy"}
"""Tokens that one entry of a layer's compressed cache stands for, and the kind of layer that it makes."""

V4_NAMES = {
    SLIDING: SLIDING, "compressed_sparse_attention": "sparse", "heavily_compressed_attention": "heavy",
}  # fmt: skip


@dataclass(frozen=True)
class Compressed:
    """DeepSeek V4's attention: one head of keys that are values too, of the last `window` tokens, and entries that
    stand for `every` tokens each; the output goes through groups of low rank. `index` chooses entries."""

    heads: int
    head: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    every: int = 0
    overlap: int = 1
    index: Index | None = None

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        part, wide = Part.ATTENTION, self.heads * self.head
        yield Tensor(part, "self_attn.q_a_proj", self.q_rank, hidden)
        yield Tensor(part, "self_attn.q_b_proj", wide, self.q_rank, Split.ROWS, units=self.heads)
        yield Tensor(part, "self_attn.kv_proj", self.head, hidden)
        inner = self.o_groups * self.o_rank
        yield Tensor(part, "self_attn.o_a_proj", inner, wide // self.o_groups, Split.ROWS, units=self.o_groups)
        yield Tensor(part, "self_attn.o_b_proj", hidden, inner, Split.COLUMNS, units=self.o_groups)
        yield vector(part, "self_attn.norms", self.q_rank + self.head)
        yield vector(part, "self_attn.sinks", self.heads, Split.ROWS, self.heads)
        if self.every:
            yield from self._compressor("self_attn.compressor", self.head, hidden)
        if self.index:
            yield Tensor(Part.INDEXER, "self_attn.indexer.wq_b", self.index.heads * self.index.dim, self.q_rank)
            yield Tensor(Part.INDEXER, "self_attn.indexer.weights_proj", self.index.heads, hidden, rounded=False)
            yield from self._compressor("self_attn.indexer.compressor", self.index.dim, hidden)

    def _compressor(self, name: str, size: int, hidden: int) -> Iterator[Tensor]:
        """Projections to entries and their gates, a bias for each place in a group, and a norm."""
        for kind in ("kv_proj", "gate_proj"):
            yield Tensor(Part.ATTENTION, f"{name}.{kind}", self.overlap * size, hidden)
        yield vector(Part.ATTENTION, f"{name}.position_bias", self.every * self.overlap * size)
        yield vector(Part.ATTENTION, f"{name}.kv_norm", size)

    def caches(self) -> tuple[Cache, ...]:
        made = [Cache(CacheKind.SLIDING, 0, self.head, self.window)]
        if self.every:
            made.append(Cache(CacheKind.COMPRESSED, 0, self.head, every=self.every))
        if self.index:
            made.append(self.index.cache())
        return tuple(made)


@dataclass(frozen=True)
class CompressedRule:
    """Reads `Compressed`. `rates`: the key of `compress_rates` that says how many tokens an entry stands for."""

    every: int = 0
    overlap: int = 1
    rates: str = ""
    indexed: bool = False

    def __call__(self, reader: Reader, layer: int, layers: int) -> Compressed:
        rates: dict[str, Any] = reader.raw("compress_rates", {})
        step = rates.get(self.rates, self.every)
        index = None
        reader.pass_over("index_n_heads", "index_head_dim", "num_key_value_heads", "qk_rope_head_dim")
        if self.indexed:
            dim = reader.count("index_head_dim")
            index = Index(reader.count("index_n_heads"), dim, key_bytes=dim + 4 * -(-dim // 128), every=step)
        return Compressed(
            reader.count("num_attention_heads"), reader.count("head_dim"), reader.count("q_lora_rank"),
            reader.count("o_lora_rank"), reader.count("o_groups"), reader.count("sliding_window"), step, self.overlap,
            index,
        )  # fmt: skip


def _v4_mixers(reader: Reader, layers: int) -> list[str]:
    ratios = reader.listed("compress_ratios", layers)
    if ratios is None:
        otherwise = ["heavy" if layer < 2 or layer % 2 else "sparse" for layer in range(layers)]
        return named("layer_types", lambda _, __: otherwise, V4_NAMES)(reader, layers)
    if unknown := sorted({str(one) for one in ratios if one not in RATIOS}):
        raise reader.refuse("compress_ratios", f"has {', '.join(unknown)[:60]}; known are 0, 4 and 128")
    return [RATIOS[one] for one in ratios]


def _streams(reader: Reader, layer: int, layers: int, kind: str) -> tuple[Tensor, ...]:
    """Weights that mix the streams of the residual, before attention and before the experts; and, in the first layers,
    a table that says which experts a token uses."""
    count, hidden = reader.count("hc_mult"), reader.count("hidden_size")
    mixed = (2 + count) * count
    made = [Tensor(Part.OTHER, f"{name}.fn", mixed, count * hidden, rounded=False) for name in ("attn_hc", "ffn_hc")]
    return (*made, vector(Part.OTHER, "hc.base", 2 * (mixed + 3)))


def _streams_top(reader: Reader, hidden: int) -> tuple[Tensor, ...]:
    count = reader.count("hc_mult")
    return (
        Tensor(Part.OTHER, "hc_head.fn", count, count * hidden, rounded=False),
        vector(Part.OTHER, "hc_head", count + 1),
    )


# Nemotron NAS


def _block(reader: Reader, layer: int, layers: int, part: str) -> dict[str, Any]:
    """What is said of one part of a layer, which must be of a kind that is known here."""
    blocks = reader.listed("block_configs", layers)
    if blocks is None:
        raise reader.refuse("block_configs", "is missing")
    said: dict[str, Any] = blocks[layer].get(part) or {}
    known = {"n_heads_in_group", "no_op", "ffn_mult"}
    odd = [name for name, value in said.items() if name not in known and value]
    if odd:
        raise reader.refuse("block_configs", f"has {', '.join(odd)[:80]} for layer {layer}, which is not understood")
    return said


def _nas_mixers(reader: Reader, layers: int) -> list[str]:
    return ["none" if _block(reader, n, layers, "attention").get("no_op") else FULL for n in range(layers)]


def _nas_feeds(reader: Reader, layers: int) -> list[str]:
    return ["none" if _block(reader, n, layers, "ffn").get("no_op") else "dense" for n in range(layers)]


def _nas_attention(reader: Reader, layer: int, layers: int) -> Attention:
    group = _block(reader, layer, layers, "attention")["n_heads_in_group"]
    return Grouped(kv_heads=reader.count("num_attention_heads") // group)(reader, layer, layers)


def _nas_feed(reader: Reader, layer: int, layers: int) -> Dense:
    """Two thirds of a multiple of the width, rounded up to 256: the rule of Llama 1 that Nemotron NAS keeps."""
    width = int(2 * _block(reader, layer, layers, "ffn")["ffn_mult"] * reader.count("hidden_size") / 3)
    return Dense(-(-width // 256) * 256)


# LongCat


def _longcat_feed(reader: Reader, layer: int, layers: int) -> Experts:
    """Two dense feed-forwards after two attentions, and one mixture of experts beside them."""
    width = reader.count("ffn_hidden_size")
    return Mixture(
        "n_routed_experts", "moe_topk|num_experts_per_tok", "expert_ffn_hidden_size", router_bias="router_bias",
        correction=True, empty="zero_expert_num", beside=lambda _, __, ___: Dense(2 * width),
    )(reader, layer, layers)  # fmt: skip


FAMILIES = (
    Family(
        ("gemma4_text",),
        {FULL: _gemma4_full, SLIDING: _gemma4_sliding},
        {"dense": _gemma4_feed},
        windows(every(6, FULL, SLIDING)),
        norms=4,
        tied=True,
        more=_gemma4_more,
        top=_per_layer_top,
        ignored=("vocab_size_per_layer_input", "global_head_dim"),
    ),
    Family(
        ("deepseek_v4", "deepseek_ref"),
        {
            SLIDING: CompressedRule(),
            "sparse": CompressedRule(4, 2, "compressed_sparse_attention", indexed=True),
            "heavy": CompressedRule(128, 1, "heavily_compressed_attention"),
        },
        {"sparse": Mixture("n_routed_experts", shared_count="n_shared_experts", correction=True)},
        _v4_mixers,
        same("sparse"),
        more=_streams,
        top=_streams_top,
        ignored=(
            "num_hash_layers",
            "num_nextn_predict_layers",
            "mlp_layer_types",
            "layer_types",
            "intermediate_size",
            "compress_rates",
            "expert_dtype",
        ),
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    Family(
        ("nemotron-nas", "deci"),
        {FULL: _nas_attention, "none": ()},
        {"dense": _nas_feed, "none": None},
        _nas_mixers,
        _nas_feeds,
        ignored=("intermediate_size", "num_key_value_heads"),
        fixed={"mlp_bias": (False,)},
    ),
    Family(
        ("longcat_flash",),
        {FULL: (Latents(), Latents())},
        {"dense": _longcat_feed},
        layers="num_layers",
        norms=4,
        fixed={"attention_method": ("MLA",)},
        ignored=(
            "zero_expert_type",
            "mla_scale_q_lora",
            "mla_scale_kv_lora",
            "num_hidden_layers",
            "intermediate_size",
            "emb_split_num",
        ),
    ),
)
