"""Qwen 2 and 3, dense and as mixtures, and the masked-diffusion models made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.blocks.options import Layer, in_chunks
from decodax.models.config import DecoderConfig
from decodax.models.reading import Json, head_width, read_experts, read_layers, read_shape, with_experts
from decodax.models.rope import Chunks


def _qwen2(c: Json) -> DecoderConfig:
    if "text_mask_token_id" in c:
        _unslid(c)                          # SDLM
    shape = read_shape(c, qkv_bias=True)
    return DecoderConfig(layers=_qwen_layers(c, shape), **shape)


def _qwen3(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, qk_norm="head", head_dim=c.get("head_dim", 128))
    return DecoderConfig(layers=_qwen_layers(c, shape), **shape)


def _qwen3_moe(c: Json) -> DecoderConfig:
    dense = _qwen3(c if "head_dim" in c else {**c, "head_dim": head_width(c, "hidden_size", "num_attention_heads")})
    count = c.get("num_experts", c.get("num_local_experts", 128))       # newer files have the second key
    experts = read_experts(count, c.get("num_experts_per_tok", 8), c.get("moe_intermediate_size", 768),
                       c.get("norm_topk_prob", False))
    return dataclasses.replace(dense, layers=with_experts(dense.layers, experts, sparse_layers(c)))


def _qwen_layers(c: Json, shape: Json) -> tuple[Layer, ...]:
    sliding = c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    first = c.get("max_window_layers", 28)
    layers = read_layers(c, shape, sliding=sliding, slides=lambda i: i >= first)
    if (given := c.get("dual_chunk_attention_config")) is None:
        return layers
    # For the released files of Qwen2.5-1M and Qwen3-2507; defaults are vLLM's.
    chunks = Chunks(given.get("chunk_size", 8192), given.get("local_size", 1024),
                    given.get("original_max_position_embeddings") or None)
    if sliding is not None:
        raise ValueError("use_sliding_window: got True with a dual_chunk_attention_config, takes False")
    return in_chunks(layers, chunks)


def _dream(c: Json) -> DecoderConfig:
    return _qwen2(_unslid(c))


def _sdar(c: Json) -> DecoderConfig:
    return _qwen3(_unslid(c))


def _unslid(c: Json) -> Json:
    if c.get("dual_chunk_attention_config"):
        raise ValueError("dual_chunk_attention_config: got one, takes none for a masked-diffusion model, whose "
                         "attention is bidirectional")
    if c.get("use_sliding_window"):
        raise ValueError("use_sliding_window: got True, takes False for a masked-diffusion model, whose attention is "
                         "bidirectional")
    return c


def _qwen2_moe(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 16, **c}
    shape = read_shape(c, qkv_bias=c.get("qkv_bias", True))
    sliding = c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    last = c.get("max_window_layers", 28)
    layers = read_layers(c, shape, sliding=sliding, slides=lambda i: i % 2 == 0 and i < last)
    experts = read_experts(c.get("num_experts", 60), c.get("num_experts_per_tok", 4),
                           c.get("moe_intermediate_size", 1408), c.get("norm_topk_prob", False),
                           shared=c.get("shared_expert_intermediate_size", 5632), shared_gate=True)
    return DecoderConfig(layers=with_experts(layers, experts, sparse_layers(c)), **shape)


def _qwen3_vl_moe(c: Json) -> DecoderConfig:
    count = c.get("num_experts", c.get("num_local_experts", 60))
    return _qwen3_moe({"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "rope_theta": 5e5,
                       "num_key_value_heads": 16, "tie_word_embeddings": True, **c, "norm_topk_prob": True,
                       "num_experts": count})


def sparse_layers(c: Json) -> Callable[[int], bool]:
    """Returns a function that is True for the index of a layer with a mixture of experts: every
    `decoder_sparse_step`-th layer except those in `mlp_only_layers` (entries of the `config.json` `c`)."""
    plain, step = c.get("mlp_only_layers", []), c.get("decoder_sparse_step", 1)
    return lambda i: i not in plain and (i + 1) % step == 0


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "qwen2": _qwen2, "qwen3": _qwen3, "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_vl_moe, "Dream": _dream, "Fast_dLLM_Qwen": _dream, "sdar": _sdar,
}
