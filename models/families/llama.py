"""Decoders near to Llama: one MLP a layer, rotary positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from decodax.models.blocks.options import QueryScale
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import (
    Json,
    read_activation,
    read_layers,
    read_period,
    read_rope,
    read_shape,
    rotated_layers,
)
from decodax.models.rope import LinearScaling, Rope


def _llama(c: Json, **changes: Any) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, **{"qkv_bias": bias, "out_bias": bias, "mlp_bias": c.get("mlp_bias", False), **changes})
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _mistral(c: Json) -> DecoderConfig:
    shape = read_shape(c)
    return DecoderConfig(layers=read_layers(c, shape, sliding=c.get("sliding_window", 4096)), **shape)


def _phi3(c: Json) -> DecoderConfig:
    shape = read_shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)))
    return DecoderConfig(layers=read_layers(c, shape, sliding=c.get("sliding_window")), **shape)


def _olmo2(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)), block="post", qk_norm="full", qkv_bias=bias,
                       out_bias=bias)
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _olmo3(c: Json) -> DecoderConfig:
    plain, new = _olmo2(c), c.get("rope_parameters") or {}
    shape = {"head_dim": plain.head_dim, "context": plain.context}
    theta = {"rope_theta": c.get("rope_theta", 5e5)}
    everywhere = {**theta, **c.get("rope_scaling", {}), **new.get("full_attention", {})}
    near = read_rope({"rope_parameters": {**theta, **new.get("sliding_attention", {})}}, shape)
    layers = read_layers({**c, "rope_parameters": everywhere}, shape, sliding=c.get("sliding_window", 4096), near=near,
                         slides=lambda i: (i + 1) % 4 != 0)
    return dataclasses.replace(plain, layers=layers)


def _smollm3(c: Json) -> DecoderConfig:
    c = {"tie_word_embeddings": True, "rope_theta": 2e6, **c}
    rotated = rotated_layers(c)
    sliding = c.get("sliding_window") if c.get("use_sliding_window", False) else None
    plain = _llama(c)
    shape = {"head_dim": plain.head_dim, "context": plain.context}
    layers = read_layers(c, shape, sliding=sliding, slides=lambda i: not rotated[i])
    still = tuple(dataclasses.replace(layer, rope=None) for layer in layers)
    return dataclasses.replace(plain, layers=tuple((still[i], layers[i])[rotated[i]] for i in range(len(layers))))


def _glm(c: Json, **changes: Any) -> DecoderConfig:
    c = {"partial_rotary_factor": 0.5, "num_key_value_heads": 2, **c}
    shape = read_shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1.5625e-7)), qkv_bias=c.get("attention_bias", True),
                       head_dim=c.get("head_dim", 128), **changes)
    return DecoderConfig(layers=read_layers(c, shape, interleaved=True), **shape)


def _glm4(c: Json) -> DecoderConfig:
    return _glm(c, block="sandwich")


def _cohere_shape(c: Json, **changes: Any) -> dict[str, Any]:
    bias = c.get("attention_bias", False)
    return read_shape(c, norm=NormConfig("layer", c.get("layer_norm_eps", 1e-5)), block="parallel", qkv_bias=bias,
                      out_bias=bias, tied=c.get("tie_word_embeddings", True), logit_scale=c.get("logit_scale", 0.0625),
                      context=c.get("max_position_embeddings", 8192), **changes)


def _cohere(c: Json) -> DecoderConfig:
    shape = _cohere_shape(c, qk_norm="per_head" if c.get("use_qk_norm", False) else None)
    return DecoderConfig(layers=read_layers({"rope_theta": 5e5, **c}, shape, interleaved=True), **shape)


def _cohere2(c: Json) -> DecoderConfig:
    shape, period = _cohere_shape(c), read_period(c, 4)
    layers = read_layers(c, shape, sliding=c.get("sliding_window", 4096), slides=lambda i: (i + 1) % period != 0,
                         interleaved=True)
    # Only layers with a sliding window rotate.
    layers = tuple(layer if layer.sliding else dataclasses.replace(layer, rope=None) for layer in layers)
    return DecoderConfig(layers=layers, **shape)


def _phi(c: Json) -> DecoderConfig:
    if c.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings: got True, a head with a bias takes False")
    norm = NormConfig("layer", c.get("layer_norm_eps", 1e-5), bias=True)
    shape = read_shape(c, norm=norm, block="parallel", gated=False, qkv_bias=True, out_bias=True, mlp_bias=True,
                       head_bias=True, activation=read_activation(c, "hidden_act", "gelu_new"),
                       qk_norm="head" if c.get("qk_layernorm", False) else None)
    return DecoderConfig(layers=read_layers({"partial_rotary_factor": 0.5, **c}, shape), **shape)


def _stablelm(c: Json) -> DecoderConfig:
    eps = c.get("layer_norm_eps", 1e-5)
    shape = read_shape(c, norm=NormConfig("layer", eps, bias=True), qkv_bias=c.get("use_qkv_bias", False),
                       block="parallel" if c.get("use_parallel_residual", False) else "pre",
                       qk_norm="per_head" if c.get("qk_layernorm", False) else None,
                       qk_norm_kind=NormConfig("layer", eps) if c.get("qk_layernorm", False) else None)
    return DecoderConfig(layers=read_layers({"partial_rotary_factor": 0.25, **c}, shape), **shape)


def _granite(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False),
                       embed_scale=float(c.get("embedding_multiplier", 1.0)),
                       logit_scale=1 / c.get("logits_scaling", 1.0),
                       residual_scale=float(c.get("residual_multiplier", 1.0)))
    return DecoderConfig(layers=read_layers(c, shape, scale=float(c.get("attention_multiplier", 1.0))), **shape)


def _ministral3(c: Json) -> DecoderConfig:
    shape = read_shape({"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **c}, head_dim=c.get("head_dim", 128))
    if not c.get("rope_parameters") and not c.get("rope_scaling"):
        c = {**c, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
                                      "original_max_position_embeddings": 16_384, "mscale_all_dim": 1.0,
                                      "llama_4_scaling_beta": 0.1}}
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    layers = read_layers(c, shape, sliding=c.get("sliding_window"))
    if beta := rope.get("llama_4_scaling_beta", 0.0):
        growth = QueryScale(beta, rope.get("original_max_position_embeddings", shape["context"]))
        layers = tuple(dataclasses.replace(layer, query_scale=growth) for layer in layers)
    return DecoderConfig(layers=layers, **shape)


def _arcee(c: Json) -> DecoderConfig:
    return _llama({"hidden_act": "relu2", "rms_norm_eps": 1e-5, **c}, gated=False)


def _seed_oss(c: Json) -> DecoderConfig:
    shape = read_shape({"num_key_value_heads": 8, **c}, qkv_bias=c.get("attention_bias", True),
                       out_bias=c.get("attention_out_bias", False), mlp_bias=c.get("mlp_bias", False),
                       head_dim=c.get("head_dim", 128))
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _ernie4_5(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, **c}
    bias = c.get("use_bias", False)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=bias, head_dim=c.get("head_dim", 128))
    return DecoderConfig(layers=read_layers(c, shape, interleaved=True), **shape)


def _hunyuan(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape({"rms_norm_eps": 1e-5, **c}, qkv_bias=bias, out_bias=bias, qk_norm="head", qk_norm_after=True)
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    if (rope.get("rope_type") or rope.get("type")) == "dynamic" and rope.get("alpha"):
        # Called dynamic in the files, but with a factor of the base that does not depend on the length.
        width = shape["head_dim"]
        theta = (rope.get("rope_theta") or c.get("rope_theta", 1e4)) * rope["alpha"] ** (width / max(width - 2, 1))
        c = {**c, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _apertus(c: Json) -> DecoderConfig:
    c = {"rms_norm_eps": 1e-5, "rope_theta": 1.2e7, "hidden_act": "xielu", **c}
    if not c.get("rope_parameters") and not c.get("rope_scaling"):
        c = {**c, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                                   "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    return _llama(c, gated=False, mlp_bias=False, qk_norm="head")


def _nanochat(c: Json) -> DecoderConfig:
    bias, norm = c.get("attention_bias", False), NormConfig(eps=c.get("rms_norm_eps", 1e-6), scaled=False)
    shape = read_shape(c, norm=norm, qkv_bias=bias, out_bias=bias, gated=False, embed_norm=True, qk_norm="head",
                       activation=read_activation(c, "hidden_act", "relu2"), qk_norm_after=True,
                       logit_softcap=c.get("final_logit_softcapping", 15.0))

    def backwards(rope: Rope) -> Rope:
        """Turns the other way: all frequencies are divided by minus the factor."""
        if rope.scaling is not None and not isinstance(rope.scaling, LinearScaling):
            raise ValueError(f"rope_type: got {rope.scaling}, a nanochat takes default or linear")
        factor = 1.0 if rope.scaling is None else rope.scaling.factor
        return dataclasses.replace(rope, scaling=LinearScaling(-factor))

    layers = tuple(dataclasses.replace(layer, rope=backwards(layer.rope)) if layer.rope else layer
                   for layer in read_layers(c, shape))
    return DecoderConfig(layers=layers, **shape)


def _exaone4(c: Json) -> DecoderConfig:
    sliding, pattern, count = c.get("sliding_window", 4096), c.get("sliding_window_pattern", 4), c["num_hidden_layers"]
    near = (lambda i: i + 1 < count and pattern[i % len(pattern)] == "L") if isinstance(pattern, str) else (
        lambda i: (i + 1) % pattern != 0)
    shape = read_shape({"rms_norm_eps": 1e-5, **c}, block="post", qk_norm="head")
    layers = read_layers(c, shape, sliding=sliding, slides=near)
    if sliding is not None:         # then the layers that see everything do not rotate
        layers = tuple(layer if layer.sliding else dataclasses.replace(layer, rope=None) for layer in layers)
    return DecoderConfig(layers=layers, **shape)


def _nemotron(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, norm=NormConfig("layer", c.get("norm_eps", 1e-5), unit_offset=True, bias=True), qkv_bias=bias,
                       activation=read_activation(c, "hidden_act", "relu2"), gated=False, out_bias=bias,
                       mlp_bias=c.get("mlp_bias", False))
    return DecoderConfig(layers=read_layers({"partial_rotary_factor": 0.5, **c}, shape), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "apertus": _apertus, "arcee": _arcee, "cohere": _cohere, "cohere2": _cohere2, "ernie4_5": _ernie4_5,
    "exaone4": _exaone4, "glm": _glm, "glm4": _glm4, "granite": _granite, "hunyuan_v1_dense": _hunyuan, "llama": _llama,
    "ministral": _mistral, "ministral3": _ministral3, "mistral": _mistral, "nanochat": _nanochat, "nemotron": _nemotron,
    "olmo2": _olmo2, "olmo3": _olmo3, "phi": _phi, "phi3": _phi3, "seed_oss": _seed_oss, "smollm3": _smollm3,
    "stablelm": _stablelm}
