"""Entries of released `config.json` files that transformers does not write: those that say what a model computes anyway
are accepted, and others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from decodax.models.families import read_config
from tests.models.tiny import COMMON, MINIMAX_M3

HUNYUAN = {**COMMON, "model_type": "hunyuan_v1_moe", "head_dim": 16, "num_experts": 4, "moe_topk": [2, 1]}
GLM5 = {**COMMON, "model_type": "glm_moe_dsa", "num_hidden_layers": 6, "num_key_value_heads": 4}
M3 = {**COMMON, "model_type": "minimax_m3_vl_text", **MINIMAX_M3}
RELEASED = {key: value for key, value in M3.items() if not key.startswith("index_") and key not in (
    "layer_types", "mlp_layer_types", "rope_parameters")}
"""Entries of released files, except for those of the index."""
INDEX = {"sparse_num_index_heads": 2, "sparse_index_dim": 12, "sparse_block_size": 4, "sparse_topk_blocks": 2,
         "sparse_local_block": 1, "sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True,
         "sparse_disable_index_value": [1, 0, 1], "sparse_attention_freq": [1, 0, 1]}
FLASH = {**COMMON, "model_type": "glm5_next_text", "num_hidden_layers": 6, "num_key_value_heads": 4}
OWN = {"num_heads": 2, "head_dim": 6, "short_conv_kernel_size": 3, "gate_lower_bound": -3.0}
LING = {**COMMON, "model_type": "bailing_hybrid", "num_hidden_layers": 6, "num_key_value_heads": 4}
LAGUNA = {**COMMON, "model_type": "laguna", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
MUSE = {**COMMON, "model_type": "muse_glimmer_text", "head_dim": 16}
PLAIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (HUNYUAN, {"num_shared_expert": [1, 1], "moe_intermediate_size": [48, 48], "norm_topk_prob": True, "use_cla": False,
               "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "use_qk_norm": True, "n_group": False,
               "topk_group": False, "routed_scaling_factor": False, "group_limited_greedy": False,
               "kv_lora_rank": None}),
    (GLM5, {"indexer_types": ["full"] * 6, "index_topk_freq": 1, "indexer_rope_interleave": True}),
    ({**GLM5, "index_topk_freq": 3, "index_skip_topk_offset": 1}, {"indexer_types": ["full", "shared", "shared"] * 2}),
    ({**GLM5, "index_topk_freq": 2}, {"index_topk_pattern": "FFSFSF"}),
    (FLASH, {"layer_types": [*["linear_attention"] * 3, "full_attention", *["linear_attention"] * 2],
             "indexer_types": ["full"] * 6, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3, "head_dim": 0,
             "qk_rope_head_dim": 0, "index_kpool_always_select_tail": True, "scoring_func": "sigmoid",
             "num_nextn_predict_layers": 1, "linear_attn_config": {
                 "full_attn_layers": [4], "kda_layers": [0, 1, 2, 4, 5], "gate_lower_bound": None}}),
    ({**FLASH, "linear_num_heads": 2, "linear_head_dim": 6, "linear_conv_kernel_dim": 3, "linear_lower_bound": -3.0},
     {"linear_attn_config": OWN, "linear_num_heads": 7, "linear_lower_bound": None}),
    ({**FLASH, "linear_lower_bound": None}, {"linear_attn_config": {"safe_gate": False, "gate_lower_bound": None}}),
    (M3, {"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True, "attention_output_gate": False,
          "scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1, "hidden_act": "swigluoai",
          "num_mtp_modules": 7, "num_nextn_predict_layers": 1}),
    (LING, {"layer_group_size": 6, "num_experts": 512, "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8,
            "topk_group": 4, "head_dim": 128, "kda_safe_gate": True, "kda_lower_bound": -5.0, "rope_theta": 6e6,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"], "q_lora_rank": None, "norm_topk_prob": True,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}),
    (LAGUNA, {"gating": "per-head", "gating_types": ["per_head", "per_head"], "norm_topk_prob": True,
              "mlp_only_layers": [0], "decoder_sparse_step": 1, "mlp_layer_types": ["dense", "sparse"],
              "swa_attention_sink_enabled": False, "moe_router_use_sigmoid": True, "swa_rope_parameters": None,
              "num_attention_heads_per_layer": None, "layer_types": ["full_attention"] * 2}),
    (MUSE, {"layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [1e4, 0]}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (HUNYUAN, {"num_shared_expert": [1, 2]}, r"num_shared_expert: got \[1, 2\], supported is 1"),
    (HUNYUAN, {"moe_intermediate_size": 24}, "moe_intermediate_size: got 24, supported is 48"),
    (HUNYUAN, {"use_cla": True}, "use_cla: got True, supported is False"),
    (HUNYUAN, {"routed_scaling_factor": 2.0}, "routed_scaling_factor: got 2.0, takes false"),
    (HUNYUAN, {"moe_topk": [2]}, "moe_topk: got 1 entries for num_hidden_layers = 2"),
    ({**COMMON, "model_type": "granite_swa"}, {"layer_rope_theta": [1e4]},
     "layer_rope_theta: got 1 entries for num_hidden_layers = 2"),
    (FLASH, {"layer_types": ["linear_attention"] * 6}, "layer_types: .* takes one or more 'indexed_attention'"),
    (FLASH, {"layer_types": ["indexed_attention"]}, "layer_types: .* for each of num_hidden_layers = 6"),
    (FLASH, {"index_topk": 100}, "index_topk: got 100, takes a multiple of index_kpool = 16"),
    (FLASH, {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail: got False, supported is True"),
    (FLASH, {"qk_rope_head_dim": 64}, "qk_rope_head_dim: got 64, takes 0"),
    (FLASH, {"q_lora_rank": None}, "q_lora_rank: got None, takes the width"),
    (FLASH, {"indexer_types": ["shared"] * 6}, "got 'shared' for layer 3, takes it for layers with attention right"),
    (FLASH, {"index_topk_pattern": "FFFS"}, "index_topk_pattern: .* for num_hidden_layers = 6"),
    (FLASH, {"linear_lower_bound": 1.0}, "linear_lower_bound: got 1.0, takes a number below 0"),
    (FLASH, {"linear_attn_config": {"safe_gate": False}}, "safe_gate: got False with gate_lower_bound = -5.0"),
    (FLASH, {"linear_attn_config": {"kda_layers": [0, 1]}}, r"linear_attn_config.kda_layers: got \[0, 1\], takes"),
    (FLASH, {"topk_method": "greedy"}, "topk_method: got 'greedy', supported is 'noaux_tc'"),
    (FLASH, {"num_key_value_heads": 2}, "num_key_value_heads: got 2, supported is 4"),
    (LING, {"num_key_value_heads": 2}, "num_key_value_heads: got 2, supported is 4"),
    (LING, {"hidden_act": "gelu"}, "hidden_act: got 'gelu', supported is 'silu'"),
    (LING, {"kda_lower_bound": 1.0}, "kda_lower_bound: got 1.0, takes a number below 0"),
    (LING, {"layer_group_size": 7}, "got no layer with attention among num_hidden_layers = 6"),
    (LING, {"mlp_layer_types": ["dense"]}, "mlp_layer_types: got 1 entries for num_hidden_layers = 6"),
    (LING, {"topk_group": 9}, "groups: got 8 with kept_groups = 9"),
    (GLM5, {"index_topk_pattern": "SFFFFF"}, r"indexer_types, index_topk_pattern: got \['shared', "),
    (GLM5, {"indexer_types": ["full"]}, r"got \['full'\] for num_hidden_layers = 6"),
    (LAGUNA, {"gating": False}, "gating: got False, takes true, 'per-head' or 'per-element'"),
    (LAGUNA, {"gating_types": ["per_head", "per_element"]}, "supported is that of gating, 'per-head', everywhere"),
    (LAGUNA, {"num_attention_heads_per_layer": [4]}, "got 1 entries for num_hidden_layers = 2"),
    (LAGUNA, {"num_attention_heads_per_layer": [4, 5]}, r"got \[4, 5\], takes multiples of num_key_value_heads = 2"),
    (LAGUNA, {"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled: got True, supported is False"),
    (LAGUNA, {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input: got True"),
    (LAGUNA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     r"rope_parameters: got \['rope_theta', 'rope_type'\], takes one object for each of full_attention and sliding"),
    (LAGUNA, {"sliding_window": None}, "sliding_window: got None, takes a whole number"),
    (MUSE, {"sliding_window": None}, "sliding_window: got None, takes a whole number"),
    (MUSE, {"layer_rope_theta": [0]}, "layer_rope_theta: got 1 entries for num_hidden_layers = 2"),
    (MUSE, {"layer_rope_theta": [5e5, 0]}, r"layer_rope_theta: got \[500000.0\] with rope_theta = 10000.0, takes 0 or"),
    (GLM5, {"index_topk_pattern": "FX"}, "index_topk_pattern: got 'FX', takes a text of F and S"),
    (M3, {"hidden_act": "gelu"}, "hidden_act: got 'gelu', takes 'swigluoai', or 'silu'"),
    (M3, {"use_gemma_norm": False}, "use_gemma_norm: got False, supported is True"),
    (M3, {"attention_output_gate": True}, "attention_output_gate: got True, supported is False"),
    (M3, {"n_shared_experts": 2}, "n_shared_experts: got 2, supported is 1"),
    (M3, {"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block: got 1, supported is 0"),
    (M3, {"sparse_attention_config": {"sparse_score_type": "sum"}}, "sparse_score_type: got 'sum', supported is 'max'"),
    (M3, {"sparse_attention_config": {**INDEX, "sparse_disable_index_value": [0, 0, 1]}},
     "sparse_disable_index_value: got 0 for a layer with an index"),
    (M3, {"sparse_attention_config": {"sparse_block_size": 0}},
     "sparse_attention_config.sparse_block_size: got 0, takes a whole number from 1"),
    (M3, {"index_local_blocks": 3}, "index_local_blocks, index_topk_blocks: local: got 3, takes 0 to .* blocks, 2"),
    (M3, {"index_n_heads": 3}, "index heads: got 3, takes a divisor of heads = 4"),
    (M3, {"index_head_dim": 6}, "index_head_dim: got 6, takes at least the rotated part of a head, 8"),
    (M3, {"rotary_dim": 16}, r"rotary_dim: got 16, takes head_dim \* partial_rotary_factor = 8"),
    (M3, {"layer_types": ["minimax_m3_sparse"]}, "layer_types: got 1 entries for num_hidden_layers = 3"),
    (M3, {"layer_types": ["sliding_attention"] * 3}, "takes a list of 'full_attention' and 'minimax_m3_sparse'"),
    ({**COMMON, "model_type": "llama"}, {"index_topk_blocks": 16}, "index_topk_blocks: got 16, which a llama model"),
]


@pytest.mark.parametrize(("config", "entries"), PLAIN)
def test_entries_that_say_what_is_computed_change_nothing(config: dict[str, Any], entries: dict[str, Any]) -> None:
    assert read_config({**config, **entries}) == read_config(config)


@pytest.mark.parametrize("kind", ["minimax_m3_vl_text", "minimax_m3", None])
def test_minimax_m3_is_read_from_the_entries_of_its_release(kind: str | None) -> None:
    """The release names the entries of the index differently, has lists of 0 and 1, and no rope_parameters; its
    text_config has another model_type, or none."""
    text = {**RELEASED, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "moe_layer_freq": [1, 0, 1],
            "sparse_attention_config": INDEX, "hidden_act": "swigluoai"}
    text = {key: value for key, value in {**text, "model_type": kind}.items() if value is not None}
    assert read_config({"model_type": "minimax_m3_vl", "text_config": text, "vision_config": {}}) == read_config(M3)


@pytest.mark.parametrize(("config", "entries", "message"), REFUSED)
def test_other_values_are_refused(config: dict[str, Any], entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**config, **entries})
