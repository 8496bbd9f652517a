"""Writes small checkpoints of further families as GGUF files, see `tests.io.gguf.converting`."""

from __future__ import annotations

import dataclasses
import re
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.io.gguf.converting import KINDS, Kind, Tensors, deepseek, latent, mamba2, states, turned


def gpt_oss(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parts the gates from the values that they alternate with, and puts the outputs of experts first."""
    if (found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)) is None:
        return {f"{name}.weight" if name.endswith("sinks") else name: x}
    number, part, bias = found.groups()
    x, tail = (x, "bias") if bias else (np.swapaxes(x, 1, 2), "weight")
    parts = {"gate": x[:, ::2], "up": x[:, 1::2]} if part == "gate_up" else {part: x}
    return {f"blk.{number}.ffn_{own}_exps.{tail}": y for own, y in parts.items()}


def sinks(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {"expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"],
            "expert_feed_forward_length": c["intermediate_size"], "attention.sliding_window": c["sliding_window"],
            "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


def llama4(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parts gates from values, and puts the outputs of experts first."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(np.swapaxes(x, 1, 2), 2, 1)
        return {name.replace("gate_up_proj", f"{own}_proj.weight"): y for own, y in (("gate", gate), ("up", up))}
    return {f"{name}.weight": np.swapaxes(x, 1, 2)} if name.endswith("experts.down_proj") else {name: x}


def chunked(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {"feed_forward_length": c["intermediate_size_mlp"], "expert_feed_forward_length": c["intermediate_size"],
            "expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"],
            "interleave_moe_layer_step": c["interleave_moe_layer_step"], "attention.key_length": c["head_dim"],
            "attention.value_length": c["head_dim"], "rope.dimension_count": c["head_dim"]}


def gemma3n(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return {f"{name}.weight" if name.endswith("_scale") else name: x}


def streams(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    far, near = (c["rope_parameters"][f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding"))
    for part in ("altup_projections", "altup_unembed_projections"):     # the converter writes one tensor for all
        tensors[f"model.{part}.weight"] = np.stack([tensors.pop(f"model.{part}.{i}.weight") for i in range(3)])
    return {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
            "rope.freq_base": float(far), "rope.freq_base_swa": float(near),
            "attention.sliding_window": c["sliding_window"], "attention.shared_kv_layers": c["num_kv_shared_layers"],
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]],
            "altup.active_idx": c["altup_active_idx"], "altup.num_inputs": c["altup_num_inputs"],
            "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
            "final_logit_softcapping": float(c["final_logit_softcapping"]), "activation_sparsity_scale": [
                float(np.float32(NormalDist().inv_cdf(share))) if share else -np.inf
                for share in c["activation_sparsity_pattern"]]}


def latent_before(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The metadata of files with keys and values in one tensor: widths of keys and values, not of the latent."""
    found = {key: value for key, value in latent(c, tensors).items() if not key.endswith("_mla")}
    return found | {"attention.head_count_kv": c["num_attention_heads"], "attention.value_length": c["v_head_dim"],
                    "attention.key_length": c["qk_nope_head_dim"] + c["qk_rope_head_dim"]}


def deepseek_before(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: x} if "kv_b_proj" in name else deepseek(name, x, c)


def before(name: str) -> Kind:
    return dataclasses.replace(KINDS[name], metadata=latent_before, change=deepseek_before)


def scanned(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The metadata of a Mamba, which has no attention: the converter writes 0 for its heads."""
    return {"context_length": 2 ** 20, "feed_forward_length": 0, "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"], "ssm.conv_kernel": c["conv_kernel"],
            "ssm.state_size": c["state_size"], "ssm.inner_size": 2 * c["hidden_size"],
            **({"ssm.group_count": c["n_groups"], "ssm.time_step_rank": c["num_heads"]} if "n_groups" in c else {
                "ssm.time_step_rank": c["time_step_rank"], "ssm.dt_b_c_rms": False})}


def mamba(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: -np.exp(x) if name.endswith("A_log") else x.squeeze() if "conv1d" in name else x}


def bamba_metadata(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    head = c["hidden_size"] // c["num_attention_heads"]
    return {**states(c, c["mamba_expand"] * c["hidden_size"]), "rope.scaling.finetuned": True,
            "rope.dimension_count": head // 2, "attention.head_count_kv": [
                c["num_key_value_heads"] * (i in c["attn_layer_indices"]) for i in range(c["num_hidden_layers"])]}


def bamba(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return mamba2(name, turned(name, x, c), c["mamba_n_groups"])


def mistral4(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return {f"{name}.weight": x} if ".experts." in name else deepseek(name, x, c)


def tempered(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    rope = c["rope_parameters"]
    trained = rope["original_max_position_embeddings"]
    return latent(c, tensors) | {
        "leading_dense_block_count": 0, "expert_weights_norm": c["norm_topk_prob"], "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"], "rope.scaling.original_context_length": trained,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"], "attention.temperature_length": trained}


def chosen(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return latent(c, tensors) | {
        "leading_dense_block_count": 1, "expert_weights_norm": c["norm_topk_prob"], "expert_gating_func": 2,
        "attention.indexer.head_count": c["index_n_heads"], "attention.indexer.key_length": c["index_head_dim"],
        "attention.indexer.top_k": c["index_topk"],
        "attention.indexer.types": [int(kind == "full") for kind in c["indexer_types"]]}


def kimi(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if name.endswith("A_log"):
        return {name: -np.exp(x)}
    if name.endswith("conv1d.weight"):
        return {name: x.reshape(1, x.shape[0], 1, -1)}
    return deepseek(name.replace(".dt_bias", ".dt_proj.bias"), x, c)


def channels(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    full = [kind == "full_attention" for kind in c["layer_types"]]
    return {"context_length": 64, "attention.head_count_kv": list(map(int, full)),
            "attention.kv_lora_rank": c["kv_lora_rank"],
            "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
            "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
            "attention.value_length_mla": c["v_head_dim"], "rope.dimension_count": c["qk_rope_head_dim"],
            "kda.head_dim": c["linear_head_dim"], "ssm.conv_kernel": c["linear_conv_kernel_dim"],
            "expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_token"],
            "expert_feed_forward_length": c["moe_intermediate_size"], "expert_gating_func": 2,
            "expert_shared_count": c["num_shared_experts"], "leading_dense_block_count": 1,
            "expert_weights_scale": float(c["routed_scaling_factor"]),
            **({"attention.q_lora_rank": c["q_lora_rank"]} if c["q_lora_rank"] else {})}


def mimo2(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return {f"{name}.weight": x} if "attention_sink" in name else deepseek(name, x, c)


def windows(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    near = [kind == "sliding_attention" for kind in c["layer_types"]]
    ropes = c["rope_parameters"]
    groups = c["num_key_value_heads"]
    return {"attention.head_count_kv": [groups * (1 + slides) for slides in near],
            "attention.sliding_window_pattern": list(map(int, near)), "attention.value_length": c["v_head_dim"],
            "attention.sliding_window": c["sliding_window"], "attention.key_length": c["head_dim"],
            "attention.value_scale": c["attention_value_scale"],
            "rope.dimension_count": int(c["head_dim"] * ropes["full_attention"]["partial_rotary_factor"]),
            "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
            "expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"],
            "expert_feed_forward_length": c["moe_intermediate_size"], "expert_gating_func": 2}


def hunyuan(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {"expert_count": c["num_experts"], "expert_used_count": c["moe_topk"], "expert_shared_count": 1,
            "expert_feed_forward_length": c["intermediate_size"], "attention.key_length": c["head_dim"],
            "expert_shared_feed_forward_length": c["intermediate_size"], "attention.value_length": c["head_dim"]}


# llama.cpp takes the least divisor of the layers' norms for those of latents, queries and keys, too. It requires 64
# index channels or a multiple.
KDA = {"linear_num_heads": 4, "rms_norm_eps": 1e-6, "num_expert_group": 1, "topk_group": 1}
ALTUP = {"altup_num_inputs": 4, "vocab_size_per_layer_input": 260}
FOUR = {"attention_chunk_size": 8192, "floor_scale": 8192, "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1],
        "layer_types": None}

MORE = {
    "bamba": Kind("granitehybrid", "bamba", bamba_metadata, bamba),
    "deepseek-v2-before": before("deepseek-v2"), "deepseek-v3-before": before("deepseek-v3"),
    "llama4": Kind("llama4", "llama4", chunked, llama4, FOUR),
    "gemma3n": Kind("gemma3n", "gemma3n", streams, gemma3n, ALTUP),
    "mistral4": Kind("mistral4", "mistral4", tempered, mistral4),
    "glm-dsa": Kind("glm-dsa", "glm5", chosen, deepseek, {
        "attention_bias": False, "rms_norm_eps": 1e-6, "index_head_dim": 64}),
    "kimi-linear": Kind("kimi-linear", "kimi-linear", channels, kimi, KDA),
    "kimi-linear-query": Kind("kimi-linear", "kimi-linear-query", channels, kimi, {**KDA, "mlp_layer_types": None}),
    "mimo2": Kind("mimo2", "mimo-v2-flash", windows, mimo2),
    "hunyuan-moe": Kind("hunyuan-moe", "hunyuan-moe", hunyuan, more={
        "moe_topk": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "gpt-oss": Kind("gpt-oss", "gpt-oss", sinks, gpt_oss, {
        "hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 7.0}),
    "gpt-oss-mxfp4": Kind("gpt-oss", "gpt-oss", sinks, gpt_oss, {
        "hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 7.0},
        lambda place: Type.MXFP4 if place.endswith("exps.weight") else Type.F32)}
"""Small checkpoints by name."""

RECURRENT = {"mamba": Kind("mamba", "", scanned, mamba), "mamba2": Kind(
    "mamba2", "", scanned, lambda name, x, c: mamba2(name, x, c["n_groups"]))}
"""Networks of state-space layers by name."""
