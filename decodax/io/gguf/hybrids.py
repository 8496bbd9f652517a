"""Architectures of llama.cpp with recurrent layers or latent attention, whose tensors have forms of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.gguf.metadata import Architecture, Metadata
from decodax.io.gguf.shared import CORRECTION, LATE, SHARED, SHARED_GATE, Entries, depth, experts, routed, scaled
from decodax.io.gguf.views import CHANNELS, KEYS_AND_VALUES, SCAN, SHORT, Stored, delta, ssd


def attending(m: Metadata) -> list[bool]:
    """Returns True for each layer that has keys and values."""
    return [bool(count) for count in m.each("attention.head_count_kv")]


def _lfm2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "lfm2", "norm_eps": c["rms_norm_eps"], "conv_L_cache": m.need("shortconv.l_cache"),
            "layer_types": ["full_attention" if attends else "conv" for attends in attending(m)],
            "block_auto_adjust_ff_dim": False}


def _lfm2_moe(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**_lfm2(m, c), "model_type": "lfm2_moe", **experts(m), "num_dense_layers": m.need(
        "leading_dense_block_count"), "use_expert_bias": m.held("exp_probs_b.bias"), "norm_topk_prob": True,
        "routed_scaling_factor": m.get("expert_weights_scale", 1.0)}


def _delta(kind: str, mixture: bool = False) -> Entries:
    def entries(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
        heads = m.need("ssm.time_step_rank")
        more = {} if not mixture else {**experts(m), "norm_topk_prob": True, "shared_expert_intermediate_size": m.need(
            "expert_shared_feed_forward_length")}
        return {**c, "model_type": kind, **depth(m, c), **more, "linear_num_key_heads": m.need("ssm.group_count"),
                "linear_num_value_heads": heads, "linear_key_head_dim": m.need("ssm.state_size"),
                "linear_value_head_dim": m.need("ssm.inner_size") // heads, "attention_bias": False,
                "linear_conv_kernel_dim": m.need("ssm.conv_kernel"),
                "full_attention_interval": m.get("full_attention_interval", 4)}

    return entries


def latent(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries that families with multi-head latent attention share."""
    # Files from before keys and values were stored apart have their widths in place of the latent's.
    width = lambda what: m.get(f"attention.{what}_length_mla") or m.need(f"attention.{what}_length")
    turned = m.need("rope.dimension_count")
    own = {k: v for k, v in c.items() if k not in ("head_dim", "partial_rotary_factor")}
    return {**own, **depth(m, c), "num_key_value_heads": c["num_attention_heads"],
            "kv_lora_rank": m.need("attention.kv_lora_rank"), "q_lora_rank": m.get("attention.q_lora_rank"),
            "qk_rope_head_dim": turned, "qk_nope_head_dim": width("key") - turned, "v_head_dim": width("value")}


def _deepseek(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    sigmoid = m.get("expert_gating_func", 1) == 2
    if not m.get("expert_count"):       # no mixture, as in Youtu-LLM
        return {**latent(m, c), "model_type": "youtu"}
    more = routed(m)
    if sigmoid and m.get("expert_group_count") is None and more["n_routed_experts"] == 256:
        more |= {"n_group": 8, "topk_group": 4}     # DeepSeek-V3 in files from before they said so
    if not sigmoid:
        more |= {"norm_topk_prob": m.get("expert_weights_norm", False),
                 "topk_method": "greedy" if more["n_group"] == 1 else "group_limited_greedy"}
    return {**latent(m, c), **more, "model_type": "deepseek_v3" if sigmoid else "deepseek_v2"}


def _mistral4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    scaling, beta = c.get("rope_scaling"), m.get("attention.temperature_scale")
    if beta is not None and scaling is not None:
        trained = scaling["original_max_position_embeddings"]
        if (length := m.get("attention.temperature_length", trained)) != trained:
            raise CheckpointError(f"{m.file.path}: {m.name}.attention.temperature_length: got {length}, takes that of "
                                  f"the rope's original context, {trained}")
        scaling = {**scaling, "llama_4_scaling_beta": beta}
    return {**latent(m, c), **routed(m), "norm_topk_prob": m.get("expert_weights_norm", False),
            "model_type": "mistral4", "rope_scaling": scaling or {"rope_type": "default"}}


def _deepseek_v32(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**latent(m, c), **routed(m), "norm_topk_prob": m.get("expert_weights_norm", False),
            "model_type": "deepseek_v32", **indexed(m)}


def indexed(m: Metadata) -> dict[str, Any]:
    """Returns the entries of an indexer."""
    return {"index_n_heads": m.need("attention.indexer.head_count"),
            "index_head_dim": m.need("attention.indexer.key_length"), "index_topk": m.need("attention.indexer.top_k")}


def choosing(m: Metadata, c: dict[str, Any], full: Sequence[bool] | bool = True) -> dict[str, Any]:
    """Returns the entries of a mixture with latent attention whose layers have an indexer or take the choice of an
    earlier one; `full` is true for those with an indexer if the file does not say it."""
    own = m.each("attention.indexer.types", full)[:depth(m, c)["num_hidden_layers"]]
    return {**latent(m, c), **routed(m), **indexed(m), "indexer_types": ["full" if each else "shared" for each in own]}


def by_channel(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of the gated delta rule with a decay for each channel."""
    return {"linear_num_heads": c["num_attention_heads"], "linear_head_dim": m.need("kda.head_dim"),
            "linear_conv_kernel_dim": m.need("ssm.conv_kernel")}


def _glm_dsa(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    # Files from before layers shared a choice do not say which ones have an indexer of their own.
    held = [f"blk.{i}.indexer.attn_k.weight" in m.file.tensors for i in range(c["num_hidden_layers"])]
    return {**choosing(m, c, held), "norm_topk_prob": m.get("expert_weights_norm", False), "model_type": "glm_moe_dsa"}


def _kimi_linear(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    scores = {1: "softmax", 2: "sigmoid"}
    return {**latent(m, c), "model_type": "kimi_linear", "num_experts": m.need("expert_count"),
            "num_experts_per_token": m.need("expert_used_count"), "moe_intermediate_size": m.need(
                "expert_feed_forward_length"), "num_shared_experts": m.get("expert_shared_count", 0),
            "first_k_dense_replace": m.get("leading_dense_block_count", 0),
            "routed_scaling_factor": m.get("expert_weights_scale", 1.0),
            "moe_router_activation_func": scores.get(which := m.get("expert_gating_func", 2), str(which)),
            **by_channel(m, c), "layer_types": [
                "full_attention" if attends else "linear_attention" for attends in attending(m)]}


def _ssd(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of blocks of Mamba-2 in most families."""
    heads = m.need("ssm.time_step_rank")
    return {"mamba_n_heads": heads, "mamba_d_head": m.need("ssm.inner_size") // heads,
            "mamba_n_groups": m.need("ssm.group_count"), "mamba_d_state": m.need("ssm.state_size"),
            "mamba_d_conv": m.need("ssm.conv_kernel"), "mamba_conv_bias": m.held("ssm_conv1d.bias")}


def _granite_hybrid(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    kinds = ["attention" if attends else "mamba" for attends in attending(m)]
    count, own = m.get("expert_count", 0), {
        **c, **_ssd(m, c), "attention_bias": m.held("attn_q.bias"),
        "mamba_expand": m.need("ssm.inner_size") // c["hidden_size"]}
    if m.get("rope.scaling.finetuned", False):      # a Bamba, whose attention has a rope
        return {**own, "model_type": "bamba", "mlp_bias": m.held("ffn_down.bias"),
                "attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == "attention"]}
    return {**own, **scaled(m, c), "model_type": "granitemoehybrid", "layer_types": kinds,
            "num_local_experts": count, "position_embedding_type": "nope",
            "num_experts_per_tok": m.get("expert_used_count", 0),
            "shared_intermediate_size": m.get("expert_shared_feed_forward_length", c["intermediate_size"])}


def _falcon_h1(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    # The converter multiplies weights with the factors of the configuration.
    return {**c, **_ssd(m, c), "model_type": "falcon_h1", "mamba_d_ssm": m.need("ssm.inner_size"),
            "mamba_rms_norm": m.held("ssm_norm.weight"), "mamba_norm_before_gate": False}


def _nemotron_h(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    count, heads = depth(m, c)["num_hidden_layers"], m.need("ssm.time_step_rank")
    feeds = "moe" if m.get("expert_count") else "mlp"
    kinds = ["full_attention" if attends else feeds if width else "linear_attention"
             for attends, width in zip(attending(m), m.each("feed_forward_length"), strict=True)][:count]
    more = {} if feeds == "mlp" else {**routed(m), "moe_shared_expert_intermediate_size": m.need(
        "expert_shared_feed_forward_length"), **({} if (wide := m.get("moe_latent_size")) is None else {
            "moe_latent_size": wide})}
    return {**c, **more, "model_type": "nemotron_h", "num_hidden_layers": count, "layers_block_type": kinds,
            "layer_norm_epsilon": c.get("rms_norm_eps", c.get("layer_norm_eps", 1e-5)), "mamba_num_heads": heads,
            "mamba_head_dim": m.need("ssm.inner_size") // heads, "n_groups": m.need("ssm.group_count"),
            "ssm_state_size": m.need("ssm.state_size"), "conv_kernel": m.need("ssm.conv_kernel"),
            "use_conv_bias": m.held("ssm_conv1d.bias"), "tie_word_embeddings": c["tie_word_embeddings"]}


def _jamba(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    mixtures = m.mixes()
    return {**c, "model_type": "jamba", "num_experts": m.get("expert_count", 1) if any(mixtures) else 1,
            "num_experts_per_tok": m.get("expert_used_count", 1), "mamba_d_state": m.need("ssm.state_size"),
            "mamba_d_conv": m.need("ssm.conv_kernel"), "mamba_dt_rank": m.need("ssm.time_step_rank"),
            "mamba_expand": m.need("ssm.inner_size") // c["hidden_size"], **_period(m, "attn", attending(m)),
            **(_period(m, "expert", mixtures) if any(mixtures) else {})}


def _period(m: Metadata, what: str, chosen: Sequence[bool]) -> dict[str, int]:
    """Returns the period of chosen layers, and the index of the first."""
    at = np.flatnonzero(chosen)
    period = int(at[1] - at[0]) if len(at) > 1 else len(chosen)
    if not len(at) or [i % period == at[0] % period for i in range(len(chosen))] != list(map(bool, chosen)):
        raise CheckpointError(f"{m.file.path}: {m.name}: has layers of kind {what!r} at {at.tolist()}, takes some in "
                              "equal distances")
    return {f"{what}_layer_period": period, f"{what}_layer_offset": int(at[0] % period)}


LATENT = {f"attn.{ours}": f"attn_{theirs}" for ours, theirs in (
    ("q_a", "q_a"), ("q_a_norm", "q_a_norm"), ("q_b", "q_b"), ("kv_a", "kv_a_mqa"), ("kv_a_norm", "kv_a_norm"))}

INDEXER = {f"attn.indexer.{ours}": f"indexer.{theirs}" for ours, theirs in (
    ("q", "attn_q_b"), ("k", "attn_k"), ("k_norm", "k_norm"), ("weigh", "proj"))}

HYBRIDS: dict[str, Architecture] = {
    "deepseek2": Architecture(_deepseek, names=LATENT | SHARED | CORRECTION, latent=True, yarn_log=10.0,
                              views=KEYS_AND_VALUES),
    "deepseek32": Architecture(_deepseek_v32, names=LATENT | SHARED | CORRECTION | INDEXER, latent=True, yarn_log=10.0,
                               views=KEYS_AND_VALUES),
    "falcon-h1": Architecture(_falcon_h1, views=ssd("beside") | {
        "mlp_in.scale": Stored("ffn_norm", older=Stored("ffn_norm.weight"))}),     # converters forget the ending
    "glm-dsa": Architecture(_glm_dsa, names=LATENT | SHARED | CORRECTION | INDEXER, latent=True, yarn_log=10.0,
                            views=KEYS_AND_VALUES),
    "granitehybrid": Architecture(_granite_hybrid, permuted=True, names=SHARED, by_layer=True, views=ssd("attn")),
    "jamba": Architecture(_jamba, by_layer=True, views=SCAN),
    "kimi-linear": Architecture(_kimi_linear, names=LATENT | SHARED | CORRECTION, by_layer=True, latent=True,
                                views=KEYS_AND_VALUES | CHANNELS),
    "mistral4": Architecture(_mistral4, names=LATENT | SHARED, latent=True, yarn_log=10.0, views=KEYS_AND_VALUES),
    "lfm2": Architecture(_lfm2, names={"norm": "token_embd_norm"}, by_layer=True, views=SHORT),
    "lfm2moe": Architecture(_lfm2_moe, names={"norm": "token_embd_norm", **CORRECTION}, by_layer=True, views=SHORT),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Architecture(
        _nemotron_h, permuted=True, by_layer=True, views=ssd("attn"), names={
            **SHARED, **CORRECTION, "mlp_in": "attn_norm", "mlp.latent_in": "ffn_latent_down",
            "mlp.latent_out": "ffn_latent_up"})),
    "qwen35": Architecture(_delta("qwen3_5_text"), shifted=True, names=LATE, views=delta(True)),
    "qwen35moe": Architecture(_delta("qwen3_5_moe_text", True), shifted=True, names=LATE | SHARED_GATE,
                              views=delta(True)),
    "qwen3next": Architecture(_delta("qwen3_next", True), shifted=True, names=LATE | SHARED_GATE, views=delta(False))}
"""Architectures by their names in `general.architecture`."""
