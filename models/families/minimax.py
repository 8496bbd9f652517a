"""MiniMax M2, and M3, whose queries attend to some blocks of the text, which an index chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.blocks.options import BlockIndex
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import Json, read_experts, read_kinds, read_layers, read_shape, refuse_others, with_experts
from decodax.models.routing import ClippedSwiGLU

INDEXED = "minimax_m3_sparse"
"""Name of layers with an index in `layer_types`."""

FIXED = {"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True, "attention_output_gate": False,
         "scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1}
"""Entries of released files of M3, which transformers does not write, and the values that it computes."""

SPARSE = {"index_n_heads": ("sparse_num_index_heads", 4), "index_head_dim": ("sparse_index_dim", 128),
          "index_block_size": ("sparse_block_size", 128), "index_topk_blocks": ("sparse_topk_blocks", 16),
          "index_local_blocks": ("sparse_local_block", 1)}
"""Entries of the index, their names in released files (in `sparse_attention_config`), and their defaults."""


def _minimax_m2(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "rope_theta": 5e6, **c}
    shape = read_shape(c, qk_norm="full", head_dim=c.get("head_dim", 128))
    if (turned := c.get("rotary_dim")) is not None and "partial_rotary_factor" not in c:
        if turned % 2 or turned > shape["head_dim"]:
            raise ValueError(f"rotary_dim: got {turned}, takes an even number up to head_dim = {shape['head_dim']}")
        c = {**c, "partial_rotary_factor": turned / shape["head_dim"]}
    experts = read_experts(c.get("num_local_experts", c.get("num_experts", 256)), c.get("num_experts_per_tok", 8),
                           shape["mlp"], score="sigmoid", correction=True)
    return DecoderConfig(layers=with_experts(read_layers(c, shape), experts), **shape)


def _minimax_m3(c: Json) -> DecoderConfig:
    own = c.get("sparse_attention_config") or {}
    if c.get("hidden_act", "silu") not in ("silu", "swigluoai"):
        raise ValueError(f"hidden_act: got {c['hidden_act']!r}, takes 'swigluoai', or 'silu' for the same")
    refuse_others(c, **FIXED)
    refuse_others(own, use_sparse_attention=True, sparse_score_type="max", sparse_init_block=0)
    c = {"num_key_value_heads": 4, "rope_theta": 5e6, "max_position_embeddings": 524_288,
         **{key: default for key, (_, default) in SPARSE.items()}, **c,
         **{key: own[other] for key, (other, _) in SPARSE.items() if other in own}, "hidden_act": "silu"}
    glu = ClippedSwiGLU(float(c.get("swiglu_alpha", 1.702)), float(c.get("swiglu_limit", 7.0)))
    wide = c.get("dense_intermediate_size", 12_288)
    shape = read_shape({**c, "intermediate_size": wide}, qk_norm="head", head_dim=c.get("head_dim", 128), glu=glu,
                       norm=NormConfig(eps=c.get("rms_norm_eps", 1e-6), unit_offset=True))
    kinds = read_kinds(c, "layer_types", own.get("sparse_attention_freq"), ("full_attention", INDEXED),
                       lambda i: False)
    if any(flag == 0 for flag, kind in zip(own.get("sparse_disable_index_value") or (), kinds, strict=False)
           if kind == INDEXED):
        raise ValueError("sparse_disable_index_value: got 0 for a layer with an index, supported is 1")
    sparse = read_kinds(c, "mlp_layer_types", c.get("moe_layer_freq"), ("dense", "sparse"), lambda i: True)
    layers = read_layers({key: value for key, value in c.items() if key != "layer_types"}, shape)
    rope = layers[0].rope
    assert rope is not None
    if (turned := c.get("rotary_dim", rope.width)) != rope.width:
        raise ValueError(f"rotary_dim: got {turned}, takes head_dim * partial_rotary_factor = {rope.width}")
    if c["index_head_dim"] < rope.width:
        raise ValueError(f"index_head_dim: got {c['index_head_dim']}, takes at least the rotated part of a head, "
                         f"{rope.width}")
    try:
        index = BlockIndex(c["index_n_heads"], c["index_head_dim"], c["index_block_size"], c["index_topk_blocks"],
                           c["index_local_blocks"])
    except ValueError as e:
        raise ValueError(f"index_local_blocks, index_topk_blocks: {e}") from None
    layers = tuple(dataclasses.replace(layer, index=index) if kind == INDEXED else layer
                   for layer, kind in zip(layers, kinds, strict=False))
    experts = read_experts(c.get("num_local_experts", c.get("num_experts", 128)), c.get("num_experts_per_tok", 4),
                           c["intermediate_size"], score="sigmoid", correction=True, glu=glu,
                           scale=float(c.get("routed_scaling_factor", 2.0)),
                           shared=c.get("shared_intermediate_size", 3072))
    return DecoderConfig(layers=with_experts(layers, experts, lambda i: sparse[i] == "sparse"), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "minimax_m2": _minimax_m2, "minimax_m3_vl_text": _minimax_m3}
