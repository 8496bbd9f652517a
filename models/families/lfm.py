"""LFM2 and LFM3 (Liquid AI, 2025 and 2026): gated short convolutions (`decodax.models.recurrent.short_conv`) in most
layers, and attention in the others, which in LFM3 has a gate for each head and in some layers a sliding window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.blocks.options import Layer, OutputGate
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import Json, read_experts, read_rope, read_shape, with_experts
from decodax.models.recurrent.options import ShortConv

LFM2 = {"num_key_value_heads": 8, "max_position_embeddings": 128_000, "rope_theta": 1e6, "norm_eps": 1e-5}
LFM3 = {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 128_000, "norm_eps": 1e-5}
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
         "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}
"""The ropes of LFM3, which files may leave out."""


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


def _lfm3(c: Json) -> DecoderConfig:
    c = {**LFM3, **c}
    kinds = c.get("layer_types") or ["full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0
                                     else "conv" for i in range(c["num_hidden_layers"])]
    bias = c.get("attention_bias", False)
    shape = read_shape(c, norm=NormConfig(eps=c["norm_eps"]), qk_norm="head", qkv_bias=bias, out_bias=bias,
                       block="sandwich" if c.get("use_sandwich_norm", True) else "pre", activation="silu",
                       head_dim=c["head_dim"], tied=c.get("tie_word_embeddings", True))
    ropes = {**ROPES, **(c.get("rope_parameters") or {})}
    of = lambda kind: read_rope({"rope_parameters": ropes[kind]}, shape)
    gate = OutputGate("heads") if c.get("use_attention_gate", True) else None
    return DecoderConfig(layers=_layers(c, kinds, {
        "conv": Layer(recurrent=ShortConv(shape["width"], c.get("conv_L_cache", 7), c.get("conv_bias", False))),
        "full_attention": Layer(of("full_attention"), output_gate=gate),
        "sliding_attention": Layer(of("sliding_attention"), c.get("sliding_window", 256), output_gate=gate)}), **shape)


def _decoder(c: Json, kinds: list[str]) -> DecoderConfig:
    """Returns the decoder whose layers have the given kinds of block."""
    c = {**LFM2, **c}
    shape = read_shape(c, norm=NormConfig(eps=c["norm_eps"]), qk_norm="head",
                       tied=c.get("tie_embedding", c.get("tie_word_embeddings", True)))
    short = Layer(recurrent=ShortConv(shape["width"], c.get("conv_L_cache", 3), c.get("conv_bias", False)))
    return DecoderConfig(layers=_layers(c, kinds, {"conv": short, "full_attention": Layer(rope=read_rope(c, shape))}),
                         **shape)


def _layers(c: Json, kinds: list[str], options: dict[str, Layer]) -> tuple[Layer, ...]:
    """Returns the layers of the given kinds, each with its options."""
    count = c["num_hidden_layers"]
    if len(kinds) < count or not set(kinds) <= set(options):
        raise ValueError(f"layer_types: got {kinds}, takes {' or '.join(map(repr, options))} for each of "
                         f"num_hidden_layers = {count}")
    if set(kinds[:count]) == {"conv"}:
        raise ValueError("layer_types, full_attn_idxs: got no layer with attention, takes one or more")
    return tuple(options[kind] for kind in kinds[:count])


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"lfm2": _lfm2, "lfm2_moe": _lfm2_moe, "lfm3": _lfm3}
