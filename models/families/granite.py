"""Granite with sliding windows (Granite Swash; IBM, 2026): Granite's decoder with attention sinks in every layer, and
rotary frequencies that differ between layers, or none. Dense, and as a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from decodax.models.config import DecoderConfig
from decodax.models.families import llama
from decodax.models.reading import Json, read_experts, read_layers, read_rope, with_experts


def _granite_swa(c: Json) -> DecoderConfig:
    return _decoder({"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
                     "max_position_embeddings": 8192, **c})


def _granitemoe_swa(c: Json) -> DecoderConfig:
    dense = _decoder(c)
    experts = read_experts(c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2), dense.mlp,
                           shared=c.get("shared_intermediate_size", 0))
    return dataclasses.replace(dense, layers=with_experts(dense.layers, experts))


def _decoder(c: Json) -> DecoderConfig:
    plain, count = llama.FAMILIES["granite"](c), c["num_hidden_layers"]
    shape = {"head_dim": plain.head_dim, "context": plain.context}
    layers = read_layers(c, shape, sliding=c.get("sliding_window", 128), slides=lambda i: i % 4 != 0,
                         scale=float(c.get("attention_multiplier", 1.0)))
    bases = c.get("layer_rope_theta")
    if bases is not None and len(bases) < count:
        raise ValueError(f"layer_rope_theta: got {len(bases)} entries for num_hidden_layers = {count}")
    entries = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    ropes = [layer.rope for layer in layers] if bases is None else [
        read_rope({**c, "rope_parameters": {**entries, "rope_theta": base}}, shape) if base else None
        for base in bases]
    return dataclasses.replace(plain, layers=tuple(
        dataclasses.replace(layer, rope=rope, sinks=True) for layer, rope in zip(layers, ropes, strict=False)))


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "granite_swa": _granite_swa, "granitemoe_swa": _granitemoe_swa}
