"""MiMo of Xiaomi: MiMo-7B, which has the layers of Qwen 2, and MiMo-V2-Flash, in which most layers have a sliding
window, attention sinks and twice as many key/value heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.config import DecoderConfig
from decodax.models.families import qwen
from decodax.models.reading import (
    Json,
    read_experts,
    read_kinds,
    read_layers,
    read_rope,
    read_shape,
    refuse_others,
    with_experts,
)


def _mimo_v2_flash(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "rms_norm_eps": c.get("layernorm_epsilon", 1e-5),
         "attention_value_scale": 0.707, "max_position_embeddings": 131_072, **c}
    _check(c)
    count, bias = c["num_hidden_layers"], c.get("attention_bias", False)
    shape = read_shape(c, qkv_bias=bias, value_dim=c["v_head_dim"], value_scale=float(c["attention_value_scale"]))
    kinds = read_kinds(c, "layer_types", c.get("hybrid_layer_pattern"), ("full_attention", "sliding_attention"),
                       lambda i: i > 0 and (i + 1) % 6 != 0)
    sparse = read_kinds(c, "mlp_layer_types", c.get("moe_layer_freq"), ("dense", "sparse"), lambda i: i > 0)
    share, new = {"partial_rotary_factor": c.get("partial_rotary_factor", 0.334)}, c.get("rope_parameters") or {}
    far = {"rope_theta": c.get("rope_theta", 5e6), **share, **new.get("full_attention", {})}
    near = {"rope_theta": c.get("swa_rope_theta", 1e4), **share, **new.get("sliding_attention", {})}
    # Released files count the positions before a query, transformers its own position, too.
    window = c["sliding_window_size"] + 1 if c.get("sliding_window_size") else c.get("sliding_window", 129)
    layers = read_layers({**c, "rope_parameters": far, "layer_types": kinds}, shape, sliding=window,
                         near=read_rope({**c, "rope_parameters": near}, shape))
    heads = c.get("swa_num_key_value_heads", 2 * shape["kv_heads"])
    layers = tuple(dataclasses.replace(layer, sinks=True, kv_heads=heads) if layer.sliding is not None else layer
                   for layer in layers)
    experts = read_experts(
        c.get("n_routed_experts", c.get("num_local_experts", 256)), c.get("num_experts_per_tok", 8),
        c.get("moe_intermediate_size", 2048), c.get("norm_topk_prob", True), score="sigmoid", correction=True,
        groups=c.get("n_group", 1), kept_groups=c.get("topk_group", 1),
        scale=float(c.get("routed_scaling_factor", 1.0)))
    return DecoderConfig(layers=with_experts(layers[:count], experts, lambda i: sparse[i] == "sparse"), **shape)


def _check(c: Json) -> None:
    """Refuses entries of released files with values that no released file has."""
    fixed = {"swa_num_attention_heads": c["num_attention_heads"], "swa_head_dim": c["head_dim"],
             "swa_v_head_dim": c["v_head_dim"], "add_swa_attention_sink_bias": True,
             "add_full_attention_sink_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    refuse_others(c, **fixed)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "mimo": qwen.FAMILIES["qwen2"], "mimo_v2_flash": _mimo_v2_flash}
