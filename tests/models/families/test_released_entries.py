"""Entries of released `config.json` files that transformers does not write: those that say what a model computes anyway
are accepted, and others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from decodax.models.families import read_config
from tests.models.tiny import COMMON

HUNYUAN = {**COMMON, "model_type": "hunyuan_v1_moe", "head_dim": 16, "num_experts": 4, "moe_topk": [2, 1]}
GLM5 = {**COMMON, "model_type": "glm_moe_dsa", "num_hidden_layers": 6, "num_key_value_heads": 4}
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
]


@pytest.mark.parametrize(("config", "entries"), PLAIN)
def test_entries_that_say_what_is_computed_change_nothing(config: dict[str, Any], entries: dict[str, Any]) -> None:
    assert read_config({**config, **entries}) == read_config(config)


@pytest.mark.parametrize(("config", "entries", "message"), REFUSED)
def test_other_values_are_refused(config: dict[str, Any], entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**config, **entries})
