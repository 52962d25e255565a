"""Makes shapes.json: small models of each architecture with odd sizes, and how many parameters transformers gives them.

    python tests/twin/golden/make.py    (where transformers and torch are; models are built without memory)

Sizes are chosen so that no two products are alike: a rule that takes the wrong field is off by a number of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 96, "num_hidden_layers": 7, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 20,
    "intermediate_size": 172, "vocab_size": 391, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {key: value for key, value in COMMON.items() if key != "head_dim"}
LATENT = {
    **PLAIN, "num_key_value_heads": 12, "q_lora_rank": 44, "kv_lora_rank": 36, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12,
    "v_head_dim": 28, "n_routed_experts": 10, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 52,
    "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
INDEXED = {**LATENT, "index_n_heads": 5, "index_head_dim": 24, "index_topk": 8}
EXPERTS = {"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 52}
LINEAR = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3,
}  # fmt: skip
MAMBA = {
    "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 10, "conv_kernel": 4, "use_conv_bias": True,
    "use_bias": False, "expand": 1,
}  # fmt: skip
MAMBA_D = {
    "mamba_n_heads": 8, "mamba_d_head": 24, "mamba_n_groups": 4, "mamba_d_state": 10, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
SLIDES = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "attention_bias": True, "mlp_bias": True},
    "llama-without-head_dim": {**PLAIN, "model_type": "llama"},
    "mistral": {**COMMON, "sliding_window": 64},
    "ministral": {**COMMON, **SLIDES},
    "ministral3": {**COMMON, "sliding_window": None},
    "smollm3": {**PLAIN, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1], "use_sliding_window": False},
    "granite": {**PLAIN, "attention_multiplier": 0.5, "residual_multiplier": 0.2, "embedding_multiplier": 12.0},
    "arcee": {**COMMON},
    "apertus": {**PLAIN, "hidden_act": "xielu"},
    "seed_oss": {**COMMON, "attention_bias": True, "attention_out_bias": False},
    "qwen2": {**PLAIN, "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 7},
    "qwen3": {**COMMON, "attention_bias": False},
    "olmo2": {**PLAIN},
    "olmo3": {**PLAIN, "sliding_window": 64},
    "exaone4": {**COMMON, **SLIDES},
    "phi3": {**PLAIN, "sliding_window": 64},
    "gemma": {**COMMON, "tie_word_embeddings": True},
    "gemma2": {**COMMON, "tie_word_embeddings": True, "sliding_window": 64},
    "gemma3_text": {**COMMON, "tie_word_embeddings": True, "sliding_window": 64, "sliding_window_pattern": 3},
    "glm": {**COMMON, "attention_bias": True},
    "glm4": {**COMMON, "attention_bias": True},
    "ernie4_5": {**COMMON, "use_bias": True},
    "cohere": {**PLAIN, "use_qk_norm": False},
    "cohere2": {**COMMON, "sliding_window": 64},
    "starcoder2": {**PLAIN, "use_bias": True, "tie_word_embeddings": True},
    "nemotron": {**COMMON},
    "hunyuan_v1_dense": {**COMMON},
    "stablelm": {**PLAIN, "use_qkv_bias": True},
    "vaultgemma": {**COMMON, "tie_word_embeddings": True, "sliding_window": 64},
    "mixtral": {**COMMON, "num_local_experts": 9, "num_experts_per_tok": 2},
    "qwen2_moe": {**PLAIN, **EXPERTS, "shared_expert_intermediate_size": 68, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "qwen3_moe": {**COMMON, **EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "olmoe": {**PLAIN, "num_experts": 9, "num_experts_per_tok": 2},
    "phimoe": {**PLAIN, "num_local_experts": 9, "num_experts_per_tok": 2, "lm_head_bias": True, "attention_bias": True},
    "gpt_oss": {**COMMON, **SLIDES, "num_local_experts": 9, "num_experts_per_tok": 2, "attention_bias": True},
    "glm4_moe": {**COMMON, **EXPERTS, "n_routed_experts": 9, "n_shared_experts": 1, "first_k_dense_replace": 2,
                 "use_qk_norm": True, "attention_bias": True, "num_experts": None},
    "dots1": {**COMMON, "n_routed_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 52, "n_shared_experts": 2,
              "first_k_dense_replace": 1, "attention_bias": True, "n_group": 1, "topk_group": 1},
    "minimax_m2": {**COMMON, "num_local_experts": 9, "num_experts_per_tok": 2},
    "ernie4_5_moe": {**PLAIN, "moe_num_experts": 9, "moe_k": 2, "moe_intermediate_size": 52, "moe_num_shared_experts": 2,
                     "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "use_bias": True},
    "granitemoe": {**PLAIN, "num_local_experts": 9, "num_experts_per_tok": 2},
    "llama4_text": {**COMMON, "num_local_experts": 9, "num_experts_per_tok": 1, "intermediate_size_mlp": 204,
                    "interleave_moe_layer_step": 2, "attention_chunk_size": 64, "use_qk_norm": True},
    "deepseek_v2": {**LATENT, "moe_layer_freq": 1},
    "deepseek_v3": {**LATENT},
    "deepseek_v3-without-q_lora": {**LATENT, "q_lora_rank": None, "model_type": "deepseek_v3"},
    "deepseek_v32": {**INDEXED},
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "full", "shared", "shared", "full", "shared", "shared"],
                    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense"] + ["sparse"] * 6},
    "mimo_v2_flash": {**COMMON, "v_head_dim": 14, "swa_num_attention_heads": 12, "swa_num_key_value_heads": 4, "swa_head_dim": 20,
                      "swa_v_head_dim": 14, "sliding_window": 64, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
                      "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1], "n_routed_experts": 9, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 52, "attention_bias": True,
                      "layer_types": ["full_attention"] + ["sliding_attention"] * 4 + ["full_attention", "sliding_attention"]},
    "afmoe": {**COMMON, "num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 52, "num_shared_experts": 2,
              "num_dense_layers": 2, "global_attn_every_n_layers": 3, "sliding_window": 64},
    "solar_open": {**COMMON, "n_routed_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 52, "n_shared_experts": 2,
                   "first_k_dense_replace": 0, "use_qk_norm": False},
    "longcat_flash": {**LATENT, "num_layers": 3, "num_hidden_layers": 6, "ffn_hidden_size": 172, "expert_ffn_hidden_size": 52,
                      "moe_topk": 3, "zero_expert_num": 0, "zero_expert_type": "identity", "router_bias": False,
                      "intermediate_size": None, "moe_intermediate_size": None, "n_shared_experts": None,
                      "first_k_dense_replace": None, "n_group": None, "topk_group": None, "num_experts_per_tok": None},
    "minimax_m3_vl_text": {**COMMON, "num_local_experts": 9, "num_experts_per_tok": 2, "dense_intermediate_size": 204,
                           "shared_intermediate_size": 68, "moe_layer_freq": [0, 0, 1, 1, 1, 1, 1],
                           "sparse_attention_config": {"use_sparse_attention": True, "sparse_index_dim": 16,
                                                       "sparse_num_index_heads": 2, "sparse_block_size": 16,
                                                       "sparse_topk_blocks": 4, "sparse_local_block": 1,
                                                       "sparse_attention_freq": [0, 0, 1, 1, 1, 1, 1]}},
    "qwen3_next": {**COMMON, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 68, "decoder_sparse_step": 1},
    "qwen3_5_text": {**COMMON, **LINEAR},
    "qwen3_5_moe_text": {**COMMON, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 68, "intermediate_size": None},
    "nemotron_h": {**COMMON, **MAMBA, "hybrid_override_pattern": "ME*-M*E", "n_routed_experts": 9, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 52, "moe_shared_expert_intermediate_size": 68, "n_shared_experts": 1},
    "nemotron_h-latent": {**COMMON, **MAMBA, "hybrid_override_pattern": "ME*-M*E", "n_routed_experts": 9, "moe_latent_size": 32,
                          "num_experts_per_tok": 2, "moe_intermediate_size": 52, "moe_shared_expert_intermediate_size": 68,
                          "n_shared_experts": 1, "model_type": "nemotron_h"},
    "falcon_h1": {**COMMON, **MAMBA_D, "mamba_d_ssm": 192, "mamba_rms_norm": True},
    "bamba": {**PLAIN, **MAMBA_D, "attn_layer_indices": [2, 5]},
    "granitemoehybrid": {**PLAIN, **MAMBA_D, "num_local_experts": 9, "num_experts_per_tok": 2, "shared_intermediate_size": 204,
                         "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention", "mamba"]},
    "jamba": {**PLAIN, "mamba_d_state": 10, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 9, "mamba_conv_bias": True,
              "mamba_proj_bias": True, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3,
              "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {**PLAIN, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv", "conv"],
             "block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3,
             "conv_bias": False, "tie_word_embeddings": True, "rms_norm_eps": None, "norm_eps": 1e-5},
    "lfm2_moe": {**PLAIN, **EXPERTS, "num_dense_layers": 2, "conv_L_cache": 3, "conv_bias": False, "tie_word_embeddings": True,
                 "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv", "conv"],
                 "rms_norm_eps": None, "norm_eps": 1e-5},
    "kimi_linear": {**LATENT, "num_experts": 10, "n_routed_experts": None, "num_shared_experts": 2, "n_shared_experts": None,
                    "num_experts_per_token": 3, "num_experts_per_tok": None, "q_lora_rank": None, "mla_use_nope": True,
                    "n_group": None, "num_expert_group": 1,
                    "linear_attn_config": {"num_heads": 6, "head_dim": 14, "short_conv_kernel_size": 4,
                                           "kda_layers": [1, 2, 3, 5, 6], "full_attn_layers": [4, 7]}},
    "mamba": {"hidden_size": 96, "num_hidden_layers": 5, "vocab_size": 391, "state_size": 10, "intermediate_size": 192, "expand": 2,
              "conv_kernel": 4, "time_step_rank": 9, "use_bias": True, "use_conv_bias": True, "tie_word_embeddings": False},
    "falcon_mamba": {"hidden_size": 96, "num_hidden_layers": 5, "vocab_size": 391, "state_size": 10, "intermediate_size": 192,
                     "expand": 2, "conv_kernel": 4, "time_step_rank": 9, "use_bias": False, "use_conv_bias": True,
                     "tie_word_embeddings": True},
    "mamba2": {"hidden_size": 96, "num_hidden_layers": 5, "vocab_size": 391, "state_size": 10, "num_heads": 8, "head_dim": 24,
               "n_groups": 4, "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
               "tie_word_embeddings": False},
    "minimax": {**COMMON, "num_local_experts": 9, "num_experts_per_tok": 2},
    "gemma4_text": {**COMMON, "tie_word_embeddings": True, "global_head_dim": 36, "num_global_key_value_heads": 1,
                    "attention_k_eq_v": True, "sliding_window": 64, "hidden_size_per_layer_input": 16,
                    "vocab_size_per_layer_input": 211, "enable_moe_block": True, "num_experts": 9, "top_k_experts": 2,
                    "moe_intermediate_size": 52,
                    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    "gemma4_text-shared": {**COMMON, "tie_word_embeddings": True, "global_head_dim": 36, "num_kv_shared_layers": 3,
                           "use_double_wide_mlp": True, "sliding_window": 64, "hidden_size_per_layer_input": 0,
                           "model_type": "gemma4_text",
                           "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    "deepseek_v4": {**COMMON, "num_key_value_heads": 1, "q_lora_rank": 44, "o_lora_rank": 12, "o_groups": 3, "qk_rope_head_dim": 10,
                    "index_n_heads": 5, "index_head_dim": 24, "index_topk": 8, "sliding_window": 16, "hc_mult": 3,
                    "compress_ratios": [0, 0, 4, 128, 4, 128, 4], "num_hash_layers": 2, "n_routed_experts": 9,
                    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 52,
                    "intermediate_size": None, "scoring_func": "sqrtsoftplus"},
}  # fmt: skip

VISION = {
    "depth": 5, "hidden_size": 48, "intermediate_size": 76, "num_heads": 4, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 96, "num_position_embeddings": 49,
    "deepstack_visual_indexes": [1, 3], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
WHOLES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": {**COMMON, "model_type": "qwen3_vl_text"}, "vision_config": {**VISION, "model_type": "qwen3_vl"}},
    "qwen2_5_vl": {
        "text_config": {**PLAIN, "model_type": "qwen2_5_vl_text"},
        "vision_config": {**{k: v for k, v in VISION.items() if k not in ("num_position_embeddings", "deepstack_visual_indexes")},
                          "model_type": "qwen2_5_vl", "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "gemma3": {
        "text_config": {**COMMON, "model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 3},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 5,
                          "num_attention_heads": 4, "image_size": 28, "patch_size": 4, "vision_use_head": False},
        "mm_tokens_per_image": 4, "tie_word_embeddings": True,
    },
    "mistral3": {
        "text_config": {**COMMON, "model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 5,
                          "num_attention_heads": 4, "head_dim": 12, "image_size": 28, "patch_size": 4},
        "spatial_merge_size": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


def main() -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made: dict[str, dict[str, Any]] = {}
    failed = 0
    for models, auto in ((MODELS, AutoModelForCausalLM), (WHOLES, AutoModelForImageTextToText)):
        for name, fields in models.items():
            given = {"model_type": name, **{key: value for key, value in fields.items() if value is not None}}
            if "q_lora_rank" in fields and fields["q_lora_rank"] is None:
                given["q_lora_rank"] = None
            try:
                config = CONFIG_MAPPING[given["model_type"]].from_dict(dict(given))
                with torch.device("meta"):
                    model = auto.from_config(config)
            except Exception as error:  # noqa: BLE001 - each is reported, and none hides another
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                failed += 1
                continue
            made[name] = {"config": given, "parameters": sum(p.numel() for p in model.parameters())}
    (Path(__file__).parent / "shapes.json").write_text(json.dumps(made, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
