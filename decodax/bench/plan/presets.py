"""The configurations of published models by name, as in their `config.json`."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
           "rope_theta": 500_000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
           "num_key_value_heads": 8}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 128,
          "rope_theta": 1e6, "max_position_embeddings": 40_960, "tie_word_embeddings": False, "num_key_value_heads": 8}

_GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
            "sliding_window": 128, "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0, "max_position_embeddings": 131_072, "swiglu_limit": 7.0,
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
    "gemma-3-27b": {"model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 5376,
                    "intermediate_size": 21_504, "num_hidden_layers": 62, "num_attention_heads": 32,
                    "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
                    "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rms_norm_eps": 1e-6,
                    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
                    "tie_word_embeddings": True},
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "llada-8b": {"model_type": "llada", "vocab_size": 126_464, "embedding_size": 126_464, "d_model": 4096,
                 "mlp_hidden_size": 12_288, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "rope_theta": 500_000.0,
                 "max_sequence_length": 4096, "rms_norm_eps": 1e-5, "weight_tying": False, "activation_type": "silu",
                 "block_type": "llama", "mask_token_id": 126_336, "eos_token_id": 126_081, "rope": True,
                 "layer_norm_type": "rms", "include_bias": False, "include_qkv_bias": False},
}
"""The presets by name: Llama 3 (Grattafiori et al., 2024), Qwen3 (Yang et al., 2025), Gemma 3 (Gemma Team, 2025),
GPT-OSS (OpenAI, 2025), LLaDA (Nie et al., 2025). The experts of GPT-OSS are released in 4 bits: `weights="mxfp4"`."""
