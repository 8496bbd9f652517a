"""The language model of Muse Glimmer (Meta, 2026): normed embeddings, queries and keys without a learned scale, and
three layers with a sliding window and a rope before each layer with neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.blocks.options import OutputGate
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import Json, read_activation, read_layers, read_shape


def _muse_glimmer(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, **c}
    count, eps, bias = c["num_hidden_layers"], c["rms_norm_eps"], c.get("attention_bias", False)
    if c.get("sliding_window", 2048) is None:
        raise ValueError("sliding_window: got None, takes a whole number")
    plain = NormConfig(eps=eps, scaled=False)
    shape = read_shape(
        c, norm=NormConfig(eps=eps, unit_offset=True), block="sandwich",
        out_norm_kind=NormConfig(eps=c.get("post_norm_eps", 1e-8), unit_offset=True),
        last_norm_kind=NormConfig(eps=eps), embed_norm=True, embed_norm_kind=plain, qk_norm="head", qk_norm_kind=plain,
        qkv_bias=bias, out_bias=bias, activation=read_activation(c, "hidden_activation", "silu"),
        logit_scale=float(c.get("output_multiplier", 0.19611613513818404)),
        logit_softcap=c.get("final_logit_softcapping", 20.0))
    apart = lambda i: (count - 1 - i) % 4 == 0      # counted from the last layer
    layers = read_layers(c, shape, sliding=c.get("sliding_window", 2048), slides=lambda i: not apart(i),
                         scale=c.get("qk_scale_factor", 3.87) * shape["head_dim"] ** -0.5)
    bases = c.get("layer_rope_theta")
    if bases is not None and len(bases) < count:
        raise ValueError(f"layer_rope_theta: got {len(bases)} entries for num_hidden_layers = {count}")
    turns = [not apart(i) for i in range(count)] if bases is None else [base != 0 for base in bases]
    theta = layers[0].rope.theta if layers[0].rope is not None else None
    if bases is not None and (others := {base for base in bases if base not in (0, theta)}):
        # transformers rotates all layers by the base of rope_parameters.
        raise ValueError(f"layer_rope_theta: got {sorted(others)} with rope_theta = {theta}, takes 0 or that for each "
                         "layer")
    gate = OutputGate("channels")
    return DecoderConfig(layers=tuple(
        dataclasses.replace(layer, output_gate=gate, rope=layer.rope if turns[i] else None)
        for i, layer in enumerate(layers)), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"muse_glimmer_text": _muse_glimmer}
