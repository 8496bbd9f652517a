"""The configurations of published models by name, as in their `config.json`."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
           "rope_theta": 500_000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
           "num_key_value_heads": 8}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 128,
          "rope_theta": 1e6, "max_position_embeddings": 40_960, "tie_word_embeddings": False, "num_key_value_heads": 8}

_DELTA = {"vocab_size": 248_320, "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 256, "num_attention_heads": 16,
          "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
          "partial_rotary_factor": 0.25, "rope_theta": 1e7, "max_position_embeddings": 262_144,
          "tie_word_embeddings": False}

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
    "llada-8b": {"model_type": "llada", "vocab_size": 126_464, "embedding_size": 126_464, "d_model": 4096,
                 "mlp_hidden_size": 12_288, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "rope_theta": 500_000.0,
                 "max_sequence_length": 4096, "rms_norm_eps": 1e-5, "weight_tying": False, "activation_type": "silu",
                 "block_type": "llama", "mask_token_id": 126_336, "eos_token_id": 126_081, "rope": True,
                 "layer_norm_type": "rms", "include_bias": False, "include_qkv_bias": False},
}
"""The presets by name: Llama 3 (Grattafiori et al., 2024), Qwen3 (Yang et al., 2025), Qwen3-Next and the language
models of Qwen3.5 (Qwen Team, 2025 and 2026, as configured by transformers), Gemma 3 (Gemma Team, 2025), LLaDA (Nie et
al., 2025)."""
