"""Fields of configurations that change no parameter, no byte of weights or KV, and no valid degree of parallelism.

What a model computes with its tensors (activations, scales, rope), how it was trained, how text becomes tokens, and
what the file says of itself. Any field that is neither here nor read by a rule is refused by name.
"""

from __future__ import annotations

SUFFIXES = ("_token_id", "_token_ids", "_token_index")
PREFIXES = ("_", "rope_", "mscale", "initializer_", "output_router", "output_attentions", "output_hidden")

_ABOUT_THE_FILE = """
architectures auto_map dtype torch_dtype transformers_version model_type name_or_path base_model_name_or_path
task_specific_params custom_pipelines license revision finetuning_task problem_type id2label label2id num_labels
return_dict is_decoder torchscript use_bfloat16 tokenizer_class processor_class
chunk_size_feed_forward tie_encoder_decoder cross_attention_hidden_size
tf_legacy_loss unsloth_version unsloth_fixed model_name mlx_version use_cache use_return_dict sub_configs
language_config_class
"""

_TOKENS = """
image_placeholder video_placeholder image_seq_length mm_tokens_per_image vision_soft_tokens_per_image
default_output_length im_start_token im_end_token image_token_len image_token placeholder_token ignore_index
tokens_per_second im_patch_token video_seq_length
"""

_GENERATING = """
bad_words_ids begin_suppress_tokens suppress_tokens diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
remove_invalid_values repetition_penalty return_dict_in_generate temperature top_k top_p typical_p num_logits_to_keep
max_new_tokens
"""

_TRAINING = """
attention_dropout hidden_dropout hidden_dropout_prob embedding_dropout embd_pdrop resid_pdrop attn_pdrop
residual_dropout resid_dropout dropout classifier_dropout router_aux_loss_coef aux_loss_alpha seq_aux
z_loss_coefficient router_z_loss_coef router_jitter_noise input_jitter_noise load_balance_coeff for_causal_lm
init_method mtp_loss_scaling_factor pretraining_tp ep_size rescale_prenorm_residual time_step_floor
time_step_init_scheme time_step_max time_step_min time_step_limit time_step_rank_floor mamba_dt_min mamba_dt_max
mamba_dt_limit mamba_dt_init_floor use_mamba_kernels use_mambapy use_falcon_mambapy use_associative_scan
gradient_checkpointing embedding_initializer_range
"""

_ARITHMETIC = """
hidden_act hidden_activation activation_function mlp_hidden_act mamba_hidden_act act_fn ffn_act_fn rms_norm_eps
norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon layernorm_eps hc_eps swiglu_limit
swiglu_alpha swiglu_limits swiglu_limits_shared activation_situ_beta activation_situ_linear_beta zero_centered_gamma
attention_value_scale attention_multiplier embedding_multiplier logits_scaling residual_multiplier logit_scale
embedding_scale query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping attn_logits_soft_cap
attn_temperature_tuning attn_scale floor_scale scale_emb scale_depth dim_model_base key_multiplier
attention_in_multiplier attention_out_multiplier mlp_multipliers ssm_multipliers ssm_in_multiplier ssm_out_multiplier
lm_head_multiplier norm_topk_prob norm_topk moe_renormalize norm_min moe_norm_min routed_scaling_factor
moe_routed_scaling_factor moe_router_scaling_factor route_scale route_norm score_func scoring_func
moe_router_activation_func router_activation topk_method n_group topk_group num_expert_group use_grouped_topk
moe_router_dtype moe_router_topk_scaling_factor partial_rotary_factor rotary_dim rotary_pct rotary_base
partial_rotary_factors rotary_emb_base swa_rope_theta swa_partial_rotary_factor local_rope_theta rope_local_base_freq
global_rope_theta compress_rope_theta mrope_section use_mrope indexer_rope_interleave original_max_position_embeddings
initial_context_length max_position_embeddings max_seq_len max_sequence_length seq_length n_positions model_max_length
extended_context use_gemma_norm residual_in_fp32 fp32_residual_connection use_bidirectional_attention is_causal
attn_implementation clip_qkv sequence_parallel mamba_chunk_size chunk_size time_step_scale gate_lower_bound
mla_use_nope moe_shared_expert_overlap hc_sinkhorn_iters use_flash_attention use_sdpa softmax_scale softcap
scale_attn_by_inverse_layer_idx scale_attn_weights reorder_and_upcast_attn apply_residual_connection_post_layernorm
attention_softmax_in_fp32 activation_sparsity_pattern altup_active_idx altup_correct_scale altup_coef_clip
moe_apply_router_weight_on_input use_unified_vision_chunk index_topk index_topk_freq index_topk_pattern
index_skip_topk_offset index_share_for_mtp_iteration
"""

OFF = frozenset(("add_cross_attention", "is_encoder_decoder", "pruned_heads"))
"""Harmless only where they say no: whole parts of a model are there or not by them."""

HARMLESS = frozenset(" ".join((_ABOUT_THE_FILE, _TOKENS, _GENERATING, _TRAINING, _ARITHMETIC)).split())
