"""Step 3.5 and 3.7 Flash (StepFun, 2026): a mixture of experts whose layers with a sliding window have more query heads
than the others, and a rope of their own. The output of each head has a gate. In the last layers the gated activations
of the experts, and of the shared expert, are clipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from decodax.models.blocks.options import OutputGate
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import Json, read_experts, read_layers, read_rope, read_shape, refuse_others, renamed
from decodax.models.routing import ClippedSwiGLU

FLASH: dict[str, Any] = {
    "vocab_size": 128_815, "hidden_size": 4096, "intermediate_size": 11_264, "num_hidden_layers": 45,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "n_routed_experts": 288, "moe_intermediate_size": 1280,
    "share_expert_dim": 1280, "moe_router_scaling_factor": 1.0}
SAME = {"num_attention_groups": "num_key_value_heads", "num_local_experts": "n_routed_experts",
        "moe_num_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim"}
"""Entries by their other names."""
FIXED = {"hidden_act": "silu", "mlp_bias": False, "use_head_wise_attn_gate": True, "att_impl_type": "GQA",
         "use_moe": True, "moe_router_activation": "sigmoid", "norm_expert_weight": True, "use_moe_router_bias": True,
         "zero_centered": True, "use_qk_norm": True, "use_rope_layers": [], "yarn_only_types": ["full_attention"]}
"""Entries of released files, with the values that transformers computes in any case."""
KINDS = "full_attention", "sliding_attention"


def _step3p5(c: Json) -> DecoderConfig:
    c = {**FLASH, **renamed(c, SAME)}
    refuse_others(c, **FIXED)
    if c.get("gating", True) not in (True, "per-head"):
        raise ValueError(f"gating: got {c['gating']!r}, supported is 'per-head'")
    count, bias = c["num_hidden_layers"], c.get("attention_bias", False)
    kinds, sparse = list(_each(c, "layer_types", KINDS[0])), _sparse(c)
    if (near := KINDS[1] in kinds) and c.get("sliding_window") is None:
        raise ValueError("sliding_window: got None with layers of type 'sliding_attention', takes a whole number")
    norm = NormConfig(eps=c["rms_norm_eps"], unit_offset=True)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, qk_norm="head", norm=norm)
    ropes, scale = _ropes(c, kinds), c.get("query_pre_attn_scalar", shape["head_dim"])
    far, close = ({"rope_parameters": ropes.get(kind, {})} for kind in KINDS)
    layers = read_layers({"num_hidden_layers": count, "layer_types": kinds, **far}, shape,
                         sliding=c["sliding_window"] if near else None, near=read_rope(close, shape),
                         scale=None if scale == shape["head_dim"] else float(scale) ** -0.5)
    heads = _heads(c, kinds)
    clips, shared = (_each(c, key, None) for key in ("swiglu_limits", "swiglu_limits_shared"))
    found = []
    for i, layer in enumerate(layers):
        experts = read_experts(
            c["n_routed_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"], score="sigmoid",
            correction=True, scale=float(c["moe_router_scaling_factor"]), shared=c["share_expert_dim"],
            glu=_clipped(clips[i])) if sparse[i] else None
        found.append(dataclasses.replace(layer, heads=heads[i], output_gate=OutputGate("heads"), experts=experts,
                                         glu=_clipped(shared[i])))
    return DecoderConfig(layers=tuple(found), **shape)


def _clipped(limit: float | None) -> ClippedSwiGLU | None:
    """Returns the activation with a limit, of which 0 and None stand for none."""
    return ClippedSwiGLU(1.0, float(limit), 0.0, after=True) if limit else None


def _each(c: Json, key: str, default: Any) -> list[Any]:
    """Returns the entry `key` for each layer. Released files have further ones, for layers that predict further tokens.
    """
    count, found = c["num_hidden_layers"], c.get(key)
    if found is None:
        return [default] * count
    if len(found) < count:
        raise ValueError(f"{key}: got {len(found)} entries for num_hidden_layers = {count}")
    if key.startswith("swiglu") and any(found[count:]):
        raise ValueError(f"{key}: got {found[count:]} for layers that predict further tokens, supported is 0")
    return list(found[:count])


def _sparse(c: Json) -> list[bool]:
    """Returns True for each layer with experts."""
    kinds, listed = c.get("mlp_layer_types"), c.get("moe_layers_enum")
    if kinds is not None:
        return [kind == "sparse" for kind in _each(c, "mlp_layer_types", None)]
    if isinstance(listed, str):
        listed = [int(index) for index in listed.split(",") if index.strip()]
    which = range(3, c["num_hidden_layers"]) if listed is None else listed
    return [i in which for i in range(c["num_hidden_layers"])]


def _heads(c: Json, kinds: list[str]) -> list[int | None]:
    """Returns the number of query heads of each layer; None: that of the decoder."""
    other = c.get("attention_other_setting") or {}
    near = c.get("num_sliding_attention_heads", other.get("num_attention_heads"))
    for key, name in (("head_dim", "head_dim"), ("num_attention_groups", "num_key_value_heads")):
        if other.get(key, c[name]) != c[name]:
            raise ValueError(f"attention_other_setting.{key}: got {other[key]}, supported is {c[name]}")
    if other.get("attention_type", KINDS[1]) != KINDS[1]:
        raise ValueError(f"attention_other_setting.attention_type: got {other['attention_type']!r}, supported is "
                         f"{KINDS[1]!r}")
    found = [near if kind == KINDS[1] else None for kind in kinds]
    for index, own in (c.get("per_layer_config") or {}).items():
        told = own.get("num_attention_heads") if isinstance(own, Mapping) and len(own) == 1 else None
        if not str(index).isdecimal() or int(index) >= len(kinds) or not isinstance(told, int) or told < 1:
            raise ValueError(f"per_layer_config.{index}: got {own!r}, takes a number of num_attention_heads for a "
                             f"layer below {len(kinds)}")
        if near is not None and told != (near if kinds[int(index)] == KINDS[1] else c["num_attention_heads"]):
            raise ValueError(f"per_layer_config.{index}: got {told} heads with num_sliding_attention_heads = {near}, "
                             "takes as many as this says")
        found[int(index)] = told
    groups = c["num_key_value_heads"]
    if any(own is not None and own % groups for own in found):
        raise ValueError(f"num_sliding_attention_heads: got {found}, takes multiples of num_key_value_heads = {groups}")
    return found


def _ropes(c: Json, kinds: list[str]) -> dict[str, Any]:
    """Returns the entries of the rope of each kind of layer."""
    given = c.get("rope_parameters") or {}
    if all(isinstance(given.get(kind), Mapping) for kind in kinds):
        return {kind: given[kind] for kind in kinds}
    if given:
        raise ValueError(f"rope_parameters: got {sorted(given)}, takes an object for each of {sorted(set(kinds))}")
    found: dict[str, Any] = {}
    theta = c.get("rope_theta", 10_000.0)
    each = {"rope_theta": theta if isinstance(theta, list) else [theta] * len(kinds),
            "partial_rotary_factor": c.get("partial_rotary_factors") or [1.0] * len(kinds)}
    for key, values in each.items():
        if len(values) < len(kinds):
            raise ValueError(f"{key}: got {len(values)} entries for num_hidden_layers = {len(kinds)}")
        for value, kind in zip(values, kinds, strict=False):
            if found.setdefault(kind, {}).setdefault(key, value) != value:
                raise ValueError(f"{key}: got {values}, takes the same for all layers of a kind")
    if KINDS[0] in found:
        found[KINDS[0]] |= c.get("rope_scaling") or {}
    return found


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"step3p5": _step3p5}
