"""Tiny configurations of families whose language model transformers 5.24 has inside a model that sees images alone."""

from __future__ import annotations

from typing import Any

MUSE_EYE: dict[str, Any] = {"out_hidden_size": 64, "projector_hidden_size": 16, "vision_config": {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    "pos_emb_height": 4, "pos_emb_width": 4}}
PIXTRAL_EYE = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
               "num_attention_heads": 2, "head_dim": 8, "patch_size": 4, "image_size": 16}
GLM_EYE = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
           "out_hidden_size": 32, "projection_intermediate_size": 16, "image_size": 16}
HY4_EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "patch_size": 4, "max_image_size": 32, "out_hidden_size": 32}
STEP_EYE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
            "max_position_embeddings": 16}
SEEING: dict[str, dict[str, Any]] = {
    "glm5_next_text": {"vision_config": GLM_EYE}, "hy_v4_vl_text": {"vision_config": HY4_EYE},
    "mistral_large4_text": {"vision_config": PIXTRAL_EYE}, "muse_glimmer_text": MUSE_EYE,
    "step3p5": {"vision_config": STEP_EYE}}
"""Further entries of the whole model, by the `model_type` of the language model."""
WHOLE = {"step3p5": "step3p7"}
"""The `model_type` of the whole model, where it is not that of the language model without `_text`."""

STEP: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "share_expert_dim": 20, "moe_router_scaling_factor": 1.7,
    "num_sliding_attention_heads": 6, "query_pre_attn_scalar": 9.0, "layer_types": [
        "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "swiglu_limits": [0.0, 0.3, None, 0.0],
    "swiglu_limits_shared": [0.4, 0.2, None, 0.0], "rope_parameters": {
        "full_attention": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
                           "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
STEP_CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "step3p7": ("step3p5", {**STEP, "attention_bias": True}, None)}

# A group has 3 tokens, and a query attends to 2 of up to 7 groups. The third layer takes the choice of the second.
GLM5_NEXT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2, "num_hidden_layers": 5, "index_n_heads": 16,
    "index_head_dim": 12, "index_topk": 6, "index_kpool": 3, "swiglu_limit": 0.6, "linear_head_dim": 6,
    "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "linear_lower_bound": -3.0, "hc_mult": 3,
    "hc_sinkhorn_iters": 4, "indexer_types": ["full", "full", "shared", "full", "full"],
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention",
                    "indexed_attention"], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "dense"]}
GLM5_NEXT_CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "glm5-next": ("glm5_next_text", GLM5_NEXT, None),
    "glm5-next-plain": ("glm5_next_text", {
        **{key: value for key, value in GLM5_NEXT.items() if not key.endswith("_types")}, "num_hidden_layers": 4,
        "linear_lower_bound": None, "norm_topk_prob": False, "attention_bias": True, "index_kpool": 2}, None)}
