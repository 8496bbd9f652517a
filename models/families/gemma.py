"""Gemma 1 to 4, Gemma 3n, RecurrentGemma, and DiffusionGemma."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from decodax.models.blocks.options import Layer
from decodax.models.config import Activation, DecoderConfig, NormConfig
from decodax.models.fields import checked
from decodax.models.reading import (
    Json,
    head_width,
    read_activation,
    read_experts,
    read_layers,
    read_period,
    read_rope,
    read_shape,
)
from decodax.models.recurrent.options import RgLru
from decodax.models.residual.options import LayerInputs, Streams
from decodax.models.rope import Rope


def _gemma_shape(c: Json, **changes: Any) -> dict[str, Any]:
    if c.get("use_bidirectional_attention"):
        raise ValueError(f"use_bidirectional_attention: got {c['use_bidirectional_attention']!r}, a decoder takes "
                         "False")
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


def _gemma4(c: Json) -> DecoderConfig:
    c = {**GEMMA4, **c}
    # "vision": the tokens of an image attend to each other. A text has none.
    if (both := c.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise ValueError(f"use_bidirectional_attention: got {both!r}, a decoder takes 'vision' or false")
    bias, double, count = c["attention_bias"], c["use_double_wide_mlp"], c["num_hidden_layers"]
    norm, width = NormConfig(eps=c.get("rms_norm_eps", 1e-6)), c["hidden_size_per_layer_input"]
    shape = read_shape(
        c, norm=norm, activation=read_activation(c, "hidden_activation", "gelu_pytorch_tanh"), block="sandwich",
        qkv_bias=bias, out_bias=bias, tied=c.get("tie_word_embeddings", True), embed_scale=c["hidden_size"] ** 0.5,
        qk_norm="head", value_norm=dataclasses.replace(norm, scaled=False), layer_scale=True,
        logit_softcap=c.get("final_logit_softcapping"),
        layer_inputs=LayerInputs(width, c["vocab_size_per_layer_input"]) if width else None)
    kinds = _kinds(c, lambda i: (i + 1) % 6 == 0 or i + 1 == count)
    kinds[-1] = "full_attention"
    heads, reads = _own_heads(c, kinds), _shared(c, kinds)
    near = {kind: _rope_of(c, kind, heads[kinds.index(kind)][0], shape) for kind in set(kinds)}
    layers = tuple(Layer(
        rope=near[kind], sliding=c["sliding_window"] if kind == "sliding_attention" else None, scale=1.0, reads=source,
        head_dim=None if wide == shape["head_dim"] else wide, kv_heads=None if groups == shape["kv_heads"] else groups,
        keys_as_values=c["attention_k_eq_v"] and kind == "full_attention" and source is None,
        mlp=2 * shape["mlp"] if double and source is not None else None)
        for kind, (wide, groups), source in zip(kinds, heads, reads, strict=True))
    if c["enable_moe_block"]:
        experts = read_experts(c["num_experts"], c["top_k_experts"], c["moe_intermediate_size"], key="top_k_experts",
                               shared=shape["mlp"], logit_scale=c["hidden_size"] ** -0.5, expert_scale=True,
                               branch_norms=True)
        layers = tuple(dataclasses.replace(layer, mlp=None, experts=dataclasses.replace(
            experts, shared=layer.mlp or shape["mlp"])) for layer in layers)
    return DecoderConfig(layers=layers, **shape)


def _kinds(c: Json, full: Callable[[int], bool]) -> list[str]:
    """Returns the type of each layer. `layer_types` in the file, if present, takes precedence over `full`, which
    returns True for the index of a layer without a sliding window."""
    count = c["num_hidden_layers"]
    kinds = c.get("layer_types") or [("sliding_attention", "full_attention")[full(i)] for i in range(count)]
    if len(kinds) < count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types: got {kinds}, takes 'full_attention' or 'sliding_attention' for each of "
                         f"num_hidden_layers = {count}")
    return list(kinds[:count])


def _own_heads(c: Json, kinds: list[str]) -> list[tuple[int, int]]:
    """Returns the width of heads and the number of key/value heads of each layer."""
    usual = {"head_dim": c["head_dim"], "num_key_value_heads": c["num_key_value_heads"]}
    far = {"head_dim": c["global_head_dim"]}
    if c["attention_k_eq_v"] and "num_global_key_value_heads" in c:
        far["num_key_value_heads"] = c["num_global_key_value_heads"]
    found = [{**usual, **far} if kind == "full_attention" else usual for kind in kinds]
    if "per_layer_config" in c:
        given: dict[int, Any] = {}
        for index, own in c["per_layer_config"].items():
            inside = f"per_layer_config.{index}"
            if not str(index).isdecimal() or int(index) >= len(kinds) or not isinstance(own, Mapping):
                raise ValueError(f"{inside}: got {own!r}, takes an object for a layer below {len(kinds)}")
            if unread := own.keys() - usual.keys():
                raise ValueError(f"{inside}: got {min(unread)}, supported are {' and '.join(usual)}")
            given[int(index)] = checked(own, f"{inside}.")
        found = [{**usual, **given.get(i, {})} for i in range(len(kinds))]
    for kind in set(kinds):
        if len(widths := {own["head_dim"] for own, other in zip(found, kinds, strict=True) if other == kind}) > 1:
            raise ValueError(f"per_layer_config: got head_dim {sorted(widths)} for layers of type {kind}, takes one")
    return [(own["head_dim"], own["num_key_value_heads"]) for own in found]


def _shared(c: Json, kinds: list[str]) -> list[int | None]:
    """Returns for each layer the index of the one whose keys and values it uses: for the last `num_kv_shared_layers`
    the last layer of their type before them, for the others None."""
    first = len(kinds) - c["num_kv_shared_layers"]
    last = {kind: i for i, kind in enumerate(kinds[:max(first, 0)])}
    if missing := set(kinds) - last.keys():
        raise ValueError(f"num_kv_shared_layers: got {c['num_kv_shared_layers']}, which leaves no layer of type "
                         f"{min(missing)} (layer_types) with keys and values of its own among num_hidden_layers = "
                         f"{len(kinds)}")
    return [last[kind] if i >= first else None for i, kind in enumerate(kinds)]


def _rope_of(c: Json, kind: str, head_dim: int, shape: Json) -> Rope:
    """Returns the rotary embedding of layers of a type."""
    own = dict({**GEMMA4["rope_parameters"], **c["rope_parameters"]}[kind])
    if own.get("rope_type", "default") == "default":
        own.pop("partial_rotary_factor", None)          # of the other types alone
    return read_rope({"rope_parameters": own}, {"head_dim": head_dim, "context": shape["context"]})


GEMMA4: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "max_position_embeddings": 131_072, "attention_bias": False, "sliding_window": 512, "attention_k_eq_v": False,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    "enable_moe_block": False, "use_double_wide_mlp": False, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}}
"""Defaults of Gemma 4."""


def _gemma4_unified(c: Json) -> DecoderConfig:
    for key in ("enable_moe_block", "hidden_size_per_layer_input"):
        if c.get(key):
            raise ValueError(f"{key}: got {c[key]!r}, which a gemma4_unified_text model does not have; takes none")
    return _gemma4({"sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0, **c})


def _diffusion_gemma(c: Json) -> DecoderConfig:
    own = {"attention_k_eq_v": True, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
           "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    if given := next((key for key, value in own.items() if key in c and c[key] != value), None):
        raise ValueError(f"{given}: got {c[given]!r}, a diffusion_gemma_text model has {own[given]!r}")
    return dataclasses.replace(_gemma4({"final_logit_softcapping": 30.0, **c, **own}), conditioned=True)


def _gemma3n(c: Json) -> DecoderConfig:
    c = {**GEMMA3N, **c}
    count, bias, width = c["num_hidden_layers"], c.get("attention_bias", False), c["hidden_size_per_layer_input"]
    several = c["intermediate_size"] if isinstance(c["intermediate_size"], list) else [c["intermediate_size"]] * count
    sparse = c.get("activation_sparsity_pattern") or [0.95 if i < 10 < count else 0.0 for i in range(count)]
    for key, found in (("intermediate_size", several), ("activation_sparsity_pattern", sparse)):
        if len(found) != count:
            raise ValueError(f"{key}: got {len(found)} entries for num_hidden_layers = {count}")
    if not width:
        raise ValueError("hidden_size_per_layer_input: got 0, takes 1 or more")
    try:
        streams = Streams(c["altup_num_inputs"], c["altup_active_idx"], c["altup_correct_scale"], c["laurel_rank"])
    except ValueError as e:
        raise ValueError(f"altup_num_inputs, altup_active_idx: {e}") from None
    norm = NormConfig(eps=c.get("rms_norm_eps", 1e-6))
    shape = read_shape(
        {**c, "intermediate_size": max(several)}, norm=norm, block="sandwich", qkv_bias=bias, out_bias=bias,
        activation=read_activation(c, "hidden_activation", "gelu_pytorch_tanh"), embed_scale=c["hidden_size"] ** 0.5,
        tied=c.get("tie_word_embeddings", True), qk_norm="head", value_norm=dataclasses.replace(norm, scaled=False),
        logit_softcap=c["final_logit_softcapping"], streams=streams,
        layer_inputs=LayerInputs(width, c["vocab_size_per_layer_input"]))
    kinds = _kinds(c, lambda i: (i + 1) % 5 == 0)
    old = {"full_attention": {"rope_theta": c.get("rope_theta", 1e6), **c.get("rope_scaling", {})},
           "sliding_attention": {"rope_theta": c.get("rope_local_base_freq", 1e4)}}
    ropes = {kind: read_rope({"rope_parameters": {**old[kind], **c.get("rope_parameters", {}).get(kind, {})}}, shape)
             for kind in old}
    layers = tuple(Layer(
        rope=ropes[kind], sliding=c["sliding_window"] if kind == "sliding_attention" else None, scale=1.0, reads=source,
        mlp=None if wide == shape["mlp"] else wide, sparsity=share)
        for kind, source, wide, share in zip(kinds, _shared(c, kinds), several, sparse, strict=True))
    return DecoderConfig(layers=layers, **shape)


GEMMA3N: dict[str, Any] = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768,
    "sliding_window": 512, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "altup_num_inputs": 4,
    "altup_active_idx": 0, "altup_correct_scale": True, "laurel_rank": 64}
"""Defaults of Gemma 3n."""


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "diffusion_gemma_text": _diffusion_gemma, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3,
    "gemma3n_text": _gemma3n, "gemma4_text": _gemma4, "gemma4_unified_text": _gemma4_unified,
    "recurrent_gemma": _recurrent_gemma,
}
