"""Families whose layers differ in kind: attention beside linear attention, state spaces and convolutions."""

from __future__ import annotations

from tailrace.twin.shapes.families.dense import FULL
from tailrace.twin.shapes.family import Family
from tailrace.twin.shapes.kinds import every, moe_frequency, named, same, sparse_step, windows
from tailrace.twin.shapes.parts import Dense, Experts, Feed
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import PER_HEAD, Gated, Grouped, Latents, MixerRule, Mixture
from tailrace.twin.shapes.states import Mamba1, Mamba2, delta, kimi_delta, lightning, short_convolution

LINEAR = "linear_attention"
ALL_SPARSE = same("sparse")

QWEN_GATED = Grouped(head_dim=256, qk_norm=PER_HEAD, gate="wide")
QWEN_MIXERS: dict[str, MixerRule] = {FULL: QWEN_GATED, LINEAR: delta}
QWEN_KINDS = windows(every("full_attention_interval=4", FULL, LINEAR))
QWEN_IGNORED = ("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "output_gate_type")
QWEN_FIXED = {"attn_output_gate": (True,), "mlp_bias": (False,)}
QWEN_SPARSE = Mixture("num_experts", shared="shared_expert_intermediate_size", shared_gate=True)

NEMOTRON_LETTERS = {
    "M": LINEAR, "E": "moe", "*": FULL, "-": "mlp", "mamba": LINEAR, "moe": "moe", "attention": FULL, "mlp": "mlp",
    LINEAR: LINEAR, FULL: FULL,
}  # fmt: skip


def _nemotron(reader: Reader, layers: int) -> list[str]:
    """One letter a layer: M, a state space; *, attention; E, experts; -, a dense feed-forward."""
    field = "layers_block_type" if reader.raw("hybrid_override_pattern") is None else "hybrid_override_pattern"
    if reader.raw(field) is None:
        raise reader.refuse("hybrid_override_pattern", "is missing")
    return named(field, same(FULL), NEMOTRON_LETTERS)(reader, layers)


def _nemotron_count(reader: Reader) -> int:
    """Layers: as many as there are letters, where the file does not say."""
    pattern = reader.raw("hybrid_override_pattern") or reader.raw("layers_block_type")
    given = len(pattern) if isinstance(pattern, list | str) and pattern else None
    return reader.count("num_hidden_layers", given, most=100_000)


def _nemotron_mixers(reader: Reader, layers: int) -> list[str]:
    return [one if one in (LINEAR, FULL) else "none" for one in _nemotron(reader, layers)]


def _nemotron_feeds(reader: Reader, layers: int) -> list[str]:
    return [{"moe": "sparse", "mlp": "dense"}.get(one, "none") for one in _nemotron(reader, layers)]


def _kimi(reader: Reader, layers: int) -> list[str]:
    """Kimi Linear lists its layers, counted from one."""
    fields = reader.child("linear_attn_config")
    if fields is None:
        return windows(same(LINEAR))(reader, layers)
    full, linear = fields.raw("full_attn_layers", []), fields.raw("kda_layers", [])
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise fields.refuse("full_attn_layers", f"and kda_layers do not name each of the {layers} layers once")
    return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]


def _jamba_mixers(reader: Reader, layers: int) -> list[str]:
    period, offset = reader.count("attn_layer_period"), reader.size("attn_layer_offset", 4)
    return [FULL if layer % period == offset else LINEAR for layer in range(layers)]


def _jamba_feeds(reader: Reader, layers: int) -> list[str]:
    period, offset = reader.count("expert_layer_period"), reader.size("expert_layer_offset", 1)
    return [
        "sparse" if layer % period == offset and reader.size("num_experts") > 1 else "dense" for layer in range(layers)
    ]


def _bamba(reader: Reader, layers: int) -> list[str]:
    indices = reader.raw("attn_layer_indices", [])
    return [FULL if layer in indices else LINEAR for layer in range(layers)]


def _granite_feed(reader: Reader, layer: int, layers: int) -> Feed:
    """Granite 4: a dense feed-forward that all tokens use, beside experts where there are any."""
    shared = reader.count("shared_intermediate_size")
    count = reader.size("num_local_experts", 0)
    reader.pass_over("num_experts_per_tok", "intermediate_size")
    if not count:
        return Dense(shared)
    return Experts(count, reader.count("num_experts_per_tok"), reader.count("intermediate_size"), shared=shared)


def _lfm(reader: Reader, layers: int) -> list[str]:
    kinds = {"conv": LINEAR, FULL: FULL}
    indices = reader.raw("full_attn_idxs")
    otherwise = [FULL if indices is None or layer in indices else LINEAR for layer in range(layers)]
    return named("layer_types", lambda _, __: otherwise, kinds)(reader, layers)


def _lfm_dense(reader: Reader, layer: int, layers: int) -> Dense:
    """LFM2 rounds two thirds of its width up, as Llama 1 did."""
    width = reader.count("intermediate_size|block_ff_dim")
    if reader.flag("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        scale = reader.number("block_ffn_dim_multiplier", 1.0)
        step = reader.count("block_multiple_of", 256)
        width = step * -(-int(scale * width) // step)
    return Dense(width)


def _lfm_sparse(reader: Reader, layers: int) -> list[str]:
    dense = reader.size("num_dense_layers", 2)
    return ["dense" if layer < dense else "sparse" for layer in range(layers)]


def _minimax(reader: Reader, layers: int) -> list[str]:
    listed = reader.listed("attn_type_list", layers)
    if listed is not None:
        return [FULL if one else LINEAR for one in listed]
    return windows(every(2, FULL, LINEAR, first=0))(reader, layers)


FAMILIES = (
    Family(
        ("qwen3_next",),
        QWEN_MIXERS,
        {"dense": Gated(bias=False), "sparse": QWEN_SPARSE},
        QWEN_KINDS,
        sparse_step,
        ignored=(*QWEN_IGNORED, "intermediate_size"),
        fixed=QWEN_FIXED,
    ),
    Family(
        ("qwen3_5_moe_text",),
        QWEN_MIXERS,
        {"dense": Gated(bias=False), "sparse": QWEN_SPARSE},
        QWEN_KINDS,
        sparse_step,
        ignored=QWEN_IGNORED,
        fixed=QWEN_FIXED,
    ),
    Family(
        ("qwen3_5_text",),
        QWEN_MIXERS,
        {"dense": Gated(bias=False)},
        QWEN_KINDS,
        ignored=QWEN_IGNORED,
        fixed={**QWEN_FIXED, "mlp_only_layers": ([],)},
    ),
    Family(
        ("nemotron_h",),
        {FULL: Grouped(head_dim=128, bias=False, o_bias=False), LINEAR: Mamba2(bias="use_bias"), "none": ()},
        {
            "dense": Gated(gated=False),
            "none": None,
            "sparse": Mixture(
                "n_routed_experts",
                gated=False,
                shared="moe_shared_expert_intermediate_size",
                correction=True,
                latent="moe_latent_size",
            ),
        },
        _nemotron_mixers,
        _nemotron_feeds,
        layers=_nemotron_count,
        fixed={
            "attention_bias": (False,),
            "sliding_window": (),
            "mamba_proj_bias": (False,),
            "n_shared_experts": (0, 1),
        },
        ignored=(
            "time_step_rank",
            "intermediate_size",
            "moe_intermediate_size",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "num_nextn_predict_layers",
            "moe_shared_expert_intermediate_size",
            "n_routed_experts",
            "num_experts_per_tok",
            "mlp_bias",
            "moe_latent_size",
            "attention_head_dim",
        ),
    ),
    Family(
        ("falcon_h1",),
        {
            FULL: (
                Grouped(o_bias="attention_bias"),
                Mamba2(
                    bias="mamba_proj_bias",
                    out_bias="projectors_bias",
                    conv_bias="mamba_conv_bias=true",
                    normed="mamba_rms_norm",
                    inner="mamba_d_ssm",
                    name="mamba",
                ),
            )
        },
        {"dense": Gated()},
        ignored=(
            "attn_layer_indices",
            "mamba_norm_before_gate",
            "mlp_expansion_factor",
            "mamba_d_ssm",
            "num_logits_to_keep",
            "time_step_rank",
        ),
        fixed={"mamba_use_mlp": (True,)},
    ),
    Family(
        ("bamba",),
        {
            FULL: Grouped(),
            LINEAR: Mamba2(
                bias="mamba_proj_bias", out_bias="mamba_proj_bias", conv_bias="mamba_conv_bias=true", name="mamba"
            ),
        },
        {"dense": Gated()},
        _bamba,
    ),
    Family(
        ("granitemoehybrid",),
        {
            FULL: Grouped(),
            LINEAR: Mamba2(
                bias="mamba_proj_bias", out_bias="mamba_proj_bias", conv_bias="mamba_conv_bias=true", name="mamba"
            ),
        },
        {"dense": _granite_feed},
        named(
            "layer_types|layers_block_type",
            same(FULL),
            {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL},
        ),
        ignored=("position_embedding_type", "layer_types"),
        fixed={"normalization_function": ("rmsnorm",)},
    ),
    Family(
        ("jamba",),
        {FULL: Grouped(bias=False, o_bias=False), LINEAR: Mamba1(bias="mamba_proj_bias", normed=True)},
        {"dense": Gated(bias=False), "sparse": Mixture("num_experts", width="intermediate_size")},
        _jamba_mixers,
        _jamba_feeds,
        ignored=(
            "sliding_window",
            "num_experts_per_tok",
            "attn_layer_offset",
            "expert_layer_offset",
            "layers_block_type",
        ),
    ),
    Family(
        ("lfm2",),
        {FULL: Grouped(qk_norm=PER_HEAD, bias=False, o_bias=False), LINEAR: short_convolution},
        {"dense": _lfm_dense},
        _lfm,
        tied=True,
        ignored=(
            "full_attn_idxs",
            "block_dim",
            "block_ff_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_swiglu",
            "block_use_xavier_init",
            "conv_use_xavier_init",
            "num_heads",
            "use_pos_enc",
            "tie_embedding",
            "theta",
            "conv_dim",
            "conv_dim_out",
            "conv_L_cache",
            "conv_bias",
        ),
    ),
    Family(
        ("lfm2_moe",),
        {FULL: Grouped(qk_norm=PER_HEAD, bias=False, o_bias=False), LINEAR: short_convolution},
        {"dense": Gated(bias=False), "sparse": Mixture("num_experts", correction="use_expert_bias=true")},
        _lfm,
        _lfm_sparse,
        tied=True,
        ignored=("full_attn_idxs", "tie_embedding", "conv_L_cache", "conv_bias"),
    ),
    Family(
        ("kimi_linear",),
        {FULL: Latents(gated="mla_use_output_gate"), LINEAR: kimi_delta},
        {
            "dense": Gated(bias=False),
            "sparse": Mixture(
                "num_experts|n_routed_experts",
                "num_experts_per_token|num_experts_per_tok",
                shared_count="num_shared_experts|n_shared_experts",
                correction=True,
                latent="routed_expert_hidden_size",
                latent_norm="latent_moe_use_norm",
            ),
        },
        _kimi,
        moe_frequency,
        mtp="num_nextn_predict_layers",
        ignored=("head_dim", "moe_layer_freq", "num_key_value_heads"),
    ),
    Family(
        ("minimax", "minimax_text_01"),
        {FULL: Grouped(bias=False, o_bias=False), LINEAR: lightning},
        {"sparse": Mixture("num_local_experts", width="intermediate_size")},
        _minimax,
        ALL_SPARSE,
        ignored=(
            "layernorm_full_attention_alpha",
            "layernorm_full_attention_beta",
            "layernorm_linear_attention_alpha",
            "layernorm_linear_attention_beta",
            "layernorm_mlp_alpha",
            "layernorm_mlp_beta",
            "postnorm",
            "block_size",
            "full_attn_alpha_factor",
            "full_attn_beta_factor",
            "linear_attn_alpha_factor",
            "linear_attn_beta_factor",
            "mlp_alpha_factor",
            "mlp_beta_factor",
            "shared_moe_mode",
        ),
        fixed={"shared_intermediate_size": (0,), "sliding_window": ()},
    ),
    Family(
        ("mamba2",),
        {LINEAR: Mamba2("num_heads", "head_dim", "n_groups", "state_size", bias="use_bias")},
        {"none": None},
        same(LINEAR),
        same("none"),
        ignored=("residual_in_fp32", "rms_norm", "norm_before_gate", "intermediate_size", "time_step_rank"),
    ),
    Family(
        ("mamba", "falcon_mamba"),
        {LINEAR: Mamba1(inner="intermediate_size", bias="use_bias", conv_bias="use_conv_bias=true", name="mixer")},
        {"none": None},
        same(LINEAR),
        same("none"),
        tied=True,
        ignored=(
            "d_inner",
            "d_model",
            "n_layer",
            "ssm_cfg",
            "rms_norm",
            "fused_add_norm",
            "pad_vocab_size_multiple",
            "use_falcon_mambapy",
            "use_mambapy",
            "mixer_rms_eps",
            "expand",
            "use_associative_scan",
        ),
    ),
)
