"""Tiny configurations of Qwen4."""

from __future__ import annotations

from typing import Any

# A group has 3 tokens, and a query attends to 2 of up to 7 groups. A token of the prompts of tests ends a text.
QWEN4: dict[str, Any] = {
    "head_dim": 16, "num_hidden_layers": 5, "layer_types": [
        "linear_attention", "indexed_attention", "linear_attention", "linear_attention", "indexed_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    "hc_count": 3, "hc_lowrank": 10, "ple_layer_ids": [1, 4], "ple_embed_dim": 24, "ple_conv_kernel_size": 3,
    "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 3, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 6,
    "indexer_compress_ratio": 3, "output_gate_type": "sigmoid", "eos_token_id": [7, 2],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
QWEN4_CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "qwen4": ("qwen4_exp_text", QWEN4, None),
    "qwen4-plain": ("qwen4_exp_text", {
        **{key: value for key, value in QWEN4.items() if key not in ("layer_types", "output_gate_type")},
        "num_hidden_layers": 4, "ngram_size": 2, "norm_topk_prob": False, "attention_bias": True,
        "indexer_compress_ratio": 2, "full_attention_interval": 2, "ple_layer_ids": [3], "eos_token_id": 2}, None)}
