"""Writes small checkpoints of transformers as GGUF files, by the rules of llama.cpp's converter.

Names are those that the package `gguf` gives to the tensors of checkpoints; what the converter does to a tensor beside
that is said here once more, in its terms.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from tests.io.gguf.writing import byte_level
from tests.models import tiny

Tensors = dict[str, np.ndarray]
VOCAB = 260


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a small checkpoint becomes a file.

    Attributes:
        arch: name of the architecture.
        case: key of `tests.models.tiny.CASES`.
        metadata: entries beside those that all have, from the `config.json` and the tensors.
        change: returns what the converter makes of a tensor under its name in the checkpoint, by name.
        more: further entries of the `config.json`.
        type: the type of a tensor by its name in the file.
        like: name of an architecture with the same names of tensors, if the package gguf does not have this one.
    """

    arch: str
    case: str
    metadata: Callable[[dict[str, Any], Tensors], dict[str, Any]]
    change: Callable[[str, np.ndarray, dict[str, Any]], dict[str, np.ndarray]] = lambda name, x, c: {name: x}
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    type: Callable[[str], Type] = lambda place: Type.F32
    like: str = ""


def stacked(tensors: Tensors) -> Tensors:
    """Joins the tensors of single experts."""
    found: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, x in tensors.items():
        if (one := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)) is not None:
            experts.setdefault(one[1] + one[3], {})[int(one[2])] = x
        else:
            found[name] = x
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """Puts the halves of a rotated head into pairs of neighbours."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def turned(name: str, x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    if re.search(r"\.q_proj\.(weight|bias)$", name):
        return permuted(x, c["num_attention_heads"])
    return permuted(x, c["num_key_value_heads"]) if re.search(r"\.k_proj\.(weight|bias)$", name) else x


def mamba2(name: str, x: np.ndarray, groups: int) -> dict[str, np.ndarray]:
    if name.endswith("A_log"):
        return {name: -np.exp(x)[:, None]}
    if name.endswith(".D"):
        return {name: x[:, None]}
    if name.endswith("conv1d.weight"):
        return {name: x.squeeze()}
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return {name: x.reshape(groups, -1)}
    return {name.replace(".dt_bias", ".dt_proj.bias"): x}


def tiles(x: np.ndarray, axis: int, c: dict[str, Any], size: int) -> np.ndarray:
    """Repeats heads of values instead of grouping them."""
    shape, keys = x.shape, c["linear_num_key_heads"]
    split = x.reshape(*shape[:axis], keys, c["linear_num_value_heads"] // keys, size, *shape[axis + 1:])
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1).reshape(shape))


def qwen3_next(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if name.endswith("A_log"):
        return {name: -np.exp(x)}
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        x = x + 1
    if "in_proj_qkvz" in name:
        wide = c["linear_value_head_dim"] * values // keys
        sizes = np.cumsum([c["linear_key_head_dim"], c["linear_key_head_dim"], wide])
        q, k, v, z = (part.reshape(-1, x.shape[1]) for part in np.split(x.reshape(keys, -1, x.shape[1]), sizes, 1))
        return {name.replace("qkvz", "qkv"): np.concatenate([q, k, v]), name.replace("qkvz", "z"): z}
    return {name.replace(".dt_bias", ".dt_proj.bias"): x.squeeze() if "conv1d" in name else x}


def qwen3_5(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    size, keys = c["linear_value_head_dim"], 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    if "in_proj_qkv." in name or "conv1d" in name:
        x = np.concatenate([x[:keys], tiles(x[keys:], 0, c, size)])
    elif "in_proj_z" in name:
        x = tiles(x, 0, c, size)
    elif re.search(r"in_proj_[ab]\.|A_log|dt_bias", name):
        x = tiles(x, 0, c, 1)
    elif "linear_attn.out_proj" in name:
        x = tiles(x, 1, c, size)
    return qwen3_next(name, x, c)


def deepseek(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): x}
    if "kv_b_proj" not in name:
        return {name: x}
    k, v = np.split(x.reshape(c["num_attention_heads"], -1, x.shape[-1]), [c["qk_nope_head_dim"]], 1)
    return {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}


def granite(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    number = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("input_linear.weight"):
        kind = "_exps" if "block_sparse" in name else "_shexp" if c["num_local_experts"] else ""
        gate, up = np.split(x, 2, -2)
        return {f"blk.{number}.ffn_gate{kind}.weight": gate, f"blk.{number}.ffn_up{kind}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight") and not c["num_local_experts"]:
        return {f"blk.{number}.ffn_down.weight": x}
    return mamba2(name, turned(name, x, c), c["mamba_n_groups"])


def falcon_h1(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    inner, states = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
    factors = {"down_proj": c["mlp_multipliers"][1], "gate_proj": c["mlp_multipliers"][0],
               "k_proj": c["key_multiplier"] * c["attention_in_multiplier"], "q_proj": c["attention_in_multiplier"],
               "v_proj": c["attention_in_multiplier"], ".o_proj": c["attention_out_multiplier"],
               "out_proj": c["ssm_out_multiplier"], "lm_head": c["lm_head_multiplier"],
               "embed_tokens": c["embedding_multiplier"]}
    if "in_proj" in name:
        parts = np.split(x * c["ssm_in_multiplier"], np.cumsum([inner, inner, states, states]))
        return {name: np.concatenate([part * own for part, own in zip(parts, c["ssm_multipliers"], strict=True)])}
    if "pre_ff_layernorm" in name:
        return {f"blk.{name.split('.')[2]}.ffn_norm": x}       # so named by the package gguf
    factor = next((own for part, own in factors.items() if part in name), 1.0)
    return mamba2(name, x * np.float32(factor), c["mamba_n_groups"])


def nemotron_h(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if ".experts." in name:
        return {re.sub(r"backbone\.(layers\.\d+)\.mixer", r"model.\1.mlp", name): x}
    return mamba2(name.replace("e_score_correction_bias", "e_score_correction.bias"), turned(name, x, c), c["n_groups"])


def jamba(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if name.endswith("A_log"):
        return {name: -np.exp(x)}
    return {name.replace("feed_forward.experts", "mlp.experts"): x.squeeze() if "conv1d" in name else x}


def lfm2(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    name = name.replace("model.layers", "layers") if ".experts." in name else name
    return {name.replace(".expert_bias", ".expert_bias.bias"): x.squeeze(1) if "conv.conv" in name else x}


def falcon(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if "query_key_value" in name:
        groups, width = (c["num_kv_heads"] or 1) if c["new_decoder_architecture"] else 1, x.shape[1]
        parts = x.reshape(groups, -1, width // c["num_attention_heads"], width)
        x = np.concatenate([part.reshape(-1, width) for part in np.split(parts, [-2, -1], 1)])
    return {name: x}


def bloom(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    if "query_key_value" in name:
        parts = x.reshape(c["n_head"], 3, -1, *x.shape[1:])
        x = np.concatenate([parts[:, i].reshape(-1, *x.shape[1:]) for i in range(3)])
    return {name.removeprefix("transformer."): x}


def layers_of(c: dict[str, Any], kind: str, count: int) -> list[int]:
    return [count if own == kind else 0 for own in c["layer_types"]]


def delta(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {"ssm.conv_kernel": c["linear_conv_kernel_dim"], "ssm.state_size": c["linear_key_head_dim"],
            "ssm.group_count": c["linear_num_key_heads"], "ssm.time_step_rank": c["linear_num_value_heads"],
            "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
            "full_attention_interval": 2, "attention.key_length": c["head_dim"],
            "attention.value_length": c["head_dim"], "rope.dimension_count": c["head_dim"] // 4}


def mixture(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return delta(c, tensors) | {
        "expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c["shared_expert_intermediate_size"]}


def latent(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    v3 = c["model_type"] == "deepseek_v3"
    return {"attention.head_count_kv": 1, "attention.kv_lora_rank": c["kv_lora_rank"],
            "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
            "attention.value_length": c["kv_lora_rank"], "attention.value_length_mla": c["v_head_dim"],
            "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
            "rope.dimension_count": c["qk_rope_head_dim"], "leading_dense_block_count": c["first_k_dense_replace"],
            "expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"],
            "expert_feed_forward_length": c["moe_intermediate_size"], "expert_shared_count": c["n_shared_experts"],
            "expert_weights_scale": float(c["routed_scaling_factor"]), "expert_gating_func": 2 if v3 else 1,
            **({"attention.q_lora_rank": c["q_lora_rank"]} if c["q_lora_rank"] else {}),
            **({"expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]} if c["n_group"]
               else {}),
            **({"expert_weights_norm": True, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.1} if v3 else {})}


def states(c: dict[str, Any], inner: int) -> dict[str, Any]:
    return {"ssm.conv_kernel": c["mamba_d_conv"], "ssm.state_size": c["mamba_d_state"], "ssm.inner_size": inner,
            "ssm.group_count": c["mamba_n_groups"], "ssm.time_step_rank": c["mamba_n_heads"]}


def granite_h(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {**states(c, c["mamba_expand"] * c["hidden_size"]), "rope.scaling.finetuned": False,
            "attention.head_count_kv": layers_of(c, "full_attention", c["num_key_value_heads"]),
            "embedding_scale": c["embedding_multiplier"], "residual_scale": c["residual_multiplier"],
            "attention.scale": c["attention_multiplier"], "logit_scale": c["logits_scaling"],
            "expert_shared_feed_forward_length": c["shared_intermediate_size"],
            **({"expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"]}
               if c["num_local_experts"] else {})}


def nemotron(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    kinds = c["layers_block_type"]
    width = c["moe_intermediate_size"] if "moe" in kinds else c["intermediate_size"]
    return {"block_count": len(kinds), "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
            "attention.head_count_kv": [c["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
            "feed_forward_length": [width * (kind in ("moe", "mlp")) for kind in kinds],
            "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
            "ssm.conv_kernel": c["conv_kernel"], "ssm.state_size": c["ssm_state_size"],
            "ssm.group_count": c["n_groups"], "ssm.time_step_rank": c["mamba_num_heads"],
            "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"], **({
                "expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"],
                "expert_feed_forward_length": width, "expert_weights_norm": c["norm_topk_prob"],
                "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
                "expert_shared_count": 1, "expert_weights_scale": float(c["routed_scaling_factor"]),
                "expert_group_count": c["n_group"]} if "moe" in kinds else {})}


def scan(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    at = lambda i: i % c["attn_layer_period"] == c["attn_layer_offset"]
    return {"attention.head_count_kv": [c["num_key_value_heads"] * at(i) for i in range(c["num_hidden_layers"])],
            "ssm.conv_kernel": c["mamba_d_conv"], "ssm.inner_size": c["mamba_expand"] * c["hidden_size"],
            "ssm.state_size": c["mamba_d_state"], "ssm.time_step_rank": c["mamba_dt_rank"],
            "expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"]}


def short(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    width = next(x.shape[0] for name, x in tensors.items() if name.endswith("feed_forward.w1.weight"))
    return {"attention.head_count_kv": layers_of(c, "full_attention", c["num_key_value_heads"]),
            "shortconv.l_cache": c["conv_L_cache"], "attention.layer_norm_rms_epsilon": c["norm_eps"],
            "feed_forward_length": width, **({
                "expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"],
                "expert_feed_forward_length": c["moe_intermediate_size"], "expert_gating_func": 2,
                "leading_dense_block_count": c["num_dense_layers"]} if "num_experts" in c else {})}


def layer_norm(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    heads = c.get("n_head") or c.get("num_attention_heads")
    return {"attention.layer_norm_epsilon": c["layer_norm_epsilon"], "attention.head_count": heads,
            "attention.head_count_kv": heads, "feed_forward_length": 4 * (c.get("hidden_size") or c.get("n_embd")),
            "context_length": 64, **({"rope.dimension_count": c["rotary_dim"]} if "rotary_dim" in c else {}),
            "block_count": c.get("n_layer") or c.get("num_hidden_layers"),
            "embedding_length": c.get("hidden_size") or c.get("n_embd")}


def grouped(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    width = c["ffn_hidden_size"]
    return layer_norm(c, tensors) | {"feed_forward_length": width, "attention.head_count_kv": (
        c["num_kv_heads"] if c["new_decoder_architecture"] else 1)}


def xielu(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    each = lambda name: [float(np.ravel(tensors[f"model.layers.{i}.mlp.act_fn.{name}"])[0])
                         for i in range(c["num_hidden_layers"])]
    return {f"xielu.{name}": each(name) for name in ("alpha_p", "alpha_n", "beta", "eps")} | {
        "rope.freq_base": float(c["rope_parameters"]["rope_theta"])}


KINDS = {
    "lfm2": Kind("lfm2", "lfm2", short, lfm2), "lfm2-moe": Kind(
        "lfm2moe", "lfm2-moe", short, lfm2, {"routed_scaling_factor": 1.0}),
    "qwen3.5": Kind("qwen35", "qwen3.5", delta, qwen3_5),
    "qwen3.5-moe": Kind("qwen35moe", "qwen3.5-moe", mixture, qwen3_5),
    "qwen3-next": Kind("qwen3next", "qwen3-next", mixture, qwen3_next, {"mlp_only_layers": []}),
    "deepseek-v2": Kind("deepseek2", "deepseek-v2", latent, deepseek, {"rope_parameters": tiny.rope("default")[
        "rope_parameters"]}),
    "deepseek-v3": Kind("deepseek2", "deepseek-v3", latent, deepseek, {"rope_parameters": {
        **tiny.YARN["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "granite-h": Kind("granitehybrid", "granite-h", granite_h, granite),
    "granite-h-micro": Kind("granitehybrid", "granite-h-micro", granite_h, granite,
                            {"intermediate_size": 20}),
    "falcon-h1": Kind("falcon-h1", "falcon-h1", lambda c, t: {
        **states(c, c["mamba_d_ssm"]), "attention.key_length": 16, "attention.value_length": 16}, falcon_h1),
    "falcon-h1-gate-first": Kind("falcon-h1", "falcon-h1-gate-first", lambda c, t: {
        **states(c, c["mamba_d_ssm"]), "attention.key_length": 16, "attention.value_length": 16}, falcon_h1),
    "nemotron-h": Kind("nemotron_h_moe", "nemotron-h", nemotron, nemotron_h, {
        "intermediate_size": 24}),
    "nemotron-h-dense": Kind("nemotron_h", "nemotron-h-dense", nemotron, nemotron_h, {
        "use_bias": False, "mlp_bias": False}),
    "jamba": Kind("jamba", "jamba", scan, jamba),
    "falcon": Kind("falcon", "falcon", grouped, falcon), "falcon-40b": Kind("falcon", "falcon-40b", grouped, falcon),
    "bloom": Kind("bloom", "bloom", layer_norm, bloom), "gptj": Kind("gptj", "gptj", layer_norm),
    "apertus": Kind("apertus", "apertus", xielu, lambda name, x, c: {} if ".act_fn." in name else {name: x},
                    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "phimoe": Kind("phimoe", "phimoe", lambda c, t: {
        "expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"]},
        more={"router_jitter_noise": 0.01}),
}
"""Small checkpoints by name."""


def written(kind: Kind, directory: Path) -> tuple[Path, Path]:
    """Returns the directory of a small checkpoint and its GGUF file."""
    model = tiny.build(kind.case, vocab_size=VOCAB, **kind.more)
    tiny.write(model, directory)
    entries = model.config.to_dict()
    return directory, converted(directory, kind, entries.get("text_config", entries))


def converted(directory: Path, kind: Kind, c: dict[str, Any]) -> Path:
    """Returns a GGUF file of the checkpoint in a directory, whose configuration is `c`."""
    tensors = load_file(directory / "model.safetensors")
    file = gguf.GGUFWriter(str(directory / "model.gguf"), kind.arch)
    _metadata(file, c, kind.metadata(c, tensors))
    if c["vocab_size"] == VOCAB:
        byte_level(file)
    known = next(k for k, text in gguf.MODEL_ARCH_NAMES.items() if text == (kind.like or kind.arch))
    names = gguf.get_tensor_name_map(known, 64)
    changed = {new: y for old, x in stacked(tensors).items() for new, y in kind.change(old, x, c).items()}
    for place, x in _placed(changed, names):
        if place != "output.weight" or not c.get("tie_word_embeddings"):
            own, x = kind.type(place), np.ascontiguousarray(x, np.float32)
            x = x.astype(np.int32) if "tid2eid" in place else x
            file.add_tensor(place, x if own == Type.F32 else gguf.quants.quantize(x, own),
                            raw_dtype=None if own == Type.F32 else own)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return directory / "model.gguf"


def _placed(tensors: Tensors, names: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, x in tensors.items():
        place = name if name.startswith(("blk.", "output", "token_embd")) else names.get_name(
            name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        yield place, x


def _metadata(file: gguf.GGUFWriter, c: dict[str, Any], own: dict[str, Any]) -> None:
    rope = c.get("rope_parameters") or {}
    theta = rope.get("rope_theta", c.get("rope_theta"))
    shared = {"block_count": c.get("num_hidden_layers"), "context_length": c.get("max_position_embeddings"),
              "embedding_length": c.get("hidden_size"), "feed_forward_length": c.get("intermediate_size"),
              "attention.head_count": c.get("num_attention_heads"),
              "attention.head_count_kv": c.get("num_key_value_heads"), "attention.layer_norm_rms_epsilon": c.get(
                  "rms_norm_eps"), "rope.freq_base": None if theta is None else float(theta)}
    for key, value in {**shared, **own}.items():
        if value is not None:
            add = {float: file.add_float32, bool: file.add_bool, list: file.add_array,
                   str: file.add_string}.get(type(value), file.add_uint32)
            add(key if key.startswith(("xielu.", "diffusion.", "tokenizer.")) else f"{file.arch}.{key}", value)
