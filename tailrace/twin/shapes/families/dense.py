"""Families without experts, whose layers differ at most in how far they look.

What a file leaves out is what the architecture's class in transformers takes.
"""

from __future__ import annotations

from tailrace.twin.shapes.family import Family
from tailrace.twin.shapes.kinds import every, named, same, windows
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import PER_HEAD, WHOLE, Gated, Grouped
from tailrace.twin.shapes.tensors import Part, Tensor, vector

FULL, SLIDING = "full_attention", "sliding_attention"
DENSE = {"dense": Gated()}


def sliding(rule: Grouped, window: str = "sliding_window") -> dict[str, Grouped]:
    """Attention to all, and the same to a window."""
    return {FULL: rule, SLIDING: rule.but(window=window)}


GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072}
"""What Gemma 3's files leave out where it is so."""


def _xielu(reader: Reader, layer: int, layers: int, kind: str) -> tuple[Tensor, ...]:
    """Apertus's activation has two parameters in each layer."""
    fitted = reader.text("hidden_act", "xielu") == "xielu"
    return (vector(Part.OTHER, "mlp.act_fn", 2),) if fitted else ()


ANY = Grouped(window="sliding_window")
"""All layers look as far as the file says."""

FAMILIES = (
    # Llama has no window, whatever its file says of one.
    Family(
        ("llama", "granite"),
        {FULL: Grouped()},
        DENSE,
        named("layer_types", same(FULL)),
        ignored=("max_window_layers",),
        fixed={"sliding_window": (), "use_sliding_window": (False,)},
    ),
    Family(
        ("smollm3",),
        {FULL: Grouped()},
        DENSE,
        named("layer_types", same(FULL)),
        tied=True,
        ignored=("no_rope_layers", "no_rope_layer_interval", "max_window_layers"),
        fixed={"sliding_window": (), "use_sliding_window": (False,)},
    ),
    Family(
        ("mistral", "ministral3"),
        {FULL: ANY.but(kv_default="8", bias=False, o_bias=False)},
        DENSE,
        ignored=("layer_types",),
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    Family(("ministral",), sliding(Grouped(bias=False, o_bias=False)), DENSE, windows()),
    Family(("arcee",), {FULL: Grouped()}, {"dense": Gated(gated=False)}),
    Family(
        ("apertus",),
        {FULL: Grouped(qk_norm=PER_HEAD, normed="qk_norm=true")},
        {"dense": Gated(gated=False, bias=False)},
        more=_xielu,
        fixed={"post_norm": (False,), "mlp_bias": (False,)},
    ),
    Family(
        ("seed_oss",),
        {FULL: Grouped(bias="attention_bias=true", o_bias="attention_out_bias")},
        DENSE,
        ignored=("residual_dropout",),
    ),
    Family(
        ("qwen2", "mimo"),
        sliding(Grouped(bias="attention_bias=true", o_bias=False)),
        {"dense": Gated(bias=False)},
        windows(),
        ignored=("num_nextn_predict_layers",),
        fixed={"mlp_bias": (False,)},
    ),
    Family(
        ("qwen3", "qwen3_vl_text"),
        sliding(Grouped(head_dim=128, qk_norm=PER_HEAD)),
        {"dense": Gated(bias=False)},
        windows(),
    ),
    Family(("olmo2",), {FULL: Grouped(qk_norm=WHOLE)}, {"dense": Gated(bias=False)}),
    Family(("olmo3",), sliding(Grouped(qk_norm=WHOLE)), {"dense": Gated(bias=False)}, windows(every(4, FULL, SLIDING))),
    Family(
        ("exaone4",),
        sliding(Grouped(bias=False, o_bias=False, qk_norm=PER_HEAD)),
        {"dense": Gated(bias=False)},
        windows(same(FULL)),
        ignored=("sliding_window_pattern", "sliding_window"),
    ),
    Family(
        ("phi3",),
        {FULL: ANY.but(bias=False, o_bias=False)},
        {"dense": Gated(bias=False)},
        ignored=("max_window_layers", "use_sliding_window"),
        fixed={"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)},
    ),
    Family(("gemma",), {FULL: Grouped(head_dim=256)}, {"dense": Gated(bias=False)}, tied=True),
    Family(
        ("gemma2",),
        sliding(Grouped(head_dim=256)),
        {"dense": Gated(bias=False)},
        windows(every(2, FULL, SLIDING)),
        norms=4,
        tied=True,
        ignored=("cache_implementation", "sliding_window_size"),
    ),
    Family(
        ("gemma3_text",),
        sliding(Grouped(head_dim=256, qk_norm=PER_HEAD)),
        {"dense": Gated(bias=False)},
        windows(every("sliding_window_pattern=6", FULL, SLIDING)),
        norms=4,
        tied=True,
        ignored=("cache_implementation", "sliding_window_pattern"),
        defaults=GEMMA3,
    ),
    Family(
        ("glm",), {FULL: Grouped(bias="attention_bias=true", o_bias=False, head_dim=128)}, {"dense": Gated(bias=False)}
    ),
    Family(("glm4",), {FULL: Grouped(o_bias=False, head_dim=128)}, {"dense": Gated(bias=False)}, norms=4),
    Family(
        ("ernie4_5",),
        {FULL: Grouped(bias="use_bias", o_bias="use_bias", head_dim=128)},
        {"dense": Gated(bias="use_bias")},
        tied=True,
    ),
    Family(
        ("cohere2",),
        sliding(Grouped()),
        {"dense": Gated(bias=False)},
        windows(every("sliding_window_pattern=4", FULL, SLIDING)),
        norms=1,
        tied=True,
        ignored=(
            "sliding_window_pattern",
            "order_of_interleaved_layers",
            "use_parallel_embedding",
            "position_embedding_type",
            "cache_implementation",
        ),
        fixed={
            "use_qk_norm": (False,),
            "use_embedding_sharing": (True,),
            "use_parallel_block": (True,),
            "use_gated_activation": (True,),
        },
    ),
    Family(
        ("cohere",),
        {FULL: Grouped()},
        {"dense": Gated(bias=False)},
        norms=1,
        tied=True,
        fixed={"use_qk_norm": (False,)},
    ),
    Family(
        ("starcoder2",),
        {FULL: ANY.but(bias="use_bias=true", o_bias="use_bias=true", kv_default="2")},
        {"dense": Gated(gated=False, bias="use_bias=true")},
        norm_bias=True,
        tied=True,
        fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ),
    Family(("nemotron",), {FULL: Grouped()}, {"dense": Gated(gated=False)}, norm_bias=True),
    Family(
        ("hunyuan_v1_dense",),
        {FULL: Grouped(qk_norm=PER_HEAD)},
        {"dense": Gated(bias=False)},
        ignored=("cla_share_factor", "attention_head_dim"),
        fixed={"use_qk_norm": (True,), "use_cla": (False,), "mlp_bias": (False,)},
    ),
    Family(
        ("stablelm",),
        {FULL: Grouped(bias="use_qkv_bias", o_bias=False)},
        {"dense": Gated(bias=False)},
        norm_bias=True,
        fixed={"use_parallel_residual": (False,), "qk_layernorm": (False,)},
    ),
    Family(
        ("vaultgemma",),
        sliding(Grouped(head_dim=256)),
        {"dense": Gated(bias=False)},
        windows(every(2, FULL, SLIDING)),
        tied=True,
    ),
)
