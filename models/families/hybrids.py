"""Decoders in which most layers have a gated delta rule (`decodax.models.recurrent.gated_delta`), and the others
attention: Qwen3-Next, Qwen3.5, OLMo Hybrid, and with latent attention Kimi Linear, without a rope, and Ling 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from decodax.models.blocks.options import Layer, OutputGate
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.families.deepseek import latent_decoder
from decodax.models.families.qwen import sparse_layers
from decodax.models.latent.shape import Latent
from decodax.models.reading import (
    Json,
    read_activation,
    read_experts,
    read_kinds,
    read_rope,
    read_shape,
    refuse_others,
    with_experts,
)
from decodax.models.recurrent.options import GatedDelta


def _qwen(c: Json) -> DecoderConfig:
    c = {"partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, **c}
    if not c.get("attn_output_gate", True):
        raise ValueError("attn_output_gate: got False, supported is True")
    shape = read_shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1e-6), unit_offset=True), qk_norm="head",
                       qkv_bias=c.get("attention_bias", False), out_bias=c.get("attention_bias", False),
                       head_dim=c.get("head_dim", 256))
    delta, attention = Layer(recurrent=_delta(c)), Layer(
        rope=read_rope(c, shape), output_gate=OutputGate("channels", bias=shape["qkv_bias"]))
    period = c.get("full_attention_interval", 4)
    kinds = _kinds(c, lambda i: (i + 1) % period == 0)
    return DecoderConfig(layers=tuple(attention if full else delta for full in kinds), **shape)


def _qwen3_next(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 2, "intermediate_size": 5632, **c}
    experts = read_experts(c.get("num_experts", 512), c.get("num_experts_per_tok", 10),
                           c.get("moe_intermediate_size", 512), c.get("norm_topk_prob", True),
                           shared=c.get("shared_expert_intermediate_size", 512), shared_gate=True)
    dense = _qwen(c)
    return dataclasses.replace(dense, layers=with_experts(dense.layers, experts, sparse_layers(c)))


def _qwen3_5(c: Json) -> DecoderConfig:
    return _qwen({"num_key_value_heads": 4, **c})


def _qwen3_5_moe(c: Json) -> DecoderConfig:
    width = c.get("moe_intermediate_size", 512)
    experts = read_experts(c.get("num_experts", 256), c.get("num_experts_per_tok", 8), width,
                           shared=c.get("shared_expert_intermediate_size", 512), shared_gate=True)
    dense = _qwen({"num_key_value_heads": 2, "intermediate_size": width, **c})
    return dataclasses.replace(dense, layers=with_experts(dense.layers, experts))


def _olmo_hybrid(c: Json) -> DecoderConfig:
    heads = c["num_attention_heads"]
    keys = c.get("linear_num_key_heads", heads)
    key_dim = c.get("linear_key_head_dim", int(0.75 * c["hidden_size"] / keys))
    c = {"linear_num_key_heads": keys, "linear_num_value_heads": heads, "linear_key_head_dim": key_dim,
         "linear_value_head_dim": 2 * key_dim, **c}
    bias = c.get("attention_bias", False)
    shape = read_shape(c, qk_norm="full", qkv_bias=bias, out_bias=bias)
    theta = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}.get("rope_theta", c.get("rope_theta"))
    # Released files have no rotary embedding.
    attention = Layer(rope=None if theta is None else read_rope(c, shape), block="post")
    delta = Layer(recurrent=dataclasses.replace(
        _delta(c), eps=1e-5, rate=2.0 if c.get("linear_allow_neg_eigval", True) else 1.0))
    count = c["num_hidden_layers"]
    kinds = _kinds(c, lambda i: i % 4 == 3 or (count < 4 and i + 1 == count))
    return DecoderConfig(layers=tuple(attention if full else delta for full in kinds), **shape)


def _kimi_linear(c: Json) -> DecoderConfig:
    c = {"num_experts": 256, "num_experts_per_token": 8, "moe_intermediate_size": 1024, "rms_norm_eps": 1e-5,
         "max_position_embeddings": c.get("model_max_length", 1 << 20), **c}
    refuse_others(c, mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1,
                  num_key_value_heads=c["num_attention_heads"], hidden_act="silu")
    linear = c.get("linear_attn_config") or {}
    heads, width = linear.get("num_heads", c.get("linear_num_heads", 32)), linear.get(
        "head_dim", c.get("linear_head_dim", 128))
    delta = Layer(recurrent=GatedDelta(heads, heads, width, width, linear.get(
        "short_conv_kernel_size", c.get("linear_conv_kernel_dim", 4)), eps=c["rms_norm_eps"], rank=width))
    plain, shared = c.get("qk_nope_head_dim", 128), c.get("qk_rope_head_dim", 64)
    attention = Layer(latent=Latent(c.get("kv_lora_rank", 512), c.get("v_head_dim", 128), c.get("q_lora_rank"),
                                    plain=shared))
    # Released files count layers from 1.
    full = linear.get("full_attn_layers")
    kinds = _kinds(c, lambda i: i > 0 and i % 4 == 0 if full is None else i + 1 in full)
    bias = c.get("attention_bias", False)
    shape = read_shape(c, head_dim=plain + shared, qkv_bias=bias, out_bias=bias)
    return DecoderConfig(layers=_with_experts({"routed_scaling_factor": 2.446, **c}, [
        attention if full else delta for full in kinds]), **shape)


def _bailing_hybrid(c: Json) -> DecoderConfig:
    names = {"num_experts": ("num_local_experts", 512), "num_experts_per_token": ("num_experts_per_tok", 8),
             "num_shared_experts": ("n_shared_experts", 1), "num_expert_group": ("n_group", 8),
             "moe_renormalize": ("norm_topk_prob", True), "max_position_embeddings": ("model_max_length", 262_144)}
    c = {"topk_group": 4, "moe_intermediate_size": 768, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2,
         "rms_norm_eps": 1e-6, **c, **{name: c.get(name, c.get(other, default))
                                       for name, (other, default) in names.items()}}
    heads, period = c["num_attention_heads"], c.get("layer_group_size", 6)
    refuse_others(c, num_key_value_heads=heads, hidden_act="silu")
    # In files that transformers has written, head_dim is the rotated part of a head with latents.
    width, own = c.get("linear_head_dim", c.get("head_dim", 128)), c.get("linear_num_heads", heads)
    conv = c.get("linear_conv_kernel_dim", c.get("short_conv_kernel_size", 4))
    delta = Layer(recurrent=GatedDelta(
        own, own, width, width, conv, eps=c["rms_norm_eps"], by_channel=True,
        floor=float(c.get("kda_lower_bound", -5.0)) if c.get("kda_safe_gate", True) else 0.0))
    found = latent_decoder({"rope_theta": 6e6, **c}, interleaved=True)
    attention = dataclasses.replace(found.layers[0], output_gate=OutputGate("heads"))
    kinds = _kinds(c, lambda i: (i + 1) % period == 0)
    return dataclasses.replace(found, layers=_with_experts(c, [attention if full else delta for full in kinds]))


def _with_experts(c: Json, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Returns the layers with the mixtures of Kimi Linear and Ling, in those that a `config.json` names."""
    first = c.get("first_k_dense_replace", 1)
    kinds = read_kinds(c, "mlp_layer_types", None, ("dense", "sparse"), lambda i: i >= first)
    experts = read_experts(
        c["num_experts"], c["num_experts_per_token"], c["moe_intermediate_size"], c.get("moe_renormalize", True),
        "num_experts_per_token", score="sigmoid", correction=True, groups=c.get("num_expert_group", 1),
        kept_groups=c.get("topk_group", 1), scale=float(c["routed_scaling_factor"]),
        shared=c["moe_intermediate_size"] * c.get("num_shared_experts", 1))
    return with_experts(tuple(layers), experts, lambda i: kinds[i] == "sparse")


def _delta(c: Json) -> GatedDelta:
    """Returns the options of the gated delta rule."""
    if read_activation(c, "hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: got {c['hidden_act']!r}, supported is 'silu'")
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if values % keys:
        raise ValueError(f"linear_num_value_heads: got {values}, takes a multiple of linear_num_key_heads = {keys}")
    return GatedDelta(keys, values, c["linear_key_head_dim"], c["linear_value_head_dim"],
                      c.get("linear_conv_kernel_dim", 4), eps=c.get("rms_norm_eps", 1e-6))


def _kinds(c: Json, full: Callable[[int], bool]) -> list[bool]:
    """Returns True for each layer with attention. `layer_types` in the file, if present, takes precedence over `full`,
    which returns True for the index of such a layer."""
    count, kinds = c["num_hidden_layers"], c.get("layer_types")
    if kinds is not None and (len(kinds) < count or not set(kinds) <= {"full_attention", "linear_attention"}):
        raise ValueError(f"layer_types: got {kinds}, takes 'full_attention' or 'linear_attention' for each of "
                         f"num_hidden_layers = {count}")
    found = [full(i) if kinds is None else kinds[i] == "full_attention" for i in range(count)]
    if not any(found):
        raise ValueError("layer_types, full_attention_interval or layer_group_size: got no layer with attention among "
                         f"num_hidden_layers = {count}, takes one or more")
    return found


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "bailing_hybrid": _bailing_hybrid, "kimi_linear": _kimi_linear, "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_moe_text": _qwen3_5_moe, "qwen3_5_text": _qwen3_5, "qwen3_next": _qwen3_next}
