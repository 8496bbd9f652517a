"""Writes small checkpoints of families that the package gguf 0.19 does not name as GGUF files, see
`tests.io.gguf.converting`. The names of their tensors are those of llama.cpp's converter of October 2026."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.io.gguf.converting import KINDS, Kind, Tensors, permuted
from tests.io.gguf.converting_more import chosen
from tests.models import tiny

Change = Callable[[str, np.ndarray, dict[str, Any]], dict[str, np.ndarray]]

PLACES = {
    **dict.fromkeys(("self_attn.g_proj.weight", "self_attn.gate_proj.weight", "self_attn.linear_gate.weight"),
                    "attn_gate.weight"),
    **dict.fromkeys(("self_attn.sinks", "self_attn.learnable_sink_param", "attn.attn_sink"), "attn_sinks.weight"),
    **{f"mlp.{old}.weight": f"{new}.weight" for old, new in (
        ("router.gate", "ffn_gate_inp"), ("linear_gate", "ffn_gate"),
        *((f"{shared}.{part}_proj", f"ffn_{part}_shexp") for part in ("gate", "up", "down")
          for shared in ("shared_mlp", "shared_expert", "shared_experts")),
        ("shared_experts.linear_gate", "ffn_gate_shexp"), ("gate", "ffn_gate_inp"))},
    "mlp.expert_bias": "exp_probs_b",
    **dict.fromkeys(("mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias", "ffn.gate.bias",
                     "mlp.gate.expert_bias"), "exp_probs_b.bias"),
    **{f"mlp.experts.{part}_proj{tail}": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")
       for tail in ("", ".weight")},
    **{f"{old}{part}": f"hc_{new}_{part}.weight" for part in ("fn", "base", "scale") for old, new in (
        ("hc_attn_", "attn"), ("hc_ffn_", "ffn"), ("hc_pre.hc_attn_layer.hc_", "attn"),
        ("hc_pre.hc_mlp_layer.hc_", "ffn"))},
    **{f"self_attn.indexer.{old}": f"indexer.{new}" for old, new in (
        ("k_norm.weight", "k_norm.weight"), ("k_norm.bias", "k_norm.bias"), ("q_norm.weight", "q_norm.weight"),
        ("weights_proj.weight", "proj.weight"), ("wk.weight", "attn_k.weight"), ("wq_b.weight", "attn_q_b.weight"),
        ("q_proj.weight", "q_proj.weight"), ("k_proj.weight", "k_proj.weight"))},
    **{f"self_attn.indexer.index_kpool_compress_{part}": f"indexer_compressor_{part}.weight"
       for part in ("ape", "gate")},
    **{f"self_attn.{old}.weight": f"{new}.weight" for old, new in (
        ("f_a_proj", "ssm_f_a"), ("f_b_proj", "ssm_f_b"), ("g_a_proj", "ssm_g_a"), ("g_b_proj", "ssm_g_b"),
        ("b_proj", "ssm_beta"), ("o_norm", "ssm_norm"), *((f"{x}_conv1d", f"ssm_conv1d_{x}") for x in "qkv"))},
    "self_attn.A_log": "ssm_a", "self_attn.dt_bias": "ssm_dt.bias",
    # DeepSeek V4
    **{f"attn.{old}.weight": f"{new}.weight" for old, new in (
        ("wq_a", "attn_q_a"), ("wq_b", "attn_q_b"), ("q_norm", "attn_q_a_norm"), ("wkv", "attn_kv"),
        ("norm", "attn_kv_a_norm"), ("wo_a", "attn_output_a"), ("wo_b", "attn_output_b"),
        ("indexer.wq_b", "indexer.attn_q_b"), ("indexer.weights_proj", "indexer.proj"), *(
            (f"{inside}compressor.{old}", f"{whole}_compressor_{new}") for inside, whole in (
                ("", "attn"), ("indexer.", "indexer")) for old, new in (
                ("wkv", "kv"), ("wgate", "gate"), ("norm", "norm"))))},
    "attn.compressor.ape": "attn_compressor_ape.weight", "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn_norm.weight": "attn_norm.weight", "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight", "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{f"ffn.{old}.{w}.weight": f"ffn_{part}_{new}.weight" for w, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
       for old, new in (("experts", "exps"), ("shared_experts", "shexp"))}}
"""Names of tensors within a layer by their names in checkpoints."""

WHOLE = {"hc_pre.hc_head.hc_head_": "output_hc_", "hc_head.hc_pre.hc_head_": "output_hc_", "hc_head.hc_": "output_hc_"}


def placed(change: Change = lambda name, x, c: {name: x}) -> Change:
    """Returns what renames tensors after a change of their values."""
    def run(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
        if re.search(r"(^|\.)(visual|vision_\w+|vit)\.", name):
            return {}
        name = name.replace("model.language_model.", "model.").replace(".attention.", ".self_attn.").replace(
            ".self_attn.dense.", ".self_attn.o_proj.").replace("word_embeddings", "embed_tokens")
        found = {}
        for old, y in change(name, x, c).items():
            layer = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.*)", old)
            start = next((start for start in WHOLE if old.startswith(f"model.{start}")), None)
            if layer is not None and layer[2] in PLACES:
                old = f"blk.{layer[1]}.{PLACES[layer[2]]}"
            elif start is not None:
                old = f"{WHOLE[start]}{old.removeprefix(f'model.{start}')}.weight"
            found["output.weight" if old in ("head.weight", "lm_head.weight") else old] = y
        return found

    return run


def mixture(c: dict[str, Any], shared: str = "shared_expert_intermediate_size") -> dict[str, Any]:
    return {"expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"], "expert_gating_func": 2,
            "expert_feed_forward_length": c["moe_intermediate_size"], "expert_weights_norm": True,
            "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
            "expert_shared_feed_forward_length": c[shared]}


def laguna(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    far, near = (c["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    return {**mixture(c), "expert_weights_scale": c["moe_routed_scaling_factor"],
            "attention.head_count": c["num_attention_heads_per_layer"] or [c["num_attention_heads"]] * 3,
            "attention.sliding_window": c["sliding_window"], "leading_dense_block_count": 1,
            "rope.freq_base": float(far["rope_theta"]), "rope.freq_base_swa": float(near["rope_theta"]),
            "rope.dimension_count": c["head_dim"] // 2, "rope.dimension_count_swa": c["head_dim"],
            **(yarn if far["rope_type"] == "yarn" else {})}


def turned(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    part = re.search(r"self_attn\.([qk])_proj\.", name)
    heads = "num_attention_heads" if part and part[1] == "q" else "num_key_value_heads"
    return {name: permuted(x, c[heads]) if part else x}


def muse(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Adds 1 to the norms of layers, and writes the factor of queries as a norm."""
    found = {key: y + name.endswith("layernorm.weight") for key, y in turned(name, x, c).items()}
    if (layer := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.q_proj\.weight", name)) is not None:
        found |= {f"blk.{layer[1]}.attn_{part}_norm.weight": np.full(c["head_dim"], factor, np.float32)
                  for part, factor in (("q", c["qk_scale_factor"]), ("k", 1.0))}
    return found


def near(c: dict[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": c["sliding_window"],
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]]}


def granite_swa(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {**near(c), "embedding_scale": c["embedding_multiplier"], "residual_scale": c["residual_multiplier"],
            "attention.scale": c["attention_multiplier"], "logit_scale": c["logits_scaling"],
            "attention.rope_pattern": [base != 0 for base in c["layer_rope_theta"]],
            **({} if "num_local_experts" not in c else {
                "expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"],
                "expert_shared_feed_forward_length": c["shared_intermediate_size"]})}


def granite_moe(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    together = {"block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps", "shared_mlp.output_linear.weight":
                "ffn_down_shexp", "block_sparse_moe.experts.down_proj": "ffn_down_exps",
                "block_sparse_moe.router.weight": "ffn_gate_inp", "block_sparse_moe.input_linear.weight":
                "ffn_gate_up_exps", "block_sparse_moe.output_linear.weight": "ffn_down_exps",
                "block_sparse_moe.router.layer.weight": "ffn_gate_inp", "shared_mlp.input_linear.weight":
                "ffn_up_shexp"}
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if layer is not None and layer[2] in together:
        return {f"blk.{layer[1]}.{together[layer[2]]}.weight": x}
    return turned(name, x, c)


def indexed(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    yarn = c["rope_parameters"]
    found = chosen({**c, "indexer_types": []}, tensors)
    return {key: value for key, value in found.items() if "types" not in key} | {
        "rope.scaling.type": "yarn", "rope.scaling.factor": yarn["factor"], "rope.scaling.yarn_log_multiplier": 0.1,
        "rope.scaling.original_context_length": yarn["original_max_position_embeddings"]}


def hyper(c: dict[str, Any]) -> dict[str, Any]:
    bound = [float(c["swiglu_limit"])] * c["num_hidden_layers"]
    return {"hyper_connection.count": c["hc_mult"], "hyper_connection.epsilon": c["hc_eps"], "swiglu_clamp_exp": bound,
            "hyper_connection.magnitude": c.get("hc_magnitude"), "swiglu_clamp_shexp": (
                bound if "hc_sinkhorn_iters" in c else None),
            "hyper_connection.sinkhorn_iterations": c.get("hc_sinkhorn_iters")}


def hy4(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {**chosen({**c, "first_k_dense_replace": 1}, tensors), **hyper(c)}


def absorbed(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if "gate_up_proj" in name and "experts" in name:
        gate, up = np.split(x, 2, -2)
        return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    if name.endswith("A_log"):
        return {name: -np.exp(x)}
    if "conv1d" in name:
        return {name: x.reshape(1, x.shape[0], 1, -1)}
    if "kv_b_proj" not in name:
        return {name: x}
    k, v = np.split(x.reshape(c["num_attention_heads"], -1, x.shape[-1]), [c["qk_nope_head_dim"]], 1)
    return {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}


def glm5_next(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    attends = [kind == "indexed_attention" for kind in c["layer_types"]]
    return {**chosen({**c, "first_k_dense_replace": 1}, tensors), **hyper(c), "attention.head_count_kv": list(map(
        int, attends)), "rope.dimension_count": 0, "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "kda.head_dim": c["linear_head_dim"], "kda.gate_lower_bound": c["linear_lower_bound"],
        "attention.layer_norm_epsilon": 1e-6, "attention.indexer.kpool": c["index_kpool"],
        "attention.indexer.kpool_select_tail": True}


def ling3(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in c["layer_types"]]
    plain = {**c, "n_routed_experts": c["num_experts"], "num_experts_per_tok": c["num_experts_per_token"],
             "n_shared_experts": c["num_shared_experts"], "n_group": c["num_expert_group"], "first_k_dense_replace": 1}
    return {**KINDS["deepseek-v2"].metadata(plain, tensors), "attention.head_count_kv": list(map(int, attends)),
            "expert_gating_func": 2, "expert_weights_norm": True, "ssm.conv_kernel": c["linear_conv_kernel_dim"],
            "kda.head_dim": c["linear_head_dim"], "kda.safe_gate": True, "kda.gate_lower_bound": c["kda_lower_bound"],
            "rope.freq_base": float(c["rope_parameters"]["rope_theta"]), "context_length": 64}


def ling3_change(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    gate = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([fg])_proj\.weight", name)
    if gate is not None and c["layer_types"][int(gate[1])] == "linear_attention":
        return {f"blk.{gate[1]}.ssm_{gate[2]}_a.weight": x}
    return {name: np.exp(x)[:, None]} if name.endswith("A_log") else absorbed(name, x, c)


def deepseek_v4(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    yarn = c["rope_parameters"]["compress"]
    return {**hyper(c), "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
            "rope.dimension_count": c["qk_rope_head_dim"], "attention.q_lora_rank": c["q_lora_rank"],
            "attention.sliding_window": c["sliding_window"], "expert_feed_forward_length": c["moe_intermediate_size"],
            "expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"],
            "expert_shared_count": 1, "expert_weights_scale": float(c["routed_scaling_factor"]),
            "expert_weights_norm": True, "expert_gating_func": 4, "attention.indexer.head_count": c["index_n_heads"],
            "attention.indexer.key_length": c["index_head_dim"], "attention.indexer.top_k": c["index_topk"],
            "attention.output_group_count": c["o_groups"], "attention.output_lora_rank": c["o_lora_rank"],
            "attention.compress_ratios": [ratios[kind] for kind in c["layer_types"]],
            "attention.compress_rope_freq_base": float(yarn["rope_theta"]),
            "rope.freq_base": float(c["rope_parameters"]["main"]["rope_theta"]), "hash_layer_count": 1,
            "rope.scaling.type": "yarn", "rope.scaling.factor": yarn["factor"],
            "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
            "embedding_length_out": c["hidden_size"] * c["hc_mult"]}


def minimax_m3(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {**mixture({**c, "num_experts": c["num_local_experts"], "moe_intermediate_size": c["intermediate_size"]},
                      "shared_intermediate_size"), "rope.dimension_count": c["rotary_dim"],
            "feed_forward_length": c["dense_intermediate_size"], "expert_shared_count": 1,
            "expert_weights_scale": float(c["routed_scaling_factor"]), "leading_dense_block_count": 1,
            "rope.freq_base": float(c["rope_parameters"]["rope_theta"]),
            **{f"attention.indexer.{theirs}": c[ours] for ours, theirs in (
                ("index_n_heads", "head_count"), ("index_head_dim", "key_length"), ("index_block_size", "block_size"),
                ("index_topk_blocks", "top_k"), ("index_local_blocks", "local_blocks"))}}


def minimax_m3_change(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if "gate_up_proj" in name:
        gate, up = np.split(x, 2, -2)
        return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return {name: x + name.endswith("norm.weight")}


# llama.cpp requires 64 index channels or a multiple, four residual streams in some families, pools of 4 and 128, and
# has some divisors of norms in its code.
PLAIN = {"attention_bias": False, "rms_norm_eps": 1e-6, "index_head_dim": 64}
SPARSE = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
NEW: dict[str, Kind] = {
    "hy3": Kind("hy_v3", "hy3", lambda c, t: {
        **mixture({**c, "width": c["moe_intermediate_size"] * c["num_shared_experts"]}, "width"),
        "expert_weights_scale": float(c["router_scaling_factor"])}, placed(), like="dots1"),
    "laguna": Kind("laguna", "laguna", laguna, placed(), {"moe_router_logit_softcapping": 0.0}, like="dots1"),
    "laguna-channels": Kind("laguna", "laguna-channels", laguna, placed(), {
        **SPARSE, "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, like="dots1"),
    "muse-glimmer": Kind("muse-glimmer", "muse-glimmer", lambda c, t: {
        **near(c), "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
        "final_logit_softcapping": c["final_logit_softcapping"], "logit_scale": c["output_multiplier"]}, placed(muse), {
            "post_norm_eps": 1e-8, "attention_bias": False}, like="gemma2"),
    "granite-swa": Kind("granite_swa", "granite-swa", granite_swa, placed(turned), {
        "layer_rope_theta": [0, 1e4, 1e4]}, like="granite"),
    "granite-moe-swa": Kind("granite_swa", "granite-moe-swa", granite_swa, placed(granite_moe), {
        "layer_rope_theta": [1e4, 1e4, 0]}, like="granite"),
    "olmo3": Kind("olmo2", "olmo3", lambda c, t: {
        **near(c), "rope.freq_base": 1e4, "rope.freq_base_swa": 1e4, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}, more={"rope_parameters": {
            "full_attention": tiny.YARN["rope_parameters"],
            "sliding_attention": tiny.rope("default")["rope_parameters"]}}),     # llama.cpp has one base
    "glm": Kind("chatglm", "glm", lambda c, t: {
        "rope.dimension_count": 8, "attention.layer_norm_rms_epsilon": 1e-5}, more={
            "head_dim": 16, "hidden_size": 64, "rms_norm_eps": 1e-5}, like="glm4"),
    "youtu": Kind("deepseek2", "youtu", lambda c, t: {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": 16, "attention.key_length": 24,
        "expert_shared_count": 0, "attention.value_length": 16, "attention.value_length_mla": 10,
        "attention.key_length_mla": 20,
        "rope.dimension_count": 8, "leading_dense_block_count": 3, "attention.q_lora_rank": 12,
        "expert_feed_forward_length": 48}, placed(absorbed)),
    "deepseek-v32": Kind("deepseek32", "deepseek-v32", indexed, placed(absorbed), {
        "rms_norm_eps": 1e-6, "index_head_dim": 64, "rope_parameters": {
            **tiny.YARN["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}}, like="deepseek2"),
    "deepseek-v4": Kind("deepseek4", "deepseek-v4", deepseek_v4, placed(), {
        "hc_mult": 4, "index_head_dim": 64, "compress_rates": {
            "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}}, like="deepseek2"),
    "hy4-vl": Kind("hy_v4", "hy4-vl", hy4, placed(absorbed), {
        **PLAIN, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}, like="deepseek2"),
    "glm5-next": Kind("glm5-next", "glm5-next", glm5_next, placed(absorbed), {
        **PLAIN, "hc_mult": 4, "linear_num_heads": 4, "n_group": 1, "topk_group": 1, "mlp_layer_types": [
            "dense", *["sparse"] * 4]}, like="deepseek2"),
    "ling3": Kind("bailingmoe3", "ling3", ling3, placed(ling3_change), {
        "attention_bias": False, "num_hidden_layers": 4}, like="deepseek2"),
    # Without flash attention llama.cpp attends to all blocks.
    "minimax-m3": Kind("minimax-m3", "minimax-m3", minimax_m3, placed(minimax_m3_change), {
        **SPARSE, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "shared_intermediate_size": 24, "index_topk_blocks": 16}, like="dots1")}
"""Small checkpoints by name."""
