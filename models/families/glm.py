"""GLM-5.3 Flash (Z.ai, 2026): Kimi Delta Attention in most layers; in the others latents without positions, and queries
that attend to groups of tokens, which an indexer chooses by pooled keys; hyper-connections and mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decodax.models.blocks.options import Layer
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.families.deepseek import check_indexed, indexer_kinds
from decodax.models.latent.shape import Indexer, Latent
from decodax.models.reading import Json, read_experts, read_kinds, read_shape, refuse_others, with_experts
from decodax.models.recurrent.options import GatedDelta
from decodax.models.residual.options import HyperConnections
from decodax.models.routing import ClippedSwiGLU

ATTENDS = ("indexed_attention", "full_attention")
DEFAULTS: dict[str, Any] = {
    "vocab_size": 154_880, "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 45, "num_attention_heads": 64, "n_shared_experts": 1, "n_routed_experts": 288,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 256, "qk_nope_head_dim": 256,
    "num_experts_per_tok": 8, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "index_topk": 2048,
    "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16, "swiglu_limit": 10.0, "linear_head_dim": 128,
    "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "hc_mult": 4, "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20}


def _glm5_next(c: Json) -> DecoderConfig:
    c = {**DEFAULTS, **c}
    refuse_others(c, num_key_value_heads=c["num_attention_heads"], hidden_act="silu", scoring_func="sigmoid",
                  topk_method="noaux_tc", moe_layer_freq=1, mlp_bias=False)
    if not c.get("index_kpool_always_select_tail", True):
        # transformers lets the first tokens of a text, which see no whole group, attend to tokens after them.
        raise ValueError("index_kpool_always_select_tail: got False, supported is True, with which each query attends "
                         "to some tokens")
    check_indexed(c)
    every, top = c["index_kpool"], c["index_topk"]
    if top % every:
        raise ValueError(f"index_topk: got {top}, takes a multiple of index_kpool = {every}")
    glu, bias = ClippedSwiGLU(1.0, float(c["swiglu_limit"]), 0.0), c.get("attention_bias", False)
    shape = read_shape(c, head_dim=c["qk_nope_head_dim"], qkv_bias=bias, out_bias=bias, glu=glu)
    eps, width = shape["norm"].eps, c["index_head_dim"]

    def attention(shared: bool) -> Layer:
        indexer = Indexer(c["index_n_heads"], width, top, shared=shared)
        latent = Latent(c["kv_lora_rank"], c["v_head_dim"], c["q_lora_rank"], eps, indexer)
        return Layer(latent=latent) if shared else Layer(latent=latent, recurrent=Pooling(every, width), beside=True)

    delta, count = Layer(recurrent=_delta(c, eps)), c["num_hidden_layers"]
    layers = tuple(delta if kind is None else attention(kind == "shared") for kind in _kinds(c, count))
    inner = c["moe_intermediate_size"]
    experts = read_experts(
        c["n_routed_experts"], c["num_experts_per_tok"], inner, c.get("norm_topk_prob", True), score="sigmoid",
        correction=True, groups=c.get("n_group", 1), kept_groups=c.get("topk_group", 1),
        scale=float(c["routed_scaling_factor"]), shared=inner * c["n_shared_experts"], glu=glu)
    first = c.get("first_k_dense_replace", 3)
    mixed = read_kinds(c, "mlp_layer_types", None, ("dense", "sparse"), lambda i: i >= first)
    streams = HyperConnections(c["hc_mult"], c["hc_sinkhorn_iters"], float(c["hc_eps"]), eps, joined="mean")
    return DecoderConfig(layers=with_experts(layers, experts, lambda i: mixed[i] == "sparse"), streams=streams, **shape)


def _delta(c: Json, eps: float) -> GatedDelta:
    """Returns the options of the gated delta rule. Released files have them in an entry of their own."""
    own: Json = c.get("linear_attn_config") or {}
    heads, width = own.get("num_heads", c["linear_num_heads"]), own.get("head_dim", c["linear_head_dim"])
    bound = own.get("gate_lower_bound", c["linear_lower_bound"])
    if own.get("safe_gate", True) is False and bound is not None:
        raise ValueError(f"safe_gate: got False with gate_lower_bound = {bound}, takes None there, for no bound")
    bound = -5.0 if bound is None and own.get("safe_gate", True) and own else bound
    return GatedDelta(heads, heads, width, width, own.get("short_conv_kernel_size", c["linear_conv_kernel_dim"]),
                      eps=eps, rank=width, floor=0.0 if bound is None else float(bound))


def _kinds(c: Json, count: int) -> list[str | None]:
    """Returns the kind of the indexer of each layer, "full" or "shared"; None for layers without attention."""
    kinds = c.get("layer_types") or ["linear_attention" if i % 4 != 3 else ATTENDS[0] for i in range(count)]
    if len(kinds) < count or not set(kinds) <= {"linear_attention", *ATTENDS}:
        raise ValueError(f"layer_types: got {kinds}, takes 'linear_attention' or 'indexed_attention' for each of "
                         f"num_hidden_layers = {count}")
    attends = [kind in ATTENDS for kind in kinds[:count]]
    if not any(attends):
        raise ValueError(f"layer_types: got {kinds[:count]} for num_hidden_layers = {count}, takes one or more "
                         "'indexed_attention'")
    for key, which in (("full_attn_layers", True), ("kda_layers", False)):
        found, own = (c.get("linear_attn_config") or {}).get(key), [i for i in range(count) if attends[i] == which]
        if found is not None and sorted(found) not in (own, [i + 1 for i in own]):
            raise ValueError(f"linear_attn_config.{key}: got {found}, takes the layers that layer_types says, {own}")
    found = [mode if here else None for mode, here in zip(indexer_kinds(c), attends, strict=False)]
    for i, mode in enumerate(found):
        # transformers hands a choice on to the next layer alone.
        if mode == "shared" and (i == 0 or found[i - 1] != "full"):
            raise ValueError(f"indexer_types, index_topk_pattern: got 'shared' for layer {i}, takes it for layers with "
                             "attention right after one that is 'full'")
    return found


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"glm5_next_text": _glm5_next}
