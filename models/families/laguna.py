"""Laguna (Poolside, 2026): a mixture of experts whose layers with a sliding window have more query heads than the
others, and a rope of their own. The output of each head has a softplus gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.blocks.options import OutputGate
from decodax.models.config import DecoderConfig
from decodax.models.families.qwen import sparse_layers
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

ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
         "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}}
"""The ropes that files may leave out."""

FIXED = {"norm_topk_prob": True, "moe_router_use_sigmoid": True, "moe_apply_router_weight_on_input": False,
         "swa_attention_sink_enabled": False, "swa_rope_parameters": None}
"""Entries of released files, with the values that transformers computes in any case."""


def _laguna(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, **c}
    refuse_others(c, **FIXED)
    count, bias, heads = c["num_hidden_layers"], c.get("attention_bias", False), c.get("num_attention_heads_per_layer")
    if heads is not None and len(heads) < count:
        raise ValueError(f"num_attention_heads_per_layer: got {len(heads)} entries for num_hidden_layers = {count}")
    if any(own % c["num_key_value_heads"] for own in heads or ()):
        raise ValueError(f"num_attention_heads_per_layer: got {heads}, takes multiples of num_key_value_heads = "
                         f"{c['num_key_value_heads']}")
    given = c.get("rope_parameters") or {}
    if not set(given) <= set(ROPES):
        raise ValueError(f"rope_parameters: got {sorted(set(given) - set(ROPES))}, takes one object for each of "
                         f"{' and '.join(ROPES)}")
    if c.get("sliding_window", 512) is None:
        raise ValueError("sliding_window: got None, takes a whole number")
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, qk_norm="head")
    far, near = ({"rope_parameters": {**ROPES, **given}[kind]} for kind in ROPES)
    layers = read_layers({"layer_types": c.get("layer_types"), "num_hidden_layers": count, **far}, shape,
                         sliding=c.get("sliding_window", 512), slides=lambda i: False, near=read_rope(near, shape))
    layers = tuple(dataclasses.replace(layer, output_gate=_gate(c), heads=None if heads is None else heads[i])
                   for i, layer in enumerate(layers))
    experts = read_experts(
        c.get("num_experts", c.get("num_local_experts", 256)), c.get("num_experts_per_tok", 8),
        c.get("moe_intermediate_size", 512), score="sigmoid", correction=True,
        scale=float(c.get("moe_routed_scaling_factor", 1.0)), softcap=float(c.get("moe_router_logit_softcapping", 0.0)),
        shared=c.get("shared_expert_intermediate_size", 512))
    sparse = read_kinds(c, "mlp_layer_types", None, ("dense", "sparse"), sparse_layers({"mlp_only_layers": [0], **c}))
    return DecoderConfig(layers=with_experts(layers, experts, lambda i: sparse[i] == "sparse"), **shape)


def _gate(c: Json) -> OutputGate:
    """Returns the gate of each layer. Released files name it for each layer, too."""
    gating = {True: "per-head"}.get(c.get("gating", True), c.get("gating"))
    if any(kind.replace("_", "-") != gating for kind in c.get("gating_types") or ()):
        raise ValueError(f"gating_types: got {c['gating_types']}, supported is that of gating, {gating!r}, everywhere")
    return OutputGate("heads" if gating == "per-head" else "channels", "softplus")


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"laguna": _laguna}
