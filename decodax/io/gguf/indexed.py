"""Architectures of llama.cpp for families that choose what a query attends to, or read several residual streams:
DeepSeek V4, GLM-5.3, Hunyuan Hy4 and MiniMax M3; and Ling 3.0, whose recurrent layers are those of GLM-5.3."""

from __future__ import annotations

from typing import Any

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.gguf.hybrids import INDEXER, LATENT, attending, by_channel, choosing, indexed, latent
from decodax.io.gguf.metadata import Architecture, Metadata
from decodax.io.gguf.shared import CORRECTION, SHARED, depth, experts, routed
from decodax.io.gguf.views import CHANNELS, KEYS_AND_VALUES, Stored
from decodax.models.config import DecoderConfig

SCORES = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}
"""Names of the scores of experts by `expert_gating_func`."""

PARTS = ("fn", "base", "scale")
LAYER_STREAMS = {f"{ours}.{part}": f"{theirs}_{part}.weight" for part in PARTS
                 for ours, theirs in (("attn_hc", "hc_attn"), ("mlp_hc", "hc_ffn"))}
ALL_STREAMS = LAYER_STREAMS | {f"streams.{part}": f"output_hc_{part}.weight" for part in PARTS}
SINKS = {"attn.sinks": "attn_sinks.weight"}
INDEX = {f"attn.index.{ours}": f"indexer.{theirs}" for ours, theirs in (
    ("q", "q_proj"), ("k", "k_proj"), ("q_norm", "q_norm"), ("k_norm", "k_norm"))}
POOLS = {f"attn.pool.{ours}": theirs for ours, theirs in (
    ("values", "attn_compressor_kv"), ("scores", "attn_compressor_gate"), ("norm", "attn_compressor_norm"),
    ("bias", "attn_compressor_ape.weight"), ("index_values", "indexer_compressor_kv"),
    ("index_scores", "indexer_compressor_gate"), ("index_norm", "indexer_compressor_norm"),
    ("index_bias", "indexer_compressor_ape.weight"), ("index_q", "indexer.attn_q_b"),
    ("index_weigh", "indexer.proj"))}


def _hyper(m: Metadata) -> dict[str, Any]:
    """Returns the entries of hyper-connections."""
    return {"hc_mult": m.count("hyper_connection.count"), "hc_eps": m.need("hyper_connection.epsilon")}


def _limit(m: Metadata) -> dict[str, Any]:
    """Returns the bound of the experts' activations."""
    bounds = {m.get(f"swiglu_clamp_{part}", 0.0) for part in ("exp", "shexp")}
    if len(bounds) > 1:
        raise CheckpointError(f"{m.file.path}: {m.name}.swiglu_clamp_exp, swiglu_clamp_shexp: got {sorted(bounds)}, "
                              "takes the same bound for single and shared experts")
    return {"swiglu_limit": bounds.pop()}


def _deepseek_v4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    count, ratios = depth(m, c)["num_hidden_layers"], m.file.metadata.get(f"{m.name}.attention.compress_ratios", ())
    own = {k: v for k, v in c.items() if k != "partial_rotary_factor"}
    return {**own, **depth(m, c), **experts(m, "n_routed_experts"), **_hyper(m), **_limit(m), **indexed(m),
            "model_type": "deepseek_v4", "qk_rope_head_dim": m.need("rope.dimension_count"),
            "q_lora_rank": m.need("attention.q_lora_rank"), "sliding_window": m.need("attention.sliding_window"),
            "n_shared_experts": m.need("expert_shared_count"), "norm_topk_prob": m.get("expert_weights_norm", False),
            "routed_scaling_factor": m.get("expert_weights_scale", 1.0),
            "scoring_func": SCORES.get(which := m.get("expert_gating_func", 4), str(which)),
            "o_groups": m.need("attention.output_group_count"), "o_lora_rank": m.need("attention.output_lora_rank"),
            "compress_ratios": np.ravel(ratios).tolist()[:count], "num_hash_layers": m.get("hash_layer_count", 0),
            "compress_rope_theta": m.need("attention.compress_rope_freq_base"),
            "hc_sinkhorn_iters": m.need("hyper_connection.sinkhorn_iterations")}


def _unclipped(m: Metadata, *parts: str) -> None:
    """Checks that files bound no activations of single ("exp") or shared ("shexp") experts."""
    for part in parts:
        if any(bounds := m.each(f"swiglu_clamp_{part}", 0)):
            raise CheckpointError(f"{m.file.path}: {m.name}.swiglu_clamp_{part}: got {bounds}, takes 0 for all layers")


def _hy4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    _unclipped(m, "shexp")
    # llama.cpp turns neighbouring channels, and takes the layers' divisor for norms of latents: the model with images.
    return {**choosing(m, c), **_hyper(m), "model_type": "hy_v4_vl_text",
            "hc_magnitude": m.need("hyper_connection.magnitude"), "swiglu_limit": m.get("swiglu_clamp_exp", 0.0)}


def _glm5_next(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**choosing(m, c), **by_channel(m, c), **_hyper(m), **_limit(m),
            "model_type": "glm5_next_text", "linear_lower_bound": m.get("kda.gate_lower_bound"),
            "hc_sinkhorn_iters": m.need("hyper_connection.sinkhorn_iterations"),
            "index_kpool": m.need("attention.indexer.kpool"),
            "index_kpool_always_select_tail": m.get("attention.indexer.kpool_select_tail", True),
            "layer_types": ["indexed_attention" if here else "linear_attention"
                            for here in attending(m)[:depth(m, c)["num_hidden_layers"]]]}


LING = {"norm_topk_prob": "moe_renormalize", "n_routed_experts": "num_experts", "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts"}
"""Names of entries in Ling 3, by those of most families."""


def _ling3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    _unclipped(m, "exp", "shexp")
    return {**latent(m, c), **{LING.get(key, key): value for key, value in routed(m).items()}, **by_channel(m, c),
            "model_type": "bailing_hybrid",
            "kda_lower_bound": m.need("kda.gate_lower_bound"), "kda_safe_gate": m.get("kda.safe_gate", True),
            "layer_types": ["full_attention" if here else "linear_attention"
                            for here in attending(m)[:depth(m, c)["num_hidden_layers"]]]}


def _minimax_m3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    count, inner, named = depth(m, c)["num_hidden_layers"], m.need("expert_feed_forward_length"), {
        "index_n_heads": "head_count", "index_head_dim": "key_length", "index_block_size": "block_size",
        "index_topk_blocks": "top_k", "index_local_blocks": "local_blocks"}
    return {**c, **depth(m, c), **experts(m, "num_local_experts", False), "model_type": "minimax_m3_vl_text",
            **{ours: m.need(f"attention.indexer.{theirs}") for ours, theirs in named.items()},
            "intermediate_size": inner, "dense_intermediate_size": c["intermediate_size"],
            "shared_intermediate_size": inner * m.get("expert_shared_count", 1),
            "routed_scaling_factor": m.get("expert_weights_scale", 1.0),
            "mlp_layer_types": ["sparse" if mixes else "dense" for mixes in m.mixes()[:count]],
            "layer_types": ["minimax_m3_sparse" if f"blk.{i}.indexer.q_proj.weight" in m.file.tensors else
                            "full_attention" for i in range(count)]}


def _logarithms(x: np.ndarray, config: DecoderConfig) -> np.ndarray:
    return np.log(x)


MLA = LATENT | SHARED | CORRECTION

INDEXED: dict[str, Architecture] = {
    "bailingmoe3": Architecture(_ling3, names=MLA | {"attn.gate": "attn_gate"}, by_layer=True, latent=True, views={
        **KEYS_AND_VALUES, **CHANNELS, "attn.in_a.kernel": Stored("ssm_f_a.weight"),
        "attn.in_z.kernel": Stored("ssm_g_a.weight"), "attn.A_log": Stored("ssm_a", turn=_logarithms)}),
    "deepseek4": Architecture(_deepseek_v4, by_layer=True, names={
        **SHARED, **CORRECTION, **ALL_STREAMS, **SINKS, **POOLS, "attn.q_a": "attn_q_a",
        "attn.q_a_norm": "attn_q_a_norm", "attn.q_b": "attn_q_b", "attn.kv": "attn_kv",
        "attn.kv_norm": "attn_kv_a_norm", "attn.o_a": "attn_output_a", "attn.o_b": "attn_output_b",
        "mlp.hashed": "ffn_gate_tid2eid.weight"}),
    "glm5-next": Architecture(_glm5_next, by_layer=True, latent=True, views=KEYS_AND_VALUES | CHANNELS, names={
        **MLA, **INDEXER, **LAYER_STREAMS, "attn.indexer.pool.bias": "indexer_compressor_ape.weight",
        "attn.indexer.pool.scores": "indexer_compressor_gate.weight"}),
    "hy_v4": Architecture(_hy4, latent=True, yarn_log=10.0, views=KEYS_AND_VALUES, names={
        **MLA, **INDEXER, **ALL_STREAMS, **SINKS, "attn.gate": "attn_gate"}),
    "minimax-m3": Architecture(_minimax_m3, shifted=True, names=SHARED | CORRECTION | INDEX)}
"""Architectures by their names in `general.architecture`."""
