"""The configurations of published models by name, as in their `config.json`."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
           "rope_theta": 500_000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
           "num_key_value_heads": 8}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 128,
          "rope_theta": 1e6, "max_position_embeddings": 40_960, "tie_word_embeddings": False, "num_key_value_heads": 8}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163_840, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}}

_GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
            "sliding_window": 128, "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0, "max_position_embeddings": 131_072, "swiglu_limit": 7.0,
            "tie_word_embeddings": False}

_DELTA = {"vocab_size": 248_320, "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 256, "num_attention_heads": 16,
          "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
          "partial_rotary_factor": 0.25, "rope_theta": 1e7, "max_position_embeddings": 262_144,
          "tie_word_embeddings": False}

_LFM2 = {"vocab_size": 65_536, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
         "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 128_000,
         "tie_word_embeddings": True}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {**_LLAMA3, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                   "num_attention_heads": 32},
    "llama-3-70b": {**_LLAMA3, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
                    "num_attention_heads": 64},
    "qwen3-8b": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
                 "num_attention_heads": 32},
    "qwen3-32b": {**_QWEN3, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64,
                  "num_attention_heads": 64},
    "qwen3-30b-a3b": {**_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                      "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
                      "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3-next-80b-a3b": {**_DELTA, "model_type": "qwen3_next", "vocab_size": 151_936, "hidden_size": 2048,
                           "intermediate_size": 5120, "num_hidden_layers": 48, "num_key_value_heads": 2,
                           "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
                           "shared_expert_intermediate_size": 512},
    "qwen3.5-9b": {**_DELTA, "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12_288,
                   "num_hidden_layers": 32, "num_key_value_heads": 4},
    "qwen3.5-35b-a3b": {**_DELTA, "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
                        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
                        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "gemma-3-27b": {"model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 5376,
                    "intermediate_size": 21_504, "num_hidden_layers": 62, "num_attention_heads": 32,
                    "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
                    "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rms_norm_eps": 1e-6,
                    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
                    "tie_word_embeddings": True},
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "deepseek-v3": _DEEPSEEK,
    "kimi-k2": {**_DEEPSEEK, "model_type": "kimi_k2", "vocab_size": 163_840, "num_attention_heads": 64,
                "num_key_value_heads": 64, "n_routed_experts": 384, "routed_scaling_factor": 2.827, "n_group": 1,
                "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 131_072, "rope_theta": 50_000.0,
                "rope_scaling": {**_DEEPSEEK["rope_scaling"], "factor": 32.0, "beta_fast": 1.0}},
    "glm-4.7-flash": {**_DEEPSEEK, "model_type": "glm4_moe_lite", "vocab_size": 154_880, "hidden_size": 2048,
                      "intermediate_size": 10_240, "moe_intermediate_size": 1536, "num_hidden_layers": 47,
                      "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64,
                      "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
                      "first_k_dense_replace": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
                      "rms_norm_eps": 1e-5, "max_position_embeddings": 202_752, "rope_theta": 1e6,
                      "rope_scaling": None},
    "lfm2-1.2b": {**_LFM2, "model_type": "lfm2", "block_ff_dim": 12_288, "num_hidden_layers": 16,
                  "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2-8b-a1b": {**_LFM2, "model_type": "lfm2_moe", "intermediate_size": 7168, "moe_intermediate_size": 1792,
                    "num_hidden_layers": 24, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
                    "use_expert_bias": True, "norm_topk_prob": True,
                    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]},
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h", "vocab_size": 131_072, "hidden_size": 2688, "intermediate_size": 1856,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "max_position_embeddings": 262_144, "tie_word_embeddings": False},
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid", "vocab_size": 100_352, "hidden_size": 1536, "intermediate_size": 512,
        "shared_intermediate_size": 1024, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
        "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
        "position_embedding_type": "nope", "embedding_multiplier": 12, "attention_multiplier": 0.0078125,
        "logits_scaling": 6, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "tie_word_embeddings": True},
    "falcon-h1-0.5b": {
        "model_type": "falcon_h1", "vocab_size": 32_784, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "mamba_rms_norm": False, "rms_norm_eps": 1e-5, "rope_theta": 1e11, "max_position_embeddings": 16_384,
        "tie_word_embeddings": False},
    "jamba-v0.1": {
        "model_type": "jamba", "vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144,
        "tie_word_embeddings": False},
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
        "num_experts_per_token": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "model_max_length": 1_048_576, "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128,
            "short_conv_kernel_size": 4}, "tie_word_embeddings": False},
    "llada-8b": {"model_type": "llada", "vocab_size": 126_464, "embedding_size": 126_464, "d_model": 4096,
                 "mlp_hidden_size": 12_288, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "rope_theta": 500_000.0,
                 "max_sequence_length": 4096, "rms_norm_eps": 1e-5, "weight_tying": False, "activation_type": "silu",
                 "block_type": "llama", "mask_token_id": 126_336, "eos_token_id": 126_081, "rope": True,
                 "layer_norm_type": "rms", "include_bias": False, "include_qkv_bias": False},
}
"""The presets by name: Llama 3 (Grattafiori et al., 2024), Qwen3 (Yang et al., 2025), Qwen3-Next and the language
models of Qwen3.5 (Qwen Team, 2025 and 2026, as configured by transformers), Gemma 3 (Gemma Team, 2025), DeepSeek V3
(DeepSeek-AI, 2024), Kimi K2 (Kimi Team, 2025), GLM-4.7-Flash, GPT-OSS (OpenAI, 2025), LFM2 (Liquid AI, 2025),
Nemotron 3 Nano (NVIDIA, 2025), Granite 4 H (IBM, 2025), Falcon-H1 (TII, 2025; without its factors, which change no
size), Jamba (Lieber et al., 2024), Kimi Linear (Kimi Team, 2025), LLaDA (Nie et al., 2025). The experts of GPT-OSS are
released in 4 bits: `weights="mxfp4"`."""
