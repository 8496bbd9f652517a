"""Decoders with mixtures of experts: a dense family, and the fields of its router (`decodax.models.routing`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.biases import SameChunk
from decodax.models.blocks.options import Layer, QueryScale
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.families import llama
from decodax.models.reading import (
    Json,
    head_width,
    read_experts,
    read_layers,
    read_rope,
    read_shape,
    rotated_layers,
    with_experts,
)


def _mixtral(c: Json) -> DecoderConfig:
    c = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **c}
    shape = read_shape(c)
    layers = read_layers(c, shape, sliding=c.get("sliding_window"))
    experts = read_experts(c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2), shape["mlp"])
    return DecoderConfig(layers=with_experts(layers, experts), **shape)


def _phimoe(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "rope_theta": 1e6, **c}
    bias = c.get("attention_bias", False)
    norm = NormConfig("layer", c.get("rms_norm_eps", 1e-5), bias=True)
    shape = read_shape(c, norm=norm, qkv_bias=bias, out_bias=bias,
                       head_bias=c.get("lm_head_bias", False))
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    if (factor := rope.get("short_mscale")) is not None:
        if rope.get("long_mscale", factor) != factor:
            raise ValueError(f"long_mscale: got {rope['long_mscale']}, supported is that of short_mscale, {factor}")
        c = {**c, "rope_parameters": {**rope, "attention_factor": factor}}
    layers = read_layers(c, shape, sliding=c.get("sliding_window"))
    experts = read_experts(c.get("num_local_experts", 16), c.get("num_experts_per_tok", 2), shape["mlp"], False,
                           score="sparsemixer", jitter=c.get("router_jitter_noise", 0.01))
    return DecoderConfig(layers=with_experts(layers, experts), **shape)


def _olmoe(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape({"rms_norm_eps": 1e-5, **c}, qkv_bias=bias, out_bias=bias, qk_norm="full",
                       qkv_clip=c.get("clip_qkv"))
    experts = read_experts(c.get("num_experts", 64), c.get("num_experts_per_tok", 8), shape["mlp"],
                           c.get("norm_topk_prob", False))
    return DecoderConfig(layers=with_experts(read_layers(c, shape), experts), **shape)


def _granitemoe(c: Json) -> DecoderConfig:
    dense = llama.FAMILIES["granite"](c)
    experts = read_experts(c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2), dense.mlp)
    return dataclasses.replace(dense, layers=with_experts(dense.layers, experts))


def _glm4_moe(c: Json) -> DecoderConfig:
    c = {"partial_rotary_factor": 0.5, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, **c}
    shape = read_shape(c, qkv_bias=c.get("attention_bias", False), qk_norm="head" if c.get("use_qk_norm") else None)
    width, first = c.get("moe_intermediate_size", 1408), c.get("first_k_dense_replace", 1)
    experts = read_experts(
        c.get("n_routed_experts", c.get("num_local_experts", 128)), c.get("num_experts_per_tok", 8), width,
        c.get("norm_topk_prob", True), score="sigmoid", correction=True, groups=c.get("n_group", 1),
        kept_groups=c.get("topk_group", 1), scale=float(c.get("routed_scaling_factor", 1.0)),
        shared=width * c.get("n_shared_experts", 1))
    return DecoderConfig(layers=with_experts(read_layers(c, shape), experts, lambda i: i >= first), **shape)


def _hy_v3(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, **c}
    bias = c.get("attention_bias", False)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False), qk_norm="head",
                       head_dim=c.get("head_dim", 128))
    width, kinds, count = c.get("moe_intermediate_size", 1536), c.get("mlp_layer_types"), c["num_hidden_layers"]
    if kinds is not None and len(kinds) < count:
        raise ValueError(f"mlp_layer_types: got {len(kinds)} entries for num_hidden_layers = {count}")
    count_experts = c.get("num_experts", c.get("num_local_experts", 192))
    experts = read_experts(count_experts, c.get("num_experts_per_tok", 8), width, score="sigmoid", correction=True,
                           scale=float(c.get("router_scaling_factor", 2.826)),
                           shared=width * c.get("num_shared_experts", 1))
    sparse = lambda i: kinds[i] == "sparse" if kinds is not None else i > 0
    return DecoderConfig(layers=with_experts(read_layers(c, shape), experts, sparse), **shape)


def _ernie4_5_moe(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 4, **c}
    dense = llama.FAMILIES["ernie4_5"](c if "head_dim" in c else {
        **c, "head_dim": head_width(c, "hidden_size", "num_attention_heads")})
    if c.get("use_bias"):
        raise ValueError("use_bias: got True, supported is False")
    width, last = c.get("moe_intermediate_size", 1536), c.get("moe_layer_end_index", -1)
    experts = read_experts(c.get("moe_num_experts", c.get("num_experts", 64)),
                           c.get("moe_k", c.get("num_experts_per_tok", 6)), width, key="moe_k", correction=True,
                           shared=width * c.get("moe_num_shared_experts", 2))
    first, step = c.get("moe_layer_start_index", 1), c.get("moe_layer_interval", 1)
    sparse = lambda i: (i + 1) % step == 0 and first <= i and (last == -1 or i <= last)
    return dataclasses.replace(dense, layers=with_experts(dense.layers, experts, sparse))


def _hunyuan_moe(c: Json) -> DecoderConfig:
    # transformers 5.24 does not read these entries of released files, and computes the model that they stand for.
    fixed = {"num_shared_expert": 1, "moe_intermediate_size": c["intermediate_size"], "norm_topk_prob": True,
             "use_cla": False, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "group_limited_greedy": False}
    for key, value in fixed.items():
        each = given if isinstance(given := c.get(key, value), list) else [given]
        if any(one != value for one in each):
            raise ValueError(f"{key}: got {given!r}, supported is {value!r}")
    dense, count, chosen = llama.FAMILIES["hunyuan_v1_dense"](c), c["num_hidden_layers"], c.get("moe_topk", 1)
    by_layer = chosen if isinstance(chosen, list) else [chosen] * count
    if len(by_layer) < count:
        raise ValueError(f"moe_topk: got {len(by_layer)} entries for num_hidden_layers = {count}")
    mixture = lambda i: read_experts(c.get("num_experts", 1), by_layer[i], dense.mlp, key="moe_topk", shared=dense.mlp)
    return dataclasses.replace(dense, layers=tuple(
        dataclasses.replace(layer, experts=mixture(i)) for i, layer in enumerate(dense.layers)))


def _llama4(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5, **c}
    bias, count, chunk = c.get("attention_bias", False), c["num_hidden_layers"], c.get("attention_chunk_size", 8192)
    normed, width = c.get("use_qk_norm", True), c["intermediate_size"]
    shape = read_shape({**c, "intermediate_size": c.get("intermediate_size_mlp", 16_384)}, qkv_bias=bias, out_bias=bias,
                       head_dim=c.get("head_dim", 128), qk_norm="head" if normed else None, qk_norm_after=True,
                       qk_norm_kind=NormConfig(eps=c["rms_norm_eps"], scaled=False) if normed else None)
    rotated = rotated_layers(c)
    kinds = c.get("layer_types") or ["chunked_attention" if turns and chunk else "full_attention" for turns in rotated]
    if len(kinds) < count:
        raise ValueError(f"layer_types: got {len(kinds)} entries for num_hidden_layers = {count}")
    if not set(kinds) <= {"full_attention", "chunked_attention"}:
        raise ValueError(f"layer_types: got {kinds}, takes a list of 'full_attention' and 'chunked_attention'")
    growth = QueryScale(float(c.get("attn_scale", 0.1)), float(c.get("floor_scale", 8192)), 1)
    rope = read_rope(c, shape, interleaved=True)
    layers = tuple(Layer(
        rope=rope if rotated[i] else None, qk_norm=bool(rotated[i]),
        query_scale=growth if c.get("attn_temperature_tuning", True) and not rotated[i] else None,
        bias=SameChunk(chunk) if kinds[i] == "chunked_attention" and chunk else None) for i in range(count))
    experts = read_experts(c.get("num_local_experts", 16), c.get("num_experts_per_tok", 1), width, False,
                           score="sigmoid", where="input", shared=width)
    step, chosen = c.get("interleave_moe_layer_step", 1), c.get("moe_layers")
    sparse = lambda i: i in chosen if chosen is not None else (i + 1) % step == 0
    return DecoderConfig(layers=with_experts(layers, experts, sparse), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "ernie4_5_moe": _ernie4_5_moe, "glm4_moe": _glm4_moe, "granitemoe": _granitemoe, "hunyuan_v1_moe": _hunyuan_moe,
    "hy_v3": _hy_v3,
    "llama4_text": _llama4, "mixtral": _mixtral, "olmoe": _olmoe, "phimoe": _phimoe}
