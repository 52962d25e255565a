"""Families with mixtures of experts, whose layers all attend."""

from __future__ import annotations

from tailrace.twin.shapes.families.dense import FULL, SLIDING, sliding
from tailrace.twin.shapes.families.latent import DEEPSEEK, DEEPSEEK_FIXED, DEEPSEEK_IGNORED
from tailrace.twin.shapes.family import Family
from tailrace.twin.shapes.kinds import after, every, moe_frequency, named, same, sparse_step, windows
from tailrace.twin.shapes.parts import Attention, Index
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import PER_HEAD, WHOLE, Gated, Grouped, Mixture

ALL_SPARSE = same("sparse")
HUNYUAN_IGNORED = (
    "intermediate_size", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "group_limited_greedy",
    "moe_drop_tokens", "moe_random_routing_dropped_token", "pool_type", "position_embedding_xdrope",
    "use_rotary_pos_emb",
)  # fmt: skip


def _scout_feeds(reader: Reader, layers: int) -> list[str]:
    """Llama 4: a list of layers with experts, or one of so many."""
    listed, step = reader.raw("moe_layers"), reader.count("interleave_moe_layer_step", 1)
    chosen = listed if isinstance(listed, list) else range(step - 1, layers, step)
    return ["sparse" if layer in set(chosen) else "dense" for layer in range(layers)]


def _scout_mixers(reader: Reader, layers: int) -> list[str]:
    """Llama 4: layers with rope look at their chunk, the others (each fourth) at all."""
    turned = reader.raw("no_rope_layers") or [int((layer + 1) % reader.count("no_rope_layer_interval", 4) != 0)
                                              for layer in range(layers)]  # fmt: skip
    otherwise = ["chunked_attention" if one else FULL for one in turned]
    if reader.raw("attention_chunk_size") is None:
        otherwise = [FULL] * layers
    return named("layer_types", lambda _, __: otherwise)(reader, layers)


def _ernie_sparse(reader: Reader, layers: int) -> list[str]:
    """Ernie 4.5: one of so many layers, from one to another (-1: the last)."""
    first, step = reader.size("moe_layer_start_index", 1), reader.count("moe_layer_interval", 1)
    last = reader.raw("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    return ["sparse" if first <= n <= last and (n + 1) % step == 0 else "dense" for n in range(layers)]


def _mimo_mixers(reader: Reader, layers: int) -> list[str]:
    pattern = reader.listed("hybrid_layer_pattern", layers)
    if pattern is None:
        return windows(every(6, FULL, SLIDING))(reader, layers)
    return [SLIDING if one else FULL for one in pattern]


def _step_sparse(reader: Reader, layers: int) -> list[str]:
    """Step 3.5: a list of layers in one text."""
    given = reader.raw("moe_layers_enum")
    if given is None:
        told = reader.raw("mlp_layer_types") is not None or reader.raw("first_k_dense_replace") is not None
        return moe_frequency(reader, layers) if told else after(3)(reader, layers)
    chosen = {int(one) for one in (given.split(",") if isinstance(given, str) else given)}
    return ["sparse" if layer in chosen else "dense" for layer in range(layers)]


def _step_sliding(reader: Reader, layer: int, layers: int) -> Attention:
    """Step 3.5's layers with a window have heads of their own."""
    other = reader.child("attention_other_setting")
    rule = STEP
    if other is not None:
        other.pass_over("attention_type", "head_dim", "true_head_dim", "num_attention_groups")
        rule = STEP.but(heads=other.count("num_attention_heads"))
        if (groups := other.raw("num_attention_groups")) is not None:
            rule = rule.but(kv_heads=groups)
    elif reader.raw("num_sliding_attention_heads") is not None:
        rule = STEP.but(heads="num_sliding_attention_heads")
    return rule.but(window="sliding_window")(reader, layer, layers)


STEP = Grouped(
    kv_heads="num_attention_groups|num_key_value_heads", head_dim=128, qk_norm=PER_HEAD, gate="heads",
    gated="use_head_wise_attn_gate=true",
)  # fmt: skip


def _block_index(reader: Reader, layer: int, layers: int) -> Index | None:
    """MiniMax M3: an index over blocks of keys, in the layers that the pattern says."""
    fields = reader.child("sparse_attention_config")
    if fields is None:
        kinds = reader.listed("layer_types", layers)
        if kinds is None or kinds[layer] != "minimax_m3_sparse":
            return None
        return Index(reader.count("index_n_heads"), reader.count("index_head_dim"), weighted=False,
                     norms=2 * reader.count("index_head_dim"))  # fmt: skip
    fields.pass_over("sparse_block_size", "sparse_topk_blocks", "sparse_local_block", "sparse_init_block",
                     "sparse_score_type", "sparse_disable_index_value")  # fmt: skip
    pattern = fields.listed("sparse_attention_freq", layers) or [1] * layers
    heads, dim = fields.count("sparse_num_index_heads"), fields.count("sparse_index_dim")
    if not fields.flag("use_sparse_attention", True) or not pattern[layer]:
        return None
    return Index(heads, dim, weighted=False, norms=2 * dim)


FAMILIES = (
    Family(
        ("mixtral",),
        {FULL: Grouped(kv_default="8", bias=False, o_bias=False, window="sliding_window")},
        {"sparse": Mixture("num_local_experts|num_experts", width="intermediate_size")},
        feed_kinds=ALL_SPARSE,
    ),
    Family(
        ("qwen2_moe",),
        sliding(Grouped(bias="qkv_bias=true", o_bias=False)),
        {
            "dense": Gated(bias=False),
            "sparse": Mixture("num_experts", shared="shared_expert_intermediate_size", shared_gate=True),
        },
        windows(),
        sparse_step,
        fixed={"attention_bias": (False,)},
    ),
    Family(
        ("qwen3_moe", "qwen3_vl_moe_text"),
        sliding(Grouped(qk_norm=PER_HEAD)),
        {"dense": Gated(bias=False), "sparse": Mixture("num_experts|num_local_experts")},
        windows(),
        sparse_step,
        ignored=("intermediate_size",),
        fixed={"qkv_bias": (False,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
    ),
    Family(
        ("olmoe",),
        {FULL: Grouped(qk_norm=WHOLE)},
        {"sparse": Mixture("num_experts", width="intermediate_size")},
        feed_kinds=ALL_SPARSE,
    ),
    Family(
        ("phimoe",),
        {FULL: Grouped(window="sliding_window")},
        {"sparse": Mixture("num_local_experts", width="intermediate_size")},
        feed_kinds=ALL_SPARSE,
        norm_bias=True,
        head_bias="lm_head_bias",
    ),
    Family(
        ("gpt_oss",),
        sliding(Grouped(bias="attention_bias=true", o_bias="attention_bias=true", sinks=True)),
        {
            "sparse": Mixture(
                "num_local_experts",
                "num_experts_per_tok|experts_per_token",
                "intermediate_size",
                bias=True,
                router_bias=True,
            )
        },
        windows(every(2, FULL, SLIDING)),
        ALL_SPARSE,
    ),
    Family(
        ("glm4_moe", "solar_open"),
        {FULL: Grouped(o_bias=False, qk_norm=PER_HEAD, normed="use_qk_norm")},
        DEEPSEEK,
        feed_kinds=moe_frequency,
        mtp="num_nextn_predict_layers",
        ignored=(*DEEPSEEK_IGNORED, "intermediate_size"),
        fixed=DEEPSEEK_FIXED,
    ),
    Family(
        ("dots1",), sliding(Grouped(qk_norm=PER_HEAD)), DEEPSEEK, windows(), moe_frequency, ignored=("moe_layer_freq",)
    ),
    Family(
        ("minimax_m2",),
        {FULL: Grouped(bias=False, o_bias=False, qk_norm=WHOLE, normed="use_qk_norm=true")},
        {"sparse": Mixture("num_local_experts", width="intermediate_size", correction="use_routing_bias=true")},
        named("attn_type_list", same(FULL), {"1": FULL}),
        ALL_SPARSE,
        ignored=("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "layer_types"),
        fixed={"qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)},
    ),
    Family(
        ("minimax_m3", "minimax_m3_vl_text"),
        {
            FULL: Grouped(
                bias=False,
                o_bias=False,
                qk_norm=PER_HEAD,
                gate="wide",
                gated="attention_output_gate",
                index=_block_index,
            )
        },
        {
            "dense": Gated("dense_intermediate_size", bias=False),
            "sparse": Mixture(
                "num_local_experts",
                width="moe_intermediate_size|intermediate_size",
                shared="shared_intermediate_size",
                correction="use_routing_bias=true",
            ),
        },
        feed_kinds=moe_frequency,
        fixed={"use_qk_norm": (True,), "qk_norm_type": ("per_head",), "n_shared_experts": (1,)},
        ignored=(
            "num_mtp_modules",
            "num_nextn_predict_layers",
            "first_k_dense_replace",
            "layer_types",
            "intermediate_size",
            "index_block_size",
            "index_topk_blocks",
            "index_local_blocks",
            "use_mtp",
            "mtp_transformer_layers",
            "attn_type_list",
        ),
    ),
    Family(
        ("ernie4_5_moe",),
        {FULL: Grouped(bias="use_bias", o_bias="use_bias")},
        {
            "dense": Gated(bias="use_bias"),
            "sparse": Mixture(
                "moe_num_experts",
                "moe_k",
                shared_count="moe_num_shared_experts",
                correction=True,
                fitted=True,
                shared_bias="use_bias",
            ),
        },
        feed_kinds=_ernie_sparse,
        tied=True,
        head_bias="use_bias",
        ignored=("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"),
    ),
    Family(
        ("hunyuan_v1_moe",),
        {FULL: Grouped(qk_norm=PER_HEAD)},
        {"sparse": Mixture("num_experts", "moe_topk", "moe_intermediate_size", shared_count="num_shared_expert")},
        feed_kinds=ALL_SPARSE,
        ignored=HUNYUAN_IGNORED,
        fixed={
            "use_qk_norm": (True,),
            "use_cla": (False,),
            "mlp_bias": (False,),
            "use_mla": (False,),
            "norm_type": ("rms",),
            "moe_layer_num_skipped": (0,),
            "use_mixed_mlp_moe": (True,),
            "add_classification_head": (False,),
        },
    ),
    Family(
        ("granitemoe",),
        {FULL: Grouped()},
        {"sparse": Mixture("num_local_experts", width="intermediate_size")},
        feed_kinds=ALL_SPARSE,
    ),
    Family(
        ("llama4_text",),
        {FULL: Grouped(head_dim=128), "chunked_attention": Grouped(head_dim=128, chunk="attention_chunk_size")},
        {
            "dense": Gated("intermediate_size_mlp", bias=False),
            "sparse": Mixture("num_local_experts", width="intermediate_size", shared="intermediate_size"),
        },
        _scout_mixers,
        _scout_feeds,
        ignored=(
            "for_llm_compressor",
            "use_qk_norm",
            "moe_layers",
            "intermediate_size_mlp",
            "no_rope_layers",
            "no_rope_layer_interval",
            "attention_chunk_size",
        ),
    ),
    Family(
        ("mimo_v2_flash",),
        {
            FULL: Grouped(value="v_head_dim", o_bias=False, sinks="add_full_attention_sink_bias"),
            SLIDING: Grouped(
                "swa_num_attention_heads",
                "swa_num_key_value_heads",
                head="swa_head_dim",
                value="swa_v_head_dim",
                o_bias=False,
                window="sliding_window",
                sinks="add_swa_attention_sink_bias=true",
            ),
        },
        {
            "dense": Gated(bias=False),
            "sparse": Mixture("n_routed_experts", shared_count="n_shared_experts", correction=True),
        },
        _mimo_mixers,
        moe_frequency,
        ignored=("sliding_window_size", "attention_chunk_size", "layer_types"),
    ),
    Family(
        ("step3p5", "step3p7_text"),
        {FULL: STEP, SLIDING: _step_sliding},
        {
            "dense": Gated(bias=False),
            "sparse": Mixture(
                "moe_num_experts|n_routed_experts|num_experts",
                "moe_top_k|num_experts_per_tok",
                shared="share_expert_dim|share_expert_dims",
                correction="use_moe_router_bias=true",
            ),
        },
        windows(same(FULL)),
        _step_sparse,
        ignored=(
            "num_nextn_predict_layers",
            "need_fp32_gate",
            "sink",
            "yarn_only_types",
            "use_rope_layers",
            "moe_every_n_layer",
            "att_impl_type",
            "use_cache_quantization",
            "max_window_layers",
            "zero_centered",
            "use_im_start_end",
            "vision_select_layer",
            "image_embed_len",
            "use_fused_qk_norm_and_rope",
            "num_mtp_layers",
            "mtp_layer_types",
            "mtp_mlp_layer_types",
            "num_sliding_attention_heads",
            "first_k_dense_replace",
        ),
        fixed={"use_mfa": (False,), "n_shared_experts": (1,), "use_moe": (True,), "use_qk_norm": (True,)},
    ),
    Family(
        ("afmoe",),
        sliding(Grouped(qk_norm=PER_HEAD, gate="wide", head_dim=128)),
        {
            "dense": Gated(bias=False),
            "sparse": Mixture("num_experts", shared_count="num_shared_experts", correction=True, fitted=True),
        },
        windows(every("global_attn_every_n_layers=4", FULL, SLIDING)),
        after("num_dense_layers=1"),
        norms=4,
        ignored=(
            "mup_enabled",
            "global_attn_every_n_layers",
            "num_expert_groups",
            "num_limited_groups",
            "use_grouped_mm",
        ),
    ),
)
