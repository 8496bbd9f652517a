"""LLaDA, a masked-diffusion model with the options of OLMo's class; LLaDA-MoE and LLaDA 2, which have mixtures of
experts.

Options and defaults of the mixtures are those of the code released with them (inclusionAI/dInfer, fce4e32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import (
    Json,
    head_width,
    read_activation,
    read_experts,
    read_layers,
    read_shape,
    with_experts,
)
from decodax.models.rope import Rope

LLADA = {"alibi": (False, False), "attention_layer_norm": (False, False), "bias_for_layer_norm": (False, False),
         "block_group_size": (1, 1), "block_type": ("sequential", "llama"), "include_bias": (False, False),
         "layer_norm_type": ("default", "rms"), "layer_norm_with_affine": (True, True), "rope": (False, True)}
"""Options of LLaDA's class, which is OLMo's: the default of a missing one, and the value of the released models."""


def _llada(c: Json) -> DecoderConfig:
    for name, (default, taken) in LLADA.items():
        got = default if c.get(name) is None else c[name]
        if got != taken:
            raise ValueError(f"{name}: got {got!r}, supported is {taken!r}")
    width, heads, head_dim = c["d_model"], c["n_heads"], head_width(c, "d_model", "n_heads")
    rope = Rope(head_dim, float(c.get("rope_theta", 10_000.0)))
    return DecoderConfig(
        vocab=c.get("embedding_size") or c["vocab_size"], width=width, heads=heads, head_dim=head_dim,
        kv_heads=c.get("n_kv_heads") or (1 if c.get("multi_query_attention") else heads),
        mlp=c.get("mlp_hidden_size") or int(c.get("mlp_ratio", 4) * width), layers=(Layer(rope),) * c["n_layers"],
        context=c.get("max_sequence_length", 1024), norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)),
        activation=read_activation(c, "activation_type", "swiglu"), qkv_bias=bool(c.get("include_qkv_bias")),
        tied=c.get("weight_tying", True), embed_scale=width ** 0.5 if c.get("input_emb_norm") else 1.0,
        logit_scale=width ** -0.5 if c.get("scale_logits") else 1.0)


LLADA_MOE = {"moe_router_enable_expert_bias": (False,), "moe_router_score_function": ("softmax",),
             "norm_topk_prob": (False,), "router_num_group": (1, 0, -2), "router_topk_group": (1, 0, -2)}
"""Options of LLaDA-MoE's router with their supported values. The released code ignores the others, or adds an expert's
correction to its weight."""


def _lladamoe(c: Json) -> DecoderConfig:
    _takes(c, LLADA_MOE)
    count, kinds, bias = c["num_hidden_layers"], c["moe_layer_freq"], c.get("attention_bias", False)
    if not isinstance(kinds, list) or len(kinds) < count:
        raise ValueError(f"moe_layer_freq: got {kinds!r}, takes a list with an entry for each of num_hidden_layers = "
                         f"{count}")
    c = {"rms_norm_eps": 1e-5, "intermediate_size": c["dense_intermediate_size"], **c}
    shape = read_shape(c, qkv_bias=bias, out_bias=bias,
                       head_dim=head_width(c, "hidden_size", "num_attention_heads"),
                       qk_norm="head" if c.get("qk_layernorm") else None)
    experts = read_experts(c["num_experts"], c["num_experts_per_tok"], c["expert_intermediate_size"], False,
                           shared=c.get("shared_expert_intermediate_size") or 0)
    return DecoderConfig(layers=with_experts(read_layers(c, shape), experts, lambda i: kinds[i] != 0), **shape)


LLADA2 = {"norm_head": (False,), "norm_softmax": (False,), "score_function": ("sigmoid",), "use_rmsnorm": (True,),
          "use_sliding_window": (False,), "using_split_qkv_in_self_attention": (False,)}
"""Options of LLaDA 2 with their supported values."""


def _llada2_moe(c: Json) -> DecoderConfig:
    _takes(c, LLADA2)
    c = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 16_384, **c}
    shape = read_shape(c, qkv_bias=c.get("use_qkv_bias", False), out_bias=c.get("use_bias", True),
                       qk_norm="head" if c.get("use_qk_norm", True) else None)
    width, first, chosen = c["moe_intermediate_size"], c.get("first_k_dense_replace", 0), c["num_experts_per_tok"]
    experts = read_experts(c["num_experts"], chosen, width, chosen > 1, score="sigmoid", correction=True,
                           groups=c.get("n_group", 8), kept_groups=c.get("topk_group", 4),
                           scale=float(c.get("routed_scaling_factor", 2.5)),
                           shared=width * c.get("num_shared_experts", 0))
    return DecoderConfig(layers=with_experts(read_layers(c, shape), experts, lambda i: i >= first), **shape)


def _takes(c: Json, entries: Mapping[str, tuple[object, ...]]) -> None:
    """Refuses entries with other values than the supported ones, the first of which the error names."""
    for key, taken in entries.items():
        if key in c and c[key] not in taken:
            raise ValueError(f"{key}: got {c[key]!r}, supported is {taken[0]!r}")


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "llada": _llada, "llada2_moe": _llada2_moe, "lladamoe": _lladamoe,
}
