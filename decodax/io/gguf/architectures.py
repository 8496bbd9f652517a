"""The architectures of llama.cpp that are read: the entries of a `config.json` that their metadata stand for.

Names and meanings of the metadata are those of llama.cpp, which writes some numbers into tensors and leaves others out
where they follow from the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decodax.io.gguf.metadata import Architecture, Metadata

Entries = Callable[[Metadata, dict[str, Any]], dict[str, Any]]


def _llama(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    if experts := m.get("expert_count"):
        return {**c, "model_type": "mixtral", "num_local_experts": experts, "sliding_window": None,
                "num_experts_per_tok": m.need("expert_used_count")}
    if m.biased and not m.has("attn_output.bias"):
        return _qwen2(m, c)                # such as converted Qwen models
    return {**c, "model_type": "llama", "attention_bias": m.biased, "mlp_bias": m.has("ffn_down.bias")}


def _qwen2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "qwen2"}


def _qwen3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "qwen3", "attention_bias": m.biased}


def _qwen3_moe(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**_qwen3(m, c), "model_type": "qwen3_moe", "num_experts": m.need("expert_count"),
            "num_experts_per_tok": m.need("expert_used_count"), "norm_topk_prob": True,
            "moe_intermediate_size": m.need("expert_feed_forward_length")}


def _gemma(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    # The scale is not in the file: that of the 27B model, which has 46 layers, is by the width.
    scale = c["hidden_size"] // c["num_attention_heads"] if c["num_hidden_layers"] == 46 else c["head_dim"]
    return {**_gemma(m, c), "model_type": "gemma2", "query_pre_attn_scalar": scale,
            "sliding_window": m.get("attention.sliding_window", 4096),
            "attn_logit_softcapping": m.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": m.get("final_logit_softcapping", 30.0)}


def _gemma3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    scale = c["hidden_size"] // c["num_attention_heads"] if c["num_hidden_layers"] == 62 else c["head_dim"]
    return {**_gemma(m, c), "model_type": "gemma3_text", "query_pre_attn_scalar": scale,
            "rope_theta": m.get("rope.freq_base", 1e6), "rope_local_base_freq": m.get("rope.freq_base_swa", 1e4),
            "sliding_window": m.need("attention.sliding_window"),
            "sliding_window_pattern": m.get("attention.sliding_window_pattern", 6),
            "final_logit_softcapping": m.get("final_logit_softcapping"), "attn_logit_softcapping": None}


def _gpt2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "gpt2", "vocab_size": c["vocab_size"], "n_embd": c["hidden_size"],
            "n_head": c["num_attention_heads"], "n_layer": c["num_hidden_layers"],
            "n_inner": c["intermediate_size"], "n_positions": c["max_position_embeddings"],
            "layer_norm_epsilon": c.get("layer_norm_eps", 1e-5), "tie_word_embeddings": c["tie_word_embeddings"]}


def _stablelm(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "stablelm", "use_qkv_bias": m.biased,
            "use_parallel_residual": not m.has("ffn_norm.weight"), "qk_layernorm": m.has("attn_q_norm.weight")}


def _granite(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "granite", "attention_bias": m.biased,
            "embedding_multiplier": m.get("embedding_scale", 1.0), "residual_multiplier": m.get("residual_scale", 1.0),
            "attention_multiplier": m.get("attention.scale", c["head_dim"] ** -0.5),
            "logits_scaling": m.get("logit_scale", 1.0)}


def _olmo2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    window = m.get("attention.sliding_window")
    return {**c, "model_type": "olmo3" if window else "olmo2", **({"sliding_window": window} if window else {})}


def _cohere(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "cohere", "logit_scale": m.need("logit_scale"),
            "use_qk_norm": m.has("attn_q_norm.weight")}


def _cohere2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "cohere2", "logit_scale": m.need("logit_scale"),
            "sliding_window": m.need("attention.sliding_window")}


def _plain(kind: str, more: Callable[[Metadata], dict[str, Any]] = lambda m: {}) -> Entries:
    """Returns the reader of a family that adds `more` to the entries that all families share."""
    return lambda m, c: {**c, "model_type": kind, **more(m)}


def _experts(m: Metadata, count: str = "num_experts", width: bool = True) -> dict[str, Any]:
    """Returns the entries of a mixture; `count` is the name of the number of experts, `width` is False if experts have
    the inner width of other layers."""
    own = {"moe_intermediate_size": m.need("expert_feed_forward_length")} if width else {}
    return {count: m.need("expert_count"), "num_experts_per_tok": m.need("expert_used_count"), **own}


def _exaone4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    window = m.get("attention.sliding_window") or None
    near = m.each("attention.sliding_window_pattern", [(i + 1) % 4 != 0 for i in range(c["num_hidden_layers"])])
    return {**c, "model_type": "exaone4", "sliding_window": window,
            **({"layer_types": _kinds(near)} if window is not None else {})}


def _kinds(near: list[Any]) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in near]


def _glm4_moe(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "glm4_moe", **_experts(m, "n_routed_experts"), "attention_bias": m.biased,
            "num_hidden_layers": c["num_hidden_layers"] - m.count("nextn_predict_layers", 0, 0),
            "use_qk_norm": m.has("attn_q_norm.weight"), "first_k_dense_replace": m.get("leading_dense_block_count", 0),
            "n_shared_experts": m.get("expert_shared_count", 0), "norm_topk_prob": m.get("expert_weights_norm", True),
            "routed_scaling_factor": m.get("expert_weights_scale", 1.0), "n_group": m.get("expert_group_count", 1),
            "topk_group": m.get("expert_group_used_count", 1)}


def _gpt_oss(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    scaling = {**c["rope_scaling"], "truncate": False} if c.get("rope_scaling") else {"rope_type": "default"}
    return {**c, "model_type": "gpt_oss", **_experts(m, "num_local_experts", False), "rope_scaling": scaling,
            "intermediate_size": m.need("expert_feed_forward_length"), "attention_bias": m.biased,
            "sliding_window": m.need("attention.sliding_window")}


def _gemma4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    kinds = _kinds(m.each("attention.sliding_window_pattern"))
    groups, widths = m.each("attention.head_count_kv"), m.each("feed_forward_length")
    first = lambda kind: kinds.index(kind) if kind in kinds else 0
    shared, own = m.count("attention.shared_kv_layers", 0, 0), m.count("embedding_length_per_layer_input", 0, 0)
    table, turned = m.file.tensors.get("per_layer_token_embd.weight"), m.factors.get("rope_freqs.weight")
    # Frequencies beyond the rotated part of a head are divided by a very large number.
    part = 1.0 if turned is None else float((turned < 2).mean())
    more = {} if not m.get("expert_count") else {
        "enable_moe_block": True, "num_experts": m.need("expert_count"), "top_k_experts": m.need("expert_used_count"),
        "moe_intermediate_size": m.need("expert_feed_forward_length")}
    return {**c, **more, "model_type": "gemma4_text", "layer_types": kinds, "attention_bias": m.biased,
            "intermediate_size": widths[0], "use_double_wide_mlp": shared > 0 and widths[-1] == 2 * widths[0],
            "head_dim": m.need("attention.key_length_swa"), "global_head_dim": c["head_dim"],
            "num_key_value_heads": groups[first("sliding_attention")],
            "num_global_key_value_heads": groups[first("full_attention")],
            "attention_k_eq_v": f"blk.{first('full_attention')}.attn_v.weight" not in m.file.tensors,
            "sliding_window": m.need("attention.sliding_window"), "num_kv_shared_layers": shared,
            "hidden_size_per_layer_input": own,
            "vocab_size_per_layer_input": table.shape[0] if table is not None else c["vocab_size"],
            "final_logit_softcapping": m.get("final_logit_softcapping"), "partial_rotary_factor": 1.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": part,
                                   "rope_theta": m.get("rope.freq_base", 1e6)},
                "sliding_attention": {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", 1e4)}}}


SHARED = {f"mlp.shared.{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
LATE = {"mlp_in": "post_attention_norm"}
CORRECTION = {"mlp.correction": "exp_probs_b.bias"}
GEMMA4 = {
    "mlp.shared.gate": "ffn_gate", "mlp.shared.up": "ffn_up", "mlp.shared.down": "ffn_down",
    "mlp.shared_in": "ffn_norm", "mlp.shared_out": "post_ffw_norm_1", "mlp.experts_in": "pre_ffw_norm_2",
    "mlp.experts_out": "post_ffw_norm_2", "mlp.router_in.scale": "ffn_gate_inp.scale",
    "mlp.expert_scale": "ffn_down_exps.scale", "factor.scale": "layer_output_scale.weight", "inputs.narrow": "inp_gate",
    "inputs.widen": "proj", "inputs.norm": "post_norm"}

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture(_plain("arcee", lambda m: {
        "attention_bias": m.biased, "mlp_bias": m.has("ffn_up.bias")}), permuted=True),
    "cohere2": Architecture(_cohere2), "command-r": Architecture(_cohere),
    "ernie4_5": Architecture(_plain("ernie4_5", lambda m: {"use_bias": m.biased})),
    "ernie4_5-moe": Architecture(_plain("ernie4_5_moe", lambda m: {
        "moe_num_experts": m.need("expert_count"), "moe_k": m.need("expert_used_count"), "use_bias": m.biased,
        "moe_intermediate_size": m.need("expert_feed_forward_length"),
        "moe_layer_start_index": m.get("leading_dense_block_count", 0),
        "moe_layer_interval": m.get("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": m.get("expert_shared_count", 0)}), names=SHARED | CORRECTION),
    "exaone4": Architecture(_exaone4),
    "gemma": Architecture(_gemma, shifted=True), "gemma2": Architecture(_gemma2, shifted=True),
    "gemma3": Architecture(_gemma3, shifted=True),
    "gemma4": Architecture(_gemma4, names=GEMMA4, by_layer=True, scaled=False),
    "glm4": Architecture(_plain("glm4", lambda m: {"attention_bias": m.biased})),
    "glm4moe": Architecture(_glm4_moe, names=SHARED | LATE | CORRECTION),
    "gpt-oss": Architecture(_gpt_oss, names={**LATE, "attn.sinks": "attn_sinks.weight"}),
    "gpt2": Architecture(_gpt2),
    "gptneox": Architecture(_plain("gpt_neox", lambda m: {
        "use_parallel_residual": m.get("use_parallel_residual", True), "attention_bias": m.biased})),
    "granite": Architecture(_granite, permuted=True),
    "granitemoe": Architecture(lambda m, c: {**_granite(m, c), "model_type": "granitemoe", **_experts(
        m, "num_local_experts", False)}, permuted=True),
    "hunyuan-dense": Architecture(_plain("hunyuan_v1_dense", lambda m: {"attention_bias": m.biased})),
    "llama": Architecture(_llama, permuted=True),
    "minimax-m2": Architecture(_plain("minimax_m2", lambda m: {
        **_experts(m, "num_local_experts", False), "intermediate_size": m.need("expert_feed_forward_length")}),
        names=CORRECTION),
    "nemotron": Architecture(_plain("nemotron", lambda m: {
        "norm_eps": m.need("attention.layer_norm_epsilon"), "attention_bias": m.biased,
        "mlp_bias": m.has("ffn_up.bias")}), shifted=True),
    "olmo2": Architecture(_olmo2),
    "olmoe": Architecture(_plain("olmoe", lambda m: {
        **_experts(m, width=False), "clip_qkv": m.get("attention.clamp_kqv")})),
    "phi2": Architecture(_plain("phi", lambda m: {"hidden_act": "gelu_new"})),
    "phi3": Architecture(_plain("phi3", lambda m: {"sliding_window": m.get("attention.sliding_window") or None})),
    "qwen2": Architecture(_qwen2), "qwen2vl": Architecture(_qwen2),
    "qwen2moe": Architecture(_plain("qwen2_moe", lambda m: {
        **_experts(m), "norm_topk_prob": False,
        "shared_expert_intermediate_size": m.need("expert_shared_feed_forward_length")}),
        names={**SHARED, "mlp.shared_gate": "ffn_gate_inp_shexp"}),
    "qwen3": Architecture(_qwen3), "qwen3vl": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3_moe), "qwen3vlmoe": Architecture(_qwen3_moe),
    "seed_oss": Architecture(_plain("seed_oss", lambda m: {
        "attention_bias": m.biased, "attention_out_bias": m.has("attn_output.bias"),
        "mlp_bias": m.has("ffn_up.bias")}), names=LATE),
    "smollm3": Architecture(_plain("smollm3"), permuted=True), "stablelm": Architecture(_stablelm),
    "starcoder2": Architecture(_plain("starcoder2", lambda m: {
        "norm_epsilon": m.need("attention.layer_norm_epsilon"), "use_bias": m.biased}))}
"""Architectures by their names in `general.architecture`."""
