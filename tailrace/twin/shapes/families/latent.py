"""Families of DeepSeek's kind: latent attention, with or without an indexer, and what they share with others."""

from __future__ import annotations

from tailrace.twin.shapes.families.dense import FULL
from tailrace.twin.shapes.family import Family
from tailrace.twin.shapes.kinds import moe_frequency, named, same
from tailrace.twin.shapes.rules import FeedRule, Gated, Latents, Mixture, sparse_index

DEEPSEEK: dict[str, FeedRule | None] = {
    "dense": Gated(bias=False),
    "sparse": Mixture("n_routed_experts", shared_count="n_shared_experts", correction=True),
}
DEEPSEEK_IGNORED = ("rope_interleave", "moe_layer_freq", "head_dim", "first_k_dense_replace", "num_experts")
DEEPSEEK_FIXED = {"mlp_bias": (False,), "use_mla": (True,)}

FAMILIES = (
    Family(
        ("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        {FULL: Latents()},
        DEEPSEEK,
        feed_kinds=moe_frequency,
        mtp="num_nextn_predict_layers",
        ignored=DEEPSEEK_IGNORED,
        fixed=DEEPSEEK_FIXED,
    ),
    Family(
        ("deepseek_v2",),
        {FULL: Latents()},
        {"dense": Gated(bias=False), "sparse": Mixture("n_routed_experts", shared_count="n_shared_experts")},
        feed_kinds=moe_frequency,
        ignored=DEEPSEEK_IGNORED,
        fixed=DEEPSEEK_FIXED,
    ),
    Family(
        ("deepseek_v32", "glm_moe_dsa"),
        {FULL: Latents(index=sparse_index)},
        DEEPSEEK,
        named("layer_types", same(FULL), {"deepseek_sparse_attention": FULL, "indexed_attention": FULL, FULL: FULL}),
        moe_frequency,
        mtp="num_nextn_predict_layers",
        ignored=DEEPSEEK_IGNORED,
        fixed=DEEPSEEK_FIXED,
    ),
)
