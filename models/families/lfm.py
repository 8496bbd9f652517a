"""LFM2 (Liquid AI, 2025): gated short convolutions (`decodax.models.recurrent.short_conv`) in most layers, and
attention in the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import Json, read_experts, read_rope, read_shape, with_experts
from decodax.models.recurrent.options import ShortConv

LFM2 = {"num_key_value_heads": 8, "max_position_embeddings": 128_000, "rope_theta": 1e6, "norm_eps": 1e-5}


def _lfm2(c: Json) -> DecoderConfig:
    count, attending = c["num_hidden_layers"], c.get("full_attn_idxs")
    kinds = c.get("layer_types") or [
        "full_attention" if attending is None or i in attending else "conv" for i in range(count)]
    width = c.get("block_ff_dim", c.get("intermediate_size", 12_288))
    if c.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        factor, unit = c.get("block_ffn_dim_multiplier", 1.0), c.get("block_multiple_of", 256)
        width = width if factor is None else -(-int(factor * width) // unit) * unit
    return _decoder({**c, "intermediate_size": width}, kinds)


def _lfm2_moe(c: Json) -> DecoderConfig:
    c = {"intermediate_size": 7168, **c}
    first = c.get("num_dense_layers", 2)
    # The reference adds 1e-6 to the sum by which weights are divided.
    experts = read_experts(c.get("num_experts", 32), c.get("num_experts_per_tok", 4),
                           c.get("moe_intermediate_size", 1792), c.get("norm_topk_prob", True), score="sigmoid",
                           correction=c.get("use_expert_bias", True), eps=1e-6,
                           scale=float(c.get("routed_scaling_factor", 1.0)))
    dense = _decoder(c, c["layer_types"])
    return dataclasses.replace(dense, layers=with_experts(dense.layers, experts, lambda i: i >= first))


def _decoder(c: Json, kinds: list[str]) -> DecoderConfig:
    """Returns the decoder whose layers have the given kinds of block."""
    c = {**LFM2, **c}
    count = c["num_hidden_layers"]
    if len(kinds) < count or not set(kinds) <= {"conv", "full_attention"}:
        raise ValueError(f"layer_types: got {kinds}, takes 'conv' or 'full_attention' for each of num_hidden_layers = "
                         f"{count}")
    if "full_attention" not in kinds[:count]:
        raise ValueError("layer_types, full_attn_idxs: got no layer with attention, takes one or more")
    shape = read_shape(c, norm=NormConfig(eps=c["norm_eps"]), qk_norm="head",
                       tied=c.get("tie_embedding", c.get("tie_word_embeddings", True)))
    short = Layer(recurrent=ShortConv(shape["width"], c.get("conv_L_cache", 3), c.get("conv_bias", False)))
    attention = Layer(rope=read_rope(c, shape))
    return DecoderConfig(layers=tuple(short if kind == "conv" else attention for kind in kinds[:count]), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"lfm2": _lfm2, "lfm2_moe": _lfm2_moe}
