"""Decoders with state-space blocks, those of Mamba-2 (`decodax.models.recurrent.ssd`) or of Mamba
(`decodax.models.recurrent.selective_scan`), and attention: Nemotron-H, Granite 4, Bamba, Falcon-H1, Jamba."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import (
    Json,
    read_activation,
    read_experts,
    read_rope,
    read_shape,
    refuse_others,
    with_experts,
)
from decodax.models.recurrent.options import SelectiveScan, Ssd

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Kinds of layers of a Nemotron-H, by their letters in `hybrid_override_pattern`."""

OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers by the names in released files."""


def _nemotron_h(c: Json) -> DecoderConfig:
    c = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 21_504,
         "max_position_embeddings": 4096, **c}
    refuse_others(c, tie_word_embeddings=False, attention_bias=False, mamba_proj_bias=False, mamba_hidden_act="silu",
                  n_shared_experts=1)
    kinds, count = _nemotron_kinds(c), c.get("num_hidden_layers")
    if count is not None and count != len(kinds):
        raise ValueError(f"num_hidden_layers: got {count} with {len(kinds)} layers in layers_block_type or "
                         "hybrid_override_pattern, takes the same number")
    if c.get("sliding_window") is not None:
        raise ValueError(f"sliding_window: got {c['sliding_window']}, supported is none")
    if c.get("mlp_bias") and "moe" in kinds:
        raise ValueError("mlp_bias: got True with mixtures of experts, takes False")
    eps = c.get("layer_norm_epsilon", 1e-5)
    shape = read_shape(c, norm=NormConfig(eps=eps), gated=False, mlp_bias=c.get("mlp_bias", False),
                       activation=read_activation(c, "mlp_hidden_act", "relu2"),
                       head_dim=c.get("head_dim", c.get("attention_head_dim", 128)))
    # The reference of transformers raises steps to time_step_min, in prompts alone; the released code does not.
    ssd = Ssd(heads=c.get("mamba_num_heads", 128), head_dim=c.get("mamba_head_dim", 64), groups=c.get("n_groups", 8),
              state=c.get("ssm_state_size", 128), conv=c.get("conv_kernel", 4), chunk=c.get("chunk_size", 128), eps=eps,
              bias=c.get("use_bias", False), conv_bias=c.get("use_conv_bias", True), steps=_limit(c))
    layers = {"linear_attention": Layer(recurrent=ssd, half="attention"), "full_attention": Layer(half="attention"),
              "mlp": Layer(half="mlp")}
    if "moe" in kinds:
        layers["moe"] = Layer(half="mlp", experts=read_experts(
            c.get("n_routed_experts", 8), c.get("num_experts_per_tok", 2), c.get("moe_intermediate_size", 7688),
            c.get("norm_topk_prob", True), score="sigmoid", correction=True, groups=c.get("n_group", 1),
            kept_groups=c.get("topk_group", 1), scale=float(c.get("routed_scaling_factor", 1.0)),
            shared=c.get("moe_shared_expert_intermediate_size", 7688), latent=c.get("moe_latent_size", 0)))
    return _mixed("layers_block_type, hybrid_override_pattern", tuple(layers[kind] for kind in kinds), shape)


def _nemotron_kinds(c: Json) -> list[str]:
    """Returns the kind of each layer."""
    if (kinds := c.get("layers_block_type")) is not None:
        found = [OLDER.get(kind, kind) for kind in kinds]
    elif (pattern := c.get("hybrid_override_pattern")) is not None:
        found = [LETTERS.get(letter, letter) for letter in pattern]
    else:
        raise ValueError("layers_block_type, hybrid_override_pattern: got neither, takes one of them")
    if unknown := sorted(set(found) - set(LETTERS.values())):
        raise ValueError(f"layers_block_type, hybrid_override_pattern: got {unknown}, takes "
                         f"{', '.join(LETTERS.values())}, as letters {', '.join(LETTERS)}")
    return found


def _granitemoehybrid(c: Json) -> DecoderConfig:
    c = {"rms_norm_eps": 1e-6, "num_local_experts": 8, "num_experts_per_tok": 2, **c}
    bias, shared = c.get("attention_bias", False), c.get("shared_intermediate_size", 1024)
    shape = read_shape({**c, "intermediate_size": shared}, qkv_bias=bias, out_bias=bias,
                       embed_scale=float(c.get("embedding_multiplier", 1.0)),
                       logit_scale=1 / c.get("logits_scaling", 1.0),
                       residual_scale=float(c.get("residual_multiplier", 1.0)))
    turns = c.get("position_embedding_type", "nope")
    if turns not in ("nope", "rope"):
        raise ValueError(f"position_embedding_type: got {turns!r}, takes 'rope' or 'nope'")
    attention = Layer(rope=read_rope(c, shape) if turns == "rope" else None,
                      scale=float(c.get("attention_multiplier", 1.0)))
    kinds, count = [OLDER.get(kind, kind) for kind in c["layer_types"]], c["num_hidden_layers"]
    if len(kinds) < count or not set(kinds) <= set(OLDER.values()):
        raise ValueError(f"layer_types: got {c['layer_types']}, takes 'attention' or 'mamba' for each of "
                         f"num_hidden_layers = {count}")
    # A decoder of attention alone has no state-space block, whose entries may not fit then.
    block = Layer(recurrent=_ssd(c)) if "linear_attention" in kinds else attention
    layers = tuple(attention if kind == "full_attention" else block for kind in kinds[:count])
    if c["num_local_experts"]:
        layers = with_experts(layers, read_experts(c["num_local_experts"], c["num_experts_per_tok"],
                                                   c["intermediate_size"], shared=shared))
    return _mixed("layer_types", layers, shape)


def _bamba(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144, **c}
    bias, attends = c.get("attention_bias", False), c.get("attn_layer_indices", [])
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False))
    # The reference rotates half of each head, whatever the file says.
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {}), "partial_rotary_factor": 0.5}
    attention = Layer(rope=read_rope({**c, "rope_scaling": None, "rope_parameters": rope}, shape))
    block = Layer(recurrent=_ssd(c))
    return _mixed("attn_layer_indices", tuple(attention if i in attends else block
                                              for i in range(c["num_hidden_layers"])), shape)


def _falcon_h1(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "mamba_d_ssm": 1024, **c}
    refuse_others(c, attention_bias=False, mlp_bias=False, projectors_bias=False, mamba_proj_bias=False)
    into, out = float(c.get("attention_in_multiplier", 1.0)), float(c.get("attention_out_multiplier", 1.0))
    gate, down = _numbers(c, "mlp_multipliers", 2)
    # Attention is linear in its queries, keys and values: factors of them are factors of scores and values.
    shape = read_shape(c, embed_scale=float(c.get("embedding_multiplier", 1.0)), value_scale=into * out,
                       logit_scale=float(c.get("lm_head_multiplier", 1.0)), gate_scale=gate, mlp_scale=down)
    norm = ("norm first" if c.get("mamba_norm_before_gate", True) else "gate first") if c.get(
        "mamba_rms_norm", False) else None
    block = _ssd(c, c["mamba_d_ssm"], norm=norm, out_factor=float(c.get("ssm_out_multiplier", 1.0)), factors=tuple(
        float(c.get("ssm_in_multiplier", 1.0)) * factor for factor in _numbers(c, "ssm_multipliers", 5)))
    scale = shape["head_dim"] ** -0.5 * into * into * float(c.get("key_multiplier", 1.0))
    layer = Layer(rope=read_rope(c, shape), scale=scale, recurrent=block, beside=True)
    return DecoderConfig(layers=(layer,) * c["num_hidden_layers"], **shape)


def _jamba(c: Json) -> DecoderConfig:
    c = {"num_key_value_heads": 8, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "attn_layer_period": 8,
         "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 16, **c}
    for what in ("attn", "expert"):
        if c[f"{what}_layer_offset"] >= c[f"{what}_layer_period"]:
            raise ValueError(f"{what}_layer_offset: got {c[f'{what}_layer_offset']}, takes less than "
                             f"{what}_layer_period = {c[f'{what}_layer_period']}")
    refuse_others(c, hidden_act="silu")
    shape = read_shape(c)
    rank, width = c.get("mamba_dt_rank", "auto"), shape["width"]
    block = Layer(recurrent=SelectiveScan(
        inner=c.get("mamba_expand", 2) * width, rank=math.ceil(width / 16) if rank == "auto" else rank,
        state=c.get("mamba_d_state", 16), conv=c.get("mamba_d_conv", 4), bias=c.get("mamba_proj_bias", False),
        conv_bias=c.get("mamba_conv_bias", True), eps=c["rms_norm_eps"]))
    at = lambda what: lambda i: i % c[f"{what}_layer_period"] == c[f"{what}_layer_offset"]
    layers = tuple(Layer() if at("attn")(i) else block for i in range(c["num_hidden_layers"]))
    if c["num_experts"] > 1:
        experts = read_experts(c["num_experts"], c.get("num_experts_per_tok", 2), shape["mlp"], False)
        layers = with_experts(layers, experts, at("expert"))
    return _mixed("attn_layer_period, attn_layer_offset", layers, shape)


def _ssd(c: Json, inner: int | None = None, **options: Any) -> Ssd:
    """Returns the block of Mamba-2 from the entries that most families have; `inner` is the number of its channels,
    None: `mamba_expand` times the model's width."""
    if read_activation(c, "hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: got {c['hidden_act']!r}, supported is 'silu'")
    inner = c.get("mamba_expand", 2) * c["hidden_size"] if inner is None else inner
    heads, groups = c.get("mamba_n_heads", 128), c.get("mamba_n_groups", 1)
    width = c.get("mamba_d_head", "auto")
    width = max(inner // heads, 1) if width == "auto" else width
    if heads * width != inner:
        raise ValueError(f"mamba_n_heads: got {heads} of {width} channels, takes {inner} channels in all")
    if heads % groups:
        raise ValueError(f"mamba_n_groups: got {groups}, takes a divisor of mamba_n_heads = {heads}")
    return Ssd(heads, width, groups, c.get("mamba_d_state", 256), c.get("mamba_d_conv", 4),
               c.get("mamba_chunk_size", 256), c["rms_norm_eps"], c.get("mamba_proj_bias", False),
               c.get("mamba_conv_bias", True), _limit(c), **options)


def _limit(c: Json) -> tuple[float, float]:
    """Returns the bounds of time steps. Files have infinity as a number or as `{"__float__": "Infinity"}`."""
    given = c.get("time_step_limit", (0.0, float("inf")))
    try:
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in given)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"time_step_limit: got {given!r}, takes two numbers") from None
    if not 0 <= low <= high:
        raise ValueError(f"time_step_limit: got {given!r}, takes two numbers from 0, the smaller one first")
    return low, high


def _numbers(c: Json, key: str, count: int) -> tuple[float, ...]:
    """Returns an entry with factors."""
    found = c.get(key, [1.0] * count)
    if len(found) != count:
        raise ValueError(f"{key}: got {found}, takes {count} numbers")
    return tuple(map(float, found))


def _mixed(keys: str, layers: tuple[Layer, ...], shape: dict[str, Any]) -> DecoderConfig:
    """Returns the decoder; `keys` are the entries from which the kinds of layers are read."""
    if not any(layer.recurrent is None and layer.half != "mlp" for layer in layers):
        raise ValueError(f"{keys}: got no layer with attention, takes one or more")
    if any(layer.half for layer in layers) and not any(layer.recurrent for layer in layers):
        raise ValueError(f"{keys}: got no layer with a state-space block, takes one or more")
    return DecoderConfig(layers=layers, **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "bamba": _bamba, "falcon_h1": _falcon_h1, "granitemoehybrid": _granitemoehybrid, "jamba": _jamba,
    "nemotron_h": _nemotron_h}
