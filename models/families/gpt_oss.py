"""Decoders with attention sinks: OpenAI's GPT-OSS."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.config import DecoderConfig
from decodax.models.reading import Json, read_experts, read_layers, read_shape, with_experts
from decodax.models.routing import ClippedSwiGLU

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}
"""The scaling of the released models, which files may leave out."""


def _gpt_oss(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
         "max_position_embeddings": 131_072, **c}
    if not c.get("rope_scaling") and not c.get("rope_parameters"):
        c = {**c, "rope_scaling": YARN}
    bias = c.get("attention_bias", True)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias)
    layers = read_layers(c, shape, sliding=c.get("sliding_window", 128), slides=lambda i: i % 2 == 0)
    layers = tuple(dataclasses.replace(layer, sinks=True) for layer in layers)
    glu = ClippedSwiGLU(float(c.get("swiglu_alpha", 1.702)), float(c.get("swiglu_limit", 7.0)))
    count = c.get("num_local_experts", c.get("num_experts", 128))
    experts = read_experts(count, c.get("num_experts_per_tok", 4), shape["mlp"], score="logits", bias=True, glu=glu)
    return DecoderConfig(layers=with_experts(layers, experts), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"gpt_oss": _gpt_oss}
