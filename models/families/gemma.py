"""Gemma 1 to 3, and RecurrentGemma."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from decodax.models.config import Activation, DecoderConfig, Layer, NormConfig
from decodax.models.reading import Json, head_width, read_activation, read_layers, read_period, read_rope, read_shape
from decodax.models.recurrent.options import RgLru


def _gemma_shape(c: Json, **changes: Any) -> dict[str, Any]:
    if c.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: got True, a decoder takes False")
    # "gelu" in the first Gemma files means the tanh form; hidden_activation, where present, says so.
    key = "hidden_activation" if "hidden_activation" in c else "hidden_act"
    act: Activation = "gelu_tanh" if c.get(key, "gelu") == "gelu" else read_activation(c, key, "gelu")
    bias = c.get("attention_bias", False)
    norm = NormConfig(eps=c.get("rms_norm_eps", 1e-6), unit_offset=True)
    return read_shape(c, norm=norm, activation=act, tied=c.get("tie_word_embeddings", True), qkv_bias=bias,
                      out_bias=bias, embed_scale=c["hidden_size"] ** 0.5, head_dim=c.get("head_dim", 256), **changes)


def _gemma(c: Json) -> DecoderConfig:
    shape = _gemma_shape(c)
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _gemma2(c: Json) -> DecoderConfig:
    shape = _gemma_shape(c, block="sandwich", attention_softcap=c.get("attn_logit_softcapping", 50.0),
                         logit_softcap=c.get("final_logit_softcapping", 30.0))
    layers = read_layers(c, shape, sliding=c.get("sliding_window", 4096), slides=lambda i: i % 2 == 0,
                         scale=c.get("query_pre_attn_scalar", 256) ** -0.5)
    return DecoderConfig(layers=layers, **shape)


def _gemma3(c: Json) -> DecoderConfig:
    c = {**GEMMA3, **c}
    shape = _gemma_shape(c, block="sandwich", qk_norm="head", attention_softcap=c.get("attn_logit_softcapping"),
                         logit_softcap=c.get("final_logit_softcapping"))
    period = read_period(c, 6)
    new = c.get("rope_parameters") or {}
    everywhere = {"rope_theta": c.get("rope_theta", 1e6), **c.get("rope_scaling", {}), **new.get("full_attention", {})}
    local = {"rope_theta": c.get("rope_local_base_freq", 1e4), **new.get("sliding_attention", {})}
    near = read_rope({**c, "rope_parameters": local, "rope_scaling": None}, shape)
    layers = read_layers({**c, "rope_parameters": everywhere}, shape, sliding=c.get("sliding_window", 4096), near=near,
                         slides=lambda i: (i + 1) % period != 0, scale=c.get("query_pre_attn_scalar", 256) ** -0.5)
    return DecoderConfig(layers=layers, **shape)


GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
          "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
"""Defaults of entries that the text_config of released multimodal files lacks."""


def _recurrent_gemma(c: Json) -> DecoderConfig:
    c = {"partial_rotary_factor": 0.5, **c}
    width, heads, count = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    norm = NormConfig(eps=c.get("rms_norm_eps", 1e-6), unit_offset=True)
    shape = read_shape(
        {**c, "intermediate_size": max(c["intermediate_size"] // 2, 1)}, norm=norm,
        activation=read_activation(c, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=c.get("attention_bias", False), tied=c.get("tie_word_embeddings", True), out_bias=True, mlp_bias=True,
        head_dim=head_width(c, "hidden_size", "num_attention_heads"), logit_softcap=c.get("logits_soft_cap", 30.0),
        # The factor is rounded to bfloat16, as in the model's training.
        embed_scale=float(jnp.asarray(width ** 0.5, jnp.bfloat16)), context=c.get("max_position_embeddings", 8192))
    lru, kinds = c.get("lru_width") or width, c.get("block_types") or ("recurrent", "recurrent", "attention")
    if lru % heads:
        raise ValueError(f"lru_width: got {lru}, takes a multiple of num_attention_heads = {heads}")
    near = Layer(read_rope(c, shape), c.get("attention_window_size", 2048))
    block = Layer(recurrent=RgLru(lru, heads, c.get("conv1d_width", 4)))
    return DecoderConfig(layers=tuple(
        block if kinds[i % len(kinds)] == "recurrent" else near for i in range(count)), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "recurrent_gemma": _recurrent_gemma,
}
