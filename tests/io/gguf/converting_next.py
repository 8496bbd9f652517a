"""Writes small checkpoints with a layer for multi-token prediction as GGUF files, see `tests.io.gguf.converting`. Those
of Hy3, GLM-5, GLM-5.3 Flash and Ling 3 are as llama.cpp's converter of October 2026 writes them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from tests.io.gguf.converting import KINDS, Kind, delta, mixture, qwen3_5
from tests.io.gguf.converting_more import MORE
from tests.io.gguf.converting_new import NEW

NEXT = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "shared_head_norm",
        "shared_head.head": "shared_head_head", "embed_tokens": "embed_tokens"}


def next_layer(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Renames the tensors of a layer for multi-token prediction, as the package `gguf` does for GLM-4.5 alone."""
    for theirs, own in NEXT.items():
        if (found := re.fullmatch(rf"model\.layers\.(\d+)\.{re.escape(theirs)}\.weight", name)) is not None:
            return {f"blk.{found[1]}.nextn.{own}.weight": x}
    return {name: x}


def glm4_moe(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return next_layer(name.replace("e_score_correction_bias", "e_score_correction.bias"), x, c)


def qwen3_5_next(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    whole = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
             "norm": "shared_head.norm"}
    count = c["num_hidden_layers"]
    name = re.sub(r"^mtp\.layers\.(\d+)", lambda found: f"model.layers.{count + int(found[1])}", name)
    if name.endswith("experts.gate_up_proj"):
        return {f"blk.{count}.ffn_{part}_exps.weight": half for part, half in zip(
            ("gate", "up"), np.split(x, 2, axis=1), strict=True)}
    if name.endswith("experts.down_proj"):
        return {f"blk.{count}.ffn_down_exps.weight": x}
    name = re.sub(r"^mtp\.(\w+)\.weight$", lambda found: f"model.layers.{count}.{whole[found[1]]}.weight", name)
    return {new: z for old, y in qwen3_5(name, x, c).items() for new, z in next_layer(old, y, c).items()}


def with_next(metadata: Any) -> Any:
    """Adds a layer to the metadata. Lists of the layers have one entry more, but for those that choose tokens."""
    def run(c: dict[str, Any], tensors: Any) -> dict[str, Any]:
        found = {key: [*value, value[-1] or 1] if isinstance(value, list) and "types" not in key else value
                 for key, value in metadata(c, tensors).items()}
        return found | {"block_count": c["num_hidden_layers"] + 1, "nextn_predict_layers": 1}

    return run


def following(kind: Kind, norm: str, **more: Any) -> Kind:
    """Returns a kind of checkpoint with one layer more, whose final norm has a name of its own; `more` are further
    options of the checkpoint."""
    def change(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
        name = name.replace("language_model.", "").replace("mlp.e_score_correction_bias", "mlp.expert_bias")
        last = re.fullmatch(r"model\.layers\.(\d+)\.(final_layernorm|shared_head\.norm)\.weight", name)
        if last is not None:
            return {f"blk.{last[1]}.{norm}.weight": x}
        found = next_layer(name, x, c)
        kinds = {"layer_types": [*c["layer_types"], "full_attention"]} if "layer_types" in c else {}
        return found if name not in found else kind.change(name, x, {**c, **kinds})

    return dataclasses.replace(kind, metadata=with_next(kind.metadata), change=change, more=more)


WITH_NEXT = {
    "qwen3.5": Kind("qwen35", "", with_next(delta), qwen3_5_next),
    "glm4-moe": Kind("glm4moe", "", with_next(lambda c, t: {
        "expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"], "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": float(c["routed_scaling_factor"]), "expert_weights_norm": c["norm_topk_prob"],
        "leading_dense_block_count": c["first_k_dense_replace"], "expert_group_count": c["n_group"],
        "expert_group_used_count": c["topk_group"], "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"], "rope.dimension_count": int(c["head_dim"] * c.get(
            "rope_parameters", c).get("partial_rotary_factor", 0.5))}), glm4_moe),
    "qwen3.5-moe": Kind("qwen35moe", "", with_next(mixture), qwen3_5_next),
    "deepseek-v3": following(KINDS["deepseek-v3"], "nextn.shared_head_norm", **KINDS["deepseek-v3"].more),
    "deepseek-v32": following(NEW["deepseek-v32"], "nextn.shared_head_norm", **NEW["deepseek-v32"].more),
    "hy3": following(NEW["hy3"], "nextn.shared_head_norm"),
    "glm5": following(MORE["glm-dsa"], "nextn.shared_head_norm", attention_bias=False, rms_norm_eps=1e-6),
    "glm5-next": following(NEW["glm5-next"], "nextn.shared_head_norm", **{
        key: value for key, value in NEW["glm5-next"].more.items() if key != "index_head_dim"}),
    "ling3": following(NEW["ling3"], "layer_output_norm", attention_bias=False, mlp_layer_types=["dense", "sparse"])}
"""Checkpoints with a layer for multi-token prediction, by the name in `tests/drafters/inside/checkpoints.py`."""
