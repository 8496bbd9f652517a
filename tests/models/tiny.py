"""Tiny configurations of every family, as transformers writes them: the cases of the model tests.

torch and transformers are imported where they are used, since the collectives of tests of meshes crash beside torch.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.models.families.released import released
from tests.models.families.tiny_qwen4 import QWEN4_CASES
from tests.models.families.tiny_seeing import GLM5_NEXT_CASES, SEEING, STEP_CASES, WHOLE

if TYPE_CHECKING:
    import transformers

COMMON = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2}
SMALL_WINDOW = {"sliding_window": 5}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
YARN_MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=2.0, mscale=1.0,
                   mscale_all_dim=0.5, truncate=False)
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
       "v_head_dim": 10, "num_hidden_layers": 3, "moe_intermediate_size": 24, "n_routed_experts": 8,
       "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
         "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
          "shared_expert_intermediate_size": 20}
GEMMA4 = {**SMALL_WINDOW, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "layer_types": [
    "sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 2.0}
KIMI = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
        "num_hidden_layers": 3, "linear_head_dim": 6, "linear_num_heads": 2, "moe_intermediate_size": 24,
        "num_experts_per_token": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LING = {"num_key_value_heads": 4, "num_hidden_layers": 3, "layer_group_size": 2, "head_dim": 6, "kv_lora_rank": 16,
        "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "moe_intermediate_size": 24,
        "num_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "attention_bias": True, "kda_lower_bound": -3.0}
NEMOTRON = {"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6,
            "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 24, "num_hidden_layers": None,
            "moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 1.7}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 1, "mamba_chunk_size": 8}
GRANITE_H = {**MAMBA2, "num_hidden_layers": 3, "embedding_multiplier": 6.0, "logits_scaling": 2.0,
             "layer_types": ["linear_attention", "full_attention", "linear_attention"], "residual_multiplier": 0.4,
             "attention_multiplier": 0.2, "shared_intermediate_size": 20, "intermediate_size": 24}
DSA = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "index_n_heads": 16, "index_head_dim": 12,
       "index_topk": 6}
LONGCAT = {**{key: value for key, value in MLA.items() if "expert" not in key}, "num_hidden_layers": 4, "head_dim": 8,
           "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 4, "expert_ffn_hidden_size": 24,
           "routed_scaling_factor": 1.7}
HY4 = {**MLA, **{key: value for key, value in DSA.items() if key.startswith("index")}, "rms_norm_eps": 0.05,
       "hc_mult": 3, "hc_magnitude": 1.6, "hc_eps": 0.04, "swiglu_limit": 0.6}
# A block is half as long as the windows of the tests, and of five blocks a query attends to two or three.
MINIMAX_M3 = {"head_dim": 16, "rotary_dim": 8, **rope("default", partial_rotary_factor=0.5), "num_hidden_layers": 3,
              "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "dense_intermediate_size": 40,
              "shared_intermediate_size": 20, "swiglu_alpha": 1.3, "swiglu_limit": 1.5, "index_n_heads": 2,
              "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 2,
              "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
              "mlp_layer_types": ["sparse", "dense", "sparse"]}
LARGE = {**{key: value for key, value in MLA.items() if key != "q_lora_rank"}, **DSA, "num_hidden_layers": 6,
         "attention_bias": True, "n_group": 2, "final_logit_softcapping": 4.0, "no_rope_layers": [1, 1, 0, 1, 0, 1],
         "kv_source_layers": [0, 0, 2, 0, 2, 5], "indexer_types": ["full", "full", "shared", "shared", "full", "full"],
         **rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.0)}
GRANITE_SWA = {"num_hidden_layers": 3, "layer_rope_theta": [0, 1e4, 5e5], "embedding_multiplier": 6.0,
               "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
V4 = {"num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 12, "moe_intermediate_size": 24,
      "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "o_groups": 2, "o_lora_rank": 6,
      "hc_mult": 3, "hc_sinkhorn_iters": 4, "compress_rates": {
          "compressed_sparse_attention": 2, "heavily_compressed_attention": 5}, "index_n_heads": 16,
      "index_head_dim": 12, "index_topk": 3, "swiglu_limit": 0.6, "num_hash_layers": 1, "num_hidden_layers": 4,
      "intermediate_size": 24, "layer_types": ["sliding_attention", "compressed_sparse_attention",
                                                 "heavily_compressed_attention", "compressed_sparse_attention"]}
FALCON_H1 = {"mamba_d_ssm": 24, "head_dim": 16, "key_multiplier": 0.6, "lm_head_multiplier": 0.7,
             "embedding_multiplier": 3.0, "mlp_multipliers": [0.9, 0.6], "attention_out_multiplier": 0.8,
             "attention_in_multiplier": 1.2, "ssm_multipliers": [0.4, 0.6, 0.7, 0.5, 0.9], "ssm_in_multiplier": 1.3,
             "ssm_out_multiplier": 0.7}
LAGUNA = {**SMALL_WINDOW, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
          "shared_expert_intermediate_size": 20, "moe_routed_scaling_factor": 1.7}
MUSE = {**SMALL_WINDOW, "head_dim": 16, "num_hidden_layers": 3, "rms_norm_eps": 0.05, "post_norm_eps": 0.3,
        "qk_scale_factor": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 2.0}
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 3.0, 6.0]}

# name: (model_type, options on top of COMMON, `context` for load_model)
CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, None),
    "gpt2-inverse-layer": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 40,
                                    "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}, None),
    "llama": ("llama", {}, None),
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                                  "head_dim": 16}, None),
    "llama-linear": ("llama", rope("linear", factor=3.0), None),
    "llama-dynamic": ("llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": 16}, 22),
    "llama3": ("llama", LLAMA3, None),
    "llama-yarn": ("llama", YARN, None),
    "llama-yarn-mscale": ("llama", YARN_MSCALE, None),
    "mistral": ("mistral", SMALL_WINDOW, None),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, None),
    "qwen2-sliding": ("qwen2", {**SMALL_WINDOW, "use_sliding_window": True, "max_window_layers": 1}, None),
    "qwen3": ("qwen3", {"head_dim": 16}, None),
    "qwen3-bias": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}, None),
    "gemma": ("gemma", {"head_dim": 16}, None),
    "gemma2": ("gemma2", {**SMALL_WINDOW, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5,
                          "final_logit_softcapping": 2.0}, None),
    "gemma3": ("gemma3_text", {**SMALL_WINDOW, "head_dim": 16, "query_pre_attn_scalar": 24,
                               "layer_types": ["sliding_attention", "full_attention"],
                               "rope_parameters": {
                                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, None),
    "phi3": ("phi3", SMALL_WINDOW, None),
    "phi3-longrope-short": ("phi3", {**rope("longrope", **LONGROPE), "original_max_position_embeddings": 32}, None),
    "phi3-longrope-long": ("phi3", {**rope("longrope", **LONGROPE), "original_max_position_embeddings": 16}, 22),
    "phi3-partial": ("phi3", {**rope("default", partial_rotary_factor=0.5), "head_dim": 8}, None),
    "olmo2": ("olmo2", {}, None),
    "stablelm": ("stablelm", {}, None),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True,
                                       **rope("default", partial_rotary_factor=0.5)}, None),
    "olmo3": ("olmo3", {**SMALL_WINDOW, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
        "full_attention": {**YARN["rope_parameters"], "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, None),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}, None),
    "smollm3-sliding": ("smollm3", {**SMALL_WINDOW, "use_sliding_window": True, "num_hidden_layers": 3,
                                    "no_rope_layer_interval": 2, "attention_bias": True}, None),
    "glm": ("glm", {"head_dim": 16}, None),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}, None),
    "cohere": ("cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 1.0}, None),
    "cohere2": ("cohere2", {**SMALL_WINDOW, "logit_scale": 0.3, "num_hidden_layers": 3, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}, None),
    "phi": ("phi", {"tie_word_embeddings": False, **rope("default", partial_rotary_factor=0.5)}, None),
    "phi-qk-norm": ("phi", {"qk_layernorm": True, "num_key_value_heads": None}, None),
    "ministral": ("ministral", {**SMALL_WINDOW, "head_dim": 16, "layer_types": [
        "full_attention", "sliding_attention"]}, None),
    "granite": ("granite", {"embedding_multiplier": 6.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2}, None),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, None),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False,
                                "moe_intermediate_size": 24, "num_hidden_layers": 3, "mlp_only_layers": [1]}, None),
    "qwen3-moe-normed": ("qwen3_moe", {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2,
                                       "norm_topk_prob": True, "moe_intermediate_size": 20, "num_hidden_layers": 2,
                                       "decoder_sparse_step": 2}, None),
    "gpt-neox": ("gpt_neox", {}, None),
    "recurrent-gemma": ("recurrent_gemma", {"attention_window_size": 5, "lru_width": 32, "num_hidden_layers": 3}, None),
    "gpt-neox-serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False,
                                     **rope("linear", factor=2.0, partial_rotary_factor=0.5)}, None),
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}, None),
    "opt": ("opt", {"ffn_dim": 48}, None),
    "opt-plain-norms": ("opt", {"ffn_dim": 40, "enable_bias": False, "layer_norm_elementwise_affine": False,
                                "activation_function": "quick_gelu", "tie_word_embeddings": False}, None),
    "falcon": ("falcon", {"ffn_hidden_size": 48}, None),
    "falcon-40b": ("falcon", {"ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2}, None),
    "falcon-11b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, None),
    "falcon-rw": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
                             "num_attention_heads": 8}, None),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, None),
    "bloom-six-heads": ("bloom", {"n_layer": 2, "n_head": 6, "hidden_size": 48, "tie_word_embeddings": False}, None),
    "starcoder2": ("starcoder2", SMALL_WINDOW, None),
    "starcoder2-plain": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}, None),
    "nemotron": ("nemotron", {"head_dim": 16}, None),
    "nemotron-bias": ("nemotron", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, None),
    "arcee": ("arcee", {}, None),
    "seed-oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}, None),
    "exaone4": ("exaone4", {**SMALL_WINDOW, "num_hidden_layers": 3, "sliding_window_pattern": 3}, None),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, None),
    "hunyuan-dense": ("hunyuan_v1_dense", {"head_dim": 16, "attention_bias": True,
                                           **rope("dynamic", alpha=4.0, factor=1.0)}, None),
    "ernie4.5": ("ernie4_5", {"head_dim": 16, "use_bias": True}, None),
    "apertus": ("apertus", LLAMA3, None),
    "nanochat": ("nanochat", {"final_logit_softcapping": 2.0}, None),
    "ministral3": ("ministral3", {"head_dim": 16, **rope("yarn", factor=4.0, original_max_position_embeddings=8,
                                                         mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3,
                                                         max_position_embeddings=64)}, None),
    "qwen2-moe": ("qwen2_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}, None),
    "qwen2-moe-normed": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                       "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
                                       "qkv_bias": False}, None),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.7}, None),
    "phimoe": ("phimoe", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True,
                          "router_jitter_noise": 0.3}, None),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "embedding_multiplier": 6.0, "logits_scaling": 2.0,
                                   "residual_multiplier": 0.4, "attention_multiplier": 0.2}, None),
    "glm4-moe": ("glm4_moe", {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                              "topk_group": 2, "moe_intermediate_size": 24, "n_shared_experts": 2,
                              "routed_scaling_factor": 2.5, "num_hidden_layers": 3, "use_qk_norm": True}, None),
    "minimax-m2": ("minimax_m2", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
                   None),
    "minimax-m3": ("minimax_m3_vl_text", MINIMAX_M3, None),
    # One index head for two key/value heads, and two local blocks.
    "minimax-m3-local": ("minimax_m3_vl_text", {
        **MINIMAX_M3, "num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["sparse"] * 2, "index_n_heads": 1, "index_block_size": 3,
        "index_topk_blocks": 3, "index_local_blocks": 2}, None),
    "hy3": ("hy_v3", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, None),
    "ernie4.5-moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}, None),
    "gpt-oss": ("gpt_oss", {**SMALL_WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "swiglu_limit": 1.5, **rope("yarn", factor=4.0, original_max_position_embeddings=16,
                                                        truncate=False)}, None),
    "mimo-v2-flash": ("mimo_v2_flash", {
        **SMALL_WINDOW, "head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}}, None),
    "hunyuan-moe": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 1],
                                       **rope("dynamic", alpha=4.0, factor=1.0)}, None),
    "granite-swa": ("granite_swa", {**SMALL_WINDOW, **GRANITE_SWA, "mlp_bias": True, "attention_bias": True}, None),
    "granite-moe-swa": ("granitemoe_swa", {**SMALL_WINDOW, **GRANITE_SWA, "num_local_experts": 4,
                                           "shared_intermediate_size": 20}, None),
    "laguna": ("laguna", {
        **LAGUNA, "num_hidden_layers": 3, "num_attention_heads_per_layer": [4, 6, 8], "layer_types": [
            "full_attention", "sliding_attention", "sliding_attention"], "moe_router_logit_softcapping": 1.5,
        "rope_parameters": {"full_attention": {**YARN["rope_parameters"], "partial_rotary_factor": 0.5},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, None),
    "laguna-channels": ("laguna", {**LAGUNA, "gating": "per-element", "attention_bias": True,
                                   "mlp_layer_types": ["sparse", "dense"], "tie_word_embeddings": True}, None),
    "muse-glimmer": ("muse_glimmer_text", {**MUSE, "attention_bias": True}, None),
    "muse-glimmer-ropes": ("muse_glimmer_text", {**MUSE, "num_hidden_layers": 2, "layer_rope_theta": [0, 1e4],
                                                 "layer_types": ["sliding_attention", "full_attention"]}, None),
    "llama4": ("llama4_text", {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 40, "floor_scale": 6,
                               "attention_chunk_size": 5, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1],
                               "interleave_moe_layer_step": 2}, None),
    "deepseek-v2": ("deepseek_v2", {**MLA, **YARN_MSCALE, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
                                    "topk_method": "group_limited_greedy"}, None),
    "deepseek-v2-lite": ("deepseek_v2", {**MLA, "q_lora_rank": None, "attention_bias": True}, None),
    "deepseek-v3": ("deepseek_v3", {**MLA, **YARN_MSCALE, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
                                    "num_mtp_layers": 0}, None),
    "deepseek-v3-halves": ("deepseek_v3", {**MLA, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                                           "q_lora_rank": None, "rope_interleave": False, "attention_bias": True,
                                           "norm_topk_prob": False}, None),
    "deepseek-v32": ("deepseek_v32", {**MLA, **YARN_MSCALE, **DSA}, None),
    "glm5": ("glm_moe_dsa", {**MLA, **DSA, "indexer_types": ["full", "shared", "full"], "attention_bias": True}, None),
    **GLM5_NEXT_CASES, **STEP_CASES,
    "deepseek-v4": ("deepseek_v4", {**V4, **rope("yarn", factor=4.0, original_max_position_embeddings=16)}, None),
    "glm4-moe-lite": ("glm4_moe_lite", MLA, None),
    "longcat-flash": ("longcat_flash", {**LONGCAT, "attention_bias": True, **YARN_MSCALE}, None),
    "longcat-flash-plain": ("longcat_flash", {**LONGCAT, "zero_expert_num": 0, "num_hidden_layers": 2}, None),
    "hy4": ("hy_v4", {**HY4, "attention_bias": True, **YARN_MSCALE}, None),
    "hy4-vl": ("hy_v4_vl_text", {
        **HY4, "indexer_types": ["full", "shared", "full"], "n_group": 4, "topk_group": 2, "mlp_layer_types": [
            "sparse", "dense", "sparse"], **rope("default", mrope_section=[2, 1, 1])}, None),
    "mistral4": ("mistral4", {**MLA, **rope("yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0,
                                            mscale_all_dim=1.0, llama_4_scaling_beta=0.3,
                                            max_position_embeddings=64)}, None),
    "mistral-large4": ("mistral_large4_text", LARGE, None),
    "mistral-large4-plain": ("mistral_large4_text", {
        key: value for key, value in {**LARGE, "num_hidden_layers": 2, "no_rope_layer_interval": 2}.items()
        if key not in ("no_rope_layers", "kv_source_layers", "indexer_types", "attention_bias")}, None),
    "youtu": ("youtu", {key: value for key, value in MLA.items() if "expert" not in key and key not in (
        "moe_intermediate_size", "routed_scaling_factor")}, None),
    # Which layers rotate does not decide which ones attend in chunks.
    "llama4-types": ("llama4_text", {"head_dim": 8, "num_local_experts": 4, "floor_scale": 6, "attention_chunk_size": 5,
                                     "num_hidden_layers": 3, "no_rope_layers": [1, 0, 0], "layer_types": [
                                         "full_attention", "full_attention", "chunked_attention"]}, None),
    "llama4-top2": ("llama4_text", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                                    "use_qk_norm": False, "attention_chunk_size": None, "floor_scale": 6}, None),
    "qwen3-next": ("qwen3_next", {**DELTA, **SHARED, "head_dim": 16, "mlp_only_layers": [0]}, None),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "head_dim": 16}, None),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **SHARED, "head_dim": 16, "num_hidden_layers": 2,
                                         "layer_types": DELTA["layer_types"][:2]}, None),
    **QWEN4_CASES,
    "olmo-hybrid": ("olmo_hybrid", DELTA, None),
    "gemma4": ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                               "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}, None),
    "gemma3n": ("gemma3n_text", {
        **SMALL_WINDOW, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": [48, 40, 48, 48],
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 90, "altup_num_inputs": 3,
        "altup_active_idx": 1, "laurel_rank": 5, "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.9],
        "final_logit_softcapping": 2.0}, None),
    "gemma4-moe": ("gemma4_text", {**GEMMA4, "num_hidden_layers": 3, "layer_types": GEMMA4["layer_types"][1:],
                                   "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "attention_bias": True,
                                   "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
                                   "top_k_experts": 2, "moe_intermediate_size": 24}, None),
    "gemma4-unified": ("gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": True, "num_kv_shared_layers": 2,
                                               "tie_word_embeddings": False}, None),
    "olmo-hybrid-rope": ("olmo_hybrid", {**DELTA, "linear_num_key_heads": 4, "linear_allow_neg_eigval": False,
                                         **rope("default")}, None),
    "kimi-linear": ("kimi_linear", {**KIMI, "num_experts": 4, "num_expert_group": 2, "topk_group": 2}, None),
    "kimi-linear-query": ("kimi_linear", {**KIMI, "q_lora_rank": 12, "num_experts": 4, "mlp_layer_types": [
        "sparse", "dense", "dense"]}, None),
    "ling3": ("bailing_hybrid", LING, None),
    "ling3-plain": ("bailing_hybrid", {**LING, "q_lora_rank": None, "kda_safe_gate": False, "attention_bias": False,
                                       "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                                       "mlp_layer_types": ["sparse", "dense", "dense"]}, None),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                      "block_multiple_of": 12}, None),
    "lfm2-bias": ("lfm2", {"full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False,
                           "block_auto_adjust_ff_dim": False}, None),
    "lfm2-moe": ("lfm2_moe", {"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3,
                              "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 24, "routed_scaling_factor": 1.7}, None),
    "lfm3": ("lfm3", {**SMALL_WINDOW, "layer_types": ["conv", "full_attention", "sliding_attention"],
                      "num_hidden_layers": 3, "head_dim": 16, "attention_bias": True}, None),
    "lfm3-plain": ("lfm3", {"layer_types": ["full_attention", "conv"], "head_dim": 8, "conv_bias": True,
                            "conv_L_cache": 4, "use_sandwich_norm": False, "use_attention_gate": False,
                            "tie_word_embeddings": False}, None),
    "nemotron-h": ("nemotron_h", {**NEMOTRON, "layers_block_type": [
        "linear_attention", "moe", "full_attention", "linear_attention", "moe"]}, None),
    "nemotron-h-dense": ("nemotron_h", {
        **NEMOTRON, "use_bias": True, "mlp_bias": True, "routed_scaling_factor": 1.0,
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp"]}, None),
    "nemotron-h-latent": ("nemotron_h", {**NEMOTRON, "moe_latent_size": 12, "n_group": 2, "layers_block_type": [
        "moe", "full_attention", "linear_attention"]}, None),
    "granite-h": ("granitemoehybrid", {**GRANITE_H, "num_local_experts": 4}, None),
    "granite-h-micro": ("granitemoehybrid", {**GRANITE_H, "num_local_experts": 0, "mamba_n_groups": 2,
                                             "tie_word_embeddings": True}, None),
    "granite-4-micro": ("granitemoehybrid", {**GRANITE_H, "num_local_experts": 0, "position_embedding_type": "rope",
                                             "layer_types": ["full_attention"] * 3}, None),
    "bamba": ("bamba", {**MAMBA2, "num_hidden_layers": 2, "attn_layer_indices": [1]}, None),
    "falcon-h1": ("falcon_h1", {**MAMBA2, **FALCON_H1}, None),
    "falcon-h1-norm": ("falcon_h1", {**MAMBA2, **FALCON_H1, "mamba_rms_norm": True, "mamba_n_groups": 2}, None),
    "falcon-h1-gate-first": ("falcon_h1", {**MAMBA2, **FALCON_H1, "mamba_rms_norm": True,
                                           "mamba_norm_before_gate": False, "num_hidden_layers": 1}, None),
    "jamba": ("jamba", {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
                        "mamba_d_state": 6, "mamba_dt_rank": 3}, None),
    "jamba-dense": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 0, "num_experts": 1, "mamba_d_state": 4,
                              "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}, None),
}


ALIKE = {"arcee", "deepseek-v2-lite", "deepseek-v3-halves", "youtu", "ernie4.5", "exaone4-full", "falcon", "falcon-11b",
         "glm", "gpt-neox-serial", "granite-moe", "granite-moe-swa", "hunyuan-moe", "hy3", "hy4-vl", "llama4-top2",
         "longcat-flash-plain",
         "minimax-m3-local", "llama4-types", "nemotron-bias", "opt-plain-norms", "qwen2-moe-normed", "seed-oss",
         "starcoder2-plain", "llama-linear", "llama-yarn", "ministral", "phi-qk-norm", "qwen3-bias", "qwen3-moe-normed",
         "smollm3", "stablelm", "qwen3.5-moe", "olmo-hybrid-rope", "gemma4-moe", "gemma4-unified", "kimi-linear-query",
         "laguna-channels", "lfm2-bias", "lfm2-moe", "lfm3-plain", "muse-glimmer-ropes", "nemotron-h-dense",
         "nemotron-h-latent", "granite-h-micro", "granite-4-micro", "bamba", "falcon-h1-norm", "falcon-h1-gate-first",
         "jamba-dense", "mistral-large4-plain", "ling3-plain", "glm5-next-plain",
         "qwen4-plain"}
"""Cases that differ little from another one."""


def build(name: str, seed: int = 0, **more: Any) -> transformers.PreTrainedModel:
    """The case's transformers model with random weights, norms and biases included."""
    import torch
    import transformers

    kind, options, _ = copy.deepcopy(CASES[name])       # transformers adds entries to nested ones
    entries = {**COMMON, **options, **more}
    if kind in SEEING:     # transformers 5.24 has it inside a model that sees images alone
        entries = {"text_config": entries, **copy.deepcopy(SEEING[kind])}
        kind = WHOLE.get(kind, kind.removesuffix("_text"))
    config = transformers.AutoConfig.for_model(kind, **entries)
    torch.manual_seed(seed)
    # With eager attention transformers 5.24 adds Falcon's ALiBi twice, to the scores and to the mask.
    attention = "sdpa" if options.get("alibi") else "eager"
    if kind == "mistral4":      # the text part of Mistral Small 4, which transformers 5.24 has under no Auto class
        config._attn_implementation = attention
        model = transformers.Mistral4ForCausalLM(config).eval()
    else:
        auto = getattr(transformers, f"AutoModelFor{'ImageTextToText' if 'text_config' in entries else 'CausalLM'}")
        model = auto.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in model.parameters():
            # wide enough that a wrong norm, scale or window shows in the logits
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.ndim == 1 else 0.0))
        for name, buffer in model.named_buffers():
            if any(part in name for part in ("correction", "expert_bias", "layer_scalar")):
                buffer.copy_(torch.randn_like(buffer) * 0.2 + ("layer_scalar" in name))
            if "tid2eid" in name:
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort(1)[:, :buffer.shape[1]])
    return model


def saved(name: str, directory: Path, **options: Any) -> transformers.PreTrainedModel:
    model = build(name)
    write(model, directory, **options)
    return model


def write(model: transformers.PreTrainedModel, directory: Path, **options: Any) -> None:
    """Saves a model under the names of released files; the options are those of transformers."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(directory, **options)
    if model.config.model_type == "olmo_hybrid":
        save_file(released(model), directory / "model.safetensors", {"format": "pt"})
    if model.config.model_type == "kimi_linear":
        # transformers 5.24 also gives dense MLPs the name that released files have for mixtures
        file = directory / "model.safetensors"
        tensors = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): x for name, x in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
