"""Entries of released `config.json` files that transformers does not write: those that say what a model computes anyway
are accepted, and others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from decodax.models.families import read_config
from tests.models.tiny import COMMON

HUNYUAN = {**COMMON, "model_type": "hunyuan_v1_moe", "head_dim": 16, "num_experts": 4, "moe_topk": [2, 1]}
GLM5 = {**COMMON, "model_type": "glm_moe_dsa", "num_hidden_layers": 6, "num_key_value_heads": 4}
LING = {**COMMON, "model_type": "bailing_hybrid", "num_hidden_layers": 6, "num_key_value_heads": 4}
PLAIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (HUNYUAN, {"num_shared_expert": [1, 1], "moe_intermediate_size": [48, 48], "norm_topk_prob": True, "use_cla": False,
               "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "use_qk_norm": True, "n_group": False,
               "topk_group": False, "routed_scaling_factor": False, "group_limited_greedy": False,
               "kv_lora_rank": None}),
    (GLM5, {"indexer_types": ["full"] * 6, "index_topk_freq": 1, "indexer_rope_interleave": True}),
    ({**GLM5, "index_topk_freq": 3, "index_skip_topk_offset": 1}, {"indexer_types": ["full", "shared", "shared"] * 2}),
    ({**GLM5, "index_topk_freq": 2}, {"index_topk_pattern": "FFSFSF"}),
    (LING, {"layer_group_size": 6, "num_experts": 512, "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8,
            "topk_group": 4, "head_dim": 128, "kda_safe_gate": True, "kda_lower_bound": -5.0, "rope_theta": 6e6,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"], "q_lora_rank": None, "norm_topk_prob": True,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (HUNYUAN, {"num_shared_expert": [1, 2]}, r"num_shared_expert: got \[1, 2\], supported is 1"),
    (HUNYUAN, {"moe_intermediate_size": 24}, "moe_intermediate_size: got 24, supported is 48"),
    (HUNYUAN, {"use_cla": True}, "use_cla: got True, supported is False"),
    (HUNYUAN, {"routed_scaling_factor": 2.0}, "routed_scaling_factor: got 2.0, takes false"),
    (HUNYUAN, {"moe_topk": [2]}, "moe_topk: got 1 entries for num_hidden_layers = 2"),
    ({**COMMON, "model_type": "granite_swa"}, {"layer_rope_theta": [1e4]},
     "layer_rope_theta: got 1 entries for num_hidden_layers = 2"),
    (LING, {"num_key_value_heads": 2}, "num_key_value_heads: got 2, supported is 4"),
    (LING, {"hidden_act": "gelu"}, "hidden_act: got 'gelu', supported is 'silu'"),
    (LING, {"kda_lower_bound": 1.0}, "kda_lower_bound: got 1.0, takes a number below 0"),
    (LING, {"layer_group_size": 7}, "got no layer with attention among num_hidden_layers = 6"),
    (LING, {"mlp_layer_types": ["dense"]}, "mlp_layer_types: got 1 entries for num_hidden_layers = 6"),
    (LING, {"topk_group": 9}, "groups: got 8 with kept_groups = 9"),
    (GLM5, {"index_topk_pattern": "SFFFFF"}, r"indexer_types, index_topk_pattern: got \['shared', "),
    (GLM5, {"indexer_types": ["full"]}, r"got \['full'\] for num_hidden_layers = 6"),
    (GLM5, {"index_topk_pattern": "FX"}, "index_topk_pattern: got 'FX', takes a text of F and S"),
]


@pytest.mark.parametrize(("config", "entries"), PLAIN)
def test_entries_that_say_what_is_computed_change_nothing(config: dict[str, Any], entries: dict[str, Any]) -> None:
    assert read_config({**config, **entries}) == read_config(config)


@pytest.mark.parametrize(("config", "entries", "message"), REFUSED)
def test_other_values_are_refused(config: dict[str, Any], entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**config, **entries})
