"""The architectures of llama.cpp that are read: the entries of a `config.json` that their metadata stand for.

Names and meanings of the metadata are those of llama.cpp, which writes some numbers into tensors and leaves others out
where they follow from the architecture.
"""

from __future__ import annotations

import math
from typing import Any

from decodax.io.files import CheckpointError
from decodax.io.gguf.diffusion import DIFFUSION
from decodax.io.gguf.hybrids import HYBRIDS
from decodax.io.gguf.indexed import INDEXED
from decodax.io.gguf.metadata import Architecture, Metadata
from decodax.io.gguf.shared import CORRECTION, LATE, SHARED, SHARED_GATE, depth, experts, plain, routed, scaled
from decodax.io.gguf.shared import kinds as kinds_of
from decodax.io.gguf.views import ALTUP, XIELU
from decodax.io.gguf.windowed import WINDOWED


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
    return {**c, "model_type": "granite", "attention_bias": m.biased, **scaled(m, c)}


def _olmo2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    if not (window := m.get("attention.sliding_window")):
        return {**c, "model_type": "olmo2"}
    near = m.each("attention.sliding_window_pattern", [(i + 1) % 4 != 0 for i in range(c["num_hidden_layers"])])
    own, far = {k: v for k, v in c.items() if k != "rope_scaling"}, {
        "rope_type": "default", "rope_theta": c["rope_theta"]}
    # Only layers without a window have a scaling.
    return {**own, "model_type": "olmo3", "sliding_window": window, "layer_types": kinds_of(near), "rope_parameters": {
        "full_attention": {**far, **c.get("rope_scaling", {})},
        "sliding_attention": {**far, "rope_theta": m.get("rope.freq_base_swa", c["rope_theta"])}}}


def _cohere(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "cohere", "logit_scale": m.need("logit_scale"),
            "use_qk_norm": m.has("attn_q_norm.weight")}


def _cohere2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "cohere2", "logit_scale": m.need("logit_scale"),
            "sliding_window": m.need("attention.sliding_window")}


def _apertus(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "default"}, **c, "model_type": "apertus", "attention_bias": m.biased}


def _falcon(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    twin = m.has("attn_norm_2.weight")
    return {**c, "model_type": "falcon", "layer_norm_epsilon": c["layer_norm_eps"],
            "num_kv_heads": c["num_key_value_heads"], "new_decoder_architecture": twin or c["num_key_value_heads"] > 1,
            "num_ln_in_parallel_attn": 2 if twin else 1, "multi_query": True, "bias": m.biased, "parallel_attn": True,
            "ffn_hidden_size": c["intermediate_size"], "alibi": False}


def _bloom(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "bloom", "n_head": c["num_attention_heads"], "n_layer": c["num_hidden_layers"],
            "seq_length": c["max_position_embeddings"], "layer_norm_epsilon": c["layer_norm_eps"]}


def _gptj(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "gptj", "vocab_size": c["vocab_size"], "n_embd": c["hidden_size"],
            "n_head": c["num_attention_heads"], "n_layer": c["num_hidden_layers"],
            "n_inner": c["intermediate_size"], "n_positions": c["max_position_embeddings"],
            "layer_norm_epsilon": c["layer_norm_eps"], "rotary_dim": m.need("rope.dimension_count")}


def _mistral3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    if (beta := m.get("attention.temperature_scale")) is None:
        return {**c, "model_type": "mistral", "sliding_window": None}
    return {**c, "model_type": "ministral3", "rope_scaling": {**c["rope_scaling"], "llama_4_scaling_beta": beta}}


def _phimoe(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "phimoe", **experts(m, "num_local_experts", False), "attention_bias": m.biased,
            "lm_head_bias": "output.bias" in m.file.tensors,
            "sliding_window": m.get("attention.sliding_window") or None}


def _exaone4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    window = m.get("attention.sliding_window") or None
    near = m.each("attention.sliding_window_pattern", [(i + 1) % 4 != 0 for i in range(c["num_hidden_layers"])])
    return {**c, "model_type": "exaone4", "sliding_window": window,
            **({"layer_types": kinds_of(near)} if window is not None else {})}


def _glm4_moe(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "glm4_moe", **routed(m), "attention_bias": m.biased, **depth(m, c),
            "use_qk_norm": m.has("attn_q_norm.weight")}


def _mimo2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    count = depth(m, c)["num_hidden_layers"]
    kinds = kinds_of(m.each("attention.sliding_window_pattern"))[:count]
    groups = dict(zip(kinds, m.each("attention.head_count_kv"), strict=False))
    own = {k: v for k, v in c.items() if k != "partial_rotary_factor"}
    part = {"rope_type": "default", "partial_rotary_factor": c.get("partial_rotary_factor", 1.0)}
    # llama.cpp counts the query's own position among those of the window.
    return {**own, **depth(m, c), **experts(m, "n_routed_experts"), "model_type": "mimo_v2_flash", "layer_types": kinds,
            "v_head_dim": m.need("attention.value_length"), "attention_bias": m.biased,
            "attention_value_scale": m.get("attention.value_scale", 1.0),
            "sliding_window": m.need("attention.sliding_window"),
            "num_key_value_heads": groups.get("full_attention", c["num_key_value_heads"]),
            "swa_num_key_value_heads": groups.get("sliding_attention", c["num_key_value_heads"]),
            "mlp_layer_types": ["sparse" if mixes else "dense" for mixes in m.mixes()[:count]], "norm_topk_prob": True,
            "routed_scaling_factor": m.get("expert_weights_scale", 1.0), "rope_parameters": {
                "full_attention": {**part, "rope_theta": c["rope_theta"]},
                "sliding_attention": {**part, "rope_theta": m.get("rope.freq_base_swa", c["rope_theta"])}}}


def _gpt_oss(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    scaling = {**c["rope_scaling"], "truncate": False} if c.get("rope_scaling") else {"rope_type": "default"}
    return {**c, "model_type": "gpt_oss", **experts(m, "num_local_experts", False), "rope_scaling": scaling,
            "intermediate_size": m.need("expert_feed_forward_length"), "attention_bias": m.biased,
            "sliding_window": m.need("attention.sliding_window")}


def _gemma4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    kinds = kinds_of(m.each("attention.sliding_window_pattern"))
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


def _gemma3n(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    layers, streams = c["num_hidden_layers"], m.get("altup.num_inputs", 4)
    narrow = m.file.tensors.get("blk.0.laurel_l.weight")
    if streams != 4 or narrow is None:
        raise CheckpointError(f"{m.file.path}: gemma3n: got {streams} residual streams and "
                              f"{'no ' if narrow is None else ''}blk.0.laurel_l.weight, takes 4 streams and the tensor")
    # The file has the number of standard deviations below which a gate is 0; llama.cpp goes by the layer's number.
    cuts = m.each("activation_sparsity_scale", [1.6448536 if i < 10 else -math.inf for i in range(layers)])
    table = m.file.tensors.get("per_layer_token_embd.weight")
    return {**c, "model_type": "gemma3n_text", "attention_bias": m.biased, "layer_types": kinds_of(m.each(
                "attention.sliding_window_pattern", [(i + 1) % 5 != 0 for i in range(layers)])),
            "intermediate_size": m.each("feed_forward_length"), "sliding_window": m.need("attention.sliding_window"),
            "num_kv_shared_layers": m.get("attention.shared_kv_layers", max(layers - 20, 0)),
            "hidden_size_per_layer_input": m.get("embedding_length_per_layer_input", 256),
            "vocab_size_per_layer_input": table.shape[0] if table is not None else c["vocab_size"],
            "final_logit_softcapping": m.get("final_logit_softcapping", 30.0), "altup_num_inputs": streams,
            "altup_active_idx": m.get("altup.active_idx", 0),
            "altup_correct_scale": m.has("altup_correct_scale.weight"), "laurel_rank": narrow.shape[0],
            "activation_sparsity_pattern": [float(f"{(1 + math.erf(cut / math.sqrt(2))) / 2:.6g}") for cut in cuts],
            "rope_parameters": {"full_attention": {"rope_theta": m.get("rope.freq_base", 1e6)},
                                "sliding_attention": {"rope_theta": m.get("rope.freq_base_swa", 1e4)}}}


def _llama4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    if m.get("attention.sliding_window") == 0:
        raise CheckpointError(f"{m.file.path}: llama4.attention.sliding_window: got 0, as in files of MobileLLM, which "
                              "are not read; files of Llama 4 have chunks of 8192 tokens")
    # Only the mixture of 128 experts has no norms of queries and keys.
    return {**c, "model_type": "llama4_text", **experts(m, "num_local_experts", False), "attention_bias": m.biased,
            "intermediate_size": m.need("expert_feed_forward_length"), "intermediate_size_mlp": c["intermediate_size"],
            "interleave_moe_layer_step": m.count("interleave_moe_layer_step"),
            "use_qk_norm": m.need("expert_count") != 128}


INPUTS = {"inputs.narrow": "inp_gate", "inputs.widen": "proj", "inputs.norm": "post_norm"}
GEMMA3N = {
    **INPUTS, "streams.router": "altup_router", "streams.router_norm": "altup_router_norm",
    "streams.predict": "altup_predict_coef", "streams.correct": "altup_correct_coef",
    "streams.scale": "altup_correct_scale.weight", "low_rank.narrow": "laurel_l", "low_rank.widen": "laurel_r",
    "low_rank.norm": "laurel_post_norm"}
GEMMA4 = {
    "mlp.shared.gate": "ffn_gate", "mlp.shared.up": "ffn_up", "mlp.shared.down": "ffn_down",
    "mlp.shared_in": "ffn_norm", "mlp.shared_out": "post_ffw_norm_1", "mlp.experts_in": "pre_ffw_norm_2",
    "mlp.experts_out": "post_ffw_norm_2", "mlp.router_in.scale": "ffn_gate_inp.scale",
    "mlp.expert_scale": "ffn_down_exps.scale", "factor.scale": "layer_output_scale.weight", **INPUTS}

ARCHITECTURES: dict[str, Architecture] = {
    **DIFFUSION, **HYBRIDS, **INDEXED, **WINDOWED,
    "apertus": Architecture(_apertus, views=XIELU),
    "arcee": Architecture(plain("arcee", lambda m: {
        "attention_bias": m.biased, "mlp_bias": m.has("ffn_up.bias")}), permuted=True),
    "bloom": Architecture(_bloom), "cohere2": Architecture(_cohere2), "command-r": Architecture(_cohere),
    "ernie4_5": Architecture(plain("ernie4_5", lambda m: {"use_bias": m.biased})),
    "ernie4_5-moe": Architecture(plain("ernie4_5_moe", lambda m: {
        "moe_num_experts": m.need("expert_count"), "moe_k": m.need("expert_used_count"), "use_bias": m.biased,
        "moe_intermediate_size": m.need("expert_feed_forward_length"),
        "moe_layer_start_index": m.get("leading_dense_block_count", 0),
        "moe_layer_interval": m.get("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": m.get("expert_shared_count", 0)}), names=SHARED | CORRECTION),
    "exaone4": Architecture(_exaone4),
    "falcon": Architecture(_falcon, names={"attn_in": "attn_norm_2|attn_norm", "mlp_in": "attn_norm"}),
    "gemma": Architecture(_gemma, shifted=True), "gemma2": Architecture(_gemma2, shifted=True),
    "gemma3": Architecture(_gemma3, shifted=True),
    "gemma3n": Architecture(_gemma3n, names=GEMMA3N, by_layer=True, outside=ALTUP),
    "gemma4": Architecture(_gemma4, names=GEMMA4, by_layer=True, scaled=False),
    "glm4": Architecture(plain("glm4", lambda m: {"attention_bias": m.biased})),
    "glm4moe": Architecture(_glm4_moe, names=SHARED | LATE | CORRECTION),
    "gpt-oss": Architecture(_gpt_oss, names={**LATE, "attn.sinks": "attn_sinks.weight"}),
    "gpt2": Architecture(_gpt2), "gptj": Architecture(_gptj),
    "gptneox": Architecture(plain("gpt_neox", lambda m: {
        "use_parallel_residual": m.get("use_parallel_residual", True), "attention_bias": m.biased})),
    "granite": Architecture(_granite, permuted=True),
    "granitemoe": Architecture(lambda m, c: {**_granite(m, c), "model_type": "granitemoe", **experts(
        m, "num_local_experts", False)}, permuted=True),
    "hunyuan-dense": Architecture(plain("hunyuan_v1_dense", lambda m: {"attention_bias": m.biased})),
    "hunyuan-moe": Architecture(plain("hunyuan_v1_moe", lambda m: {
        "attention_bias": m.biased, "num_experts": m.need("expert_count"), "moe_topk": m.need("expert_used_count"),
        "intermediate_size": m.need("expert_shared_feed_forward_length"),
        "moe_intermediate_size": m.need("expert_feed_forward_length")}), names=SHARED),
    "llama": Architecture(_llama, permuted=True), "llama4": Architecture(_llama4, names=SHARED),
    "mimo2": Architecture(_mimo2, names={**CORRECTION, "attn.sinks": "attn_sinks.weight"}, by_layer=True, latent=True),
    "minimax-m2": Architecture(plain("minimax_m2", lambda m: {
        **experts(m, "num_local_experts", False), "intermediate_size": m.need("expert_feed_forward_length")}),
        names=CORRECTION),
    "mistral3": Architecture(_mistral3, permuted=True, yarn_log=1.0),
    "nemotron": Architecture(plain("nemotron", lambda m: {
        "norm_eps": m.need("attention.layer_norm_epsilon"), "attention_bias": m.biased,
        "mlp_bias": m.has("ffn_up.bias")}), shifted=True),
    "olmo2": Architecture(_olmo2),
    "olmoe": Architecture(plain("olmoe", lambda m: {
        **experts(m, width=False), "clip_qkv": m.get("attention.clamp_kqv")})),
    "phi2": Architecture(plain("phi", lambda m: {"hidden_act": "gelu_new"})),
    "phi3": Architecture(plain("phi3", lambda m: {"sliding_window": m.get("attention.sliding_window") or None})),
    "phimoe": Architecture(_phimoe),
    "qwen2": Architecture(_qwen2), "qwen2vl": Architecture(_qwen2),
    "qwen2moe": Architecture(plain("qwen2_moe", lambda m: {
        **experts(m), "norm_topk_prob": False,
        "shared_expert_intermediate_size": m.need("expert_shared_feed_forward_length")}),
        names=SHARED_GATE),
    "qwen3": Architecture(_qwen3), "qwen3vl": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3_moe), "qwen3vlmoe": Architecture(_qwen3_moe),
    "seed_oss": Architecture(plain("seed_oss", lambda m: {
        "attention_bias": m.biased, "attention_out_bias": m.has("attn_output.bias"),
        "mlp_bias": m.has("ffn_up.bias")}), names=LATE),
    "smollm3": Architecture(plain("smollm3"), permuted=True), "stablelm": Architecture(_stablelm),
    "starcoder2": Architecture(plain("starcoder2", lambda m: {
        "norm_epsilon": m.need("attention.layer_norm_epsilon"), "use_bias": m.biased}))}
"""Architectures by their names in `general.architecture`."""
