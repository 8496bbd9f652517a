"""Tensor names of Mixtral and MiniMax: the fields of `decodax.models.names.Names`."""

from __future__ import annotations

from typing import Any

from decodax.models.recurrent.names import ATTENTION, MLP, NORMS, SHARED_HALVES, STACKED

EXPERTS = {f"mlp.{part}": f"block_sparse_moe.experts.{{expert}}.w{i}"
           for part, i in (("gate", 1), ("up", 3), ("down", 2))}
CORRECTION = "block_sparse_moe.e_score_correction_bias"
MIXTRAL = {**NORMS, **ATTENTION, "mlp.router": "block_sparse_moe.gate"}
INDEX = {f"attn.index.{part}": f"{part}_proj" for part in "qk"} | {
    f"attn.index.{part}": part for part in ("q_norm", "k_norm")}

RELEASED: dict[str, Any] = {
    "layer": {**MIXTRAL, **MLP, **{f"mlp.shared.{part}": f"block_sparse_moe.shared_experts.{part}_proj"
                                   for part in ("gate", "up", "down")},
              **{part: f"self_attn.index_{name}" for part, name in INDEX.items()}},
    "experts": EXPERTS, "correction": CORRECTION, "fused": ()}
"""Names of MiniMax M3 in files of the whole model, which transformers keeps when it saves this one."""

M3: dict[str, Any] = {
    "layer": {**NORMS, **ATTENTION, **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
              "mlp.down": "mlp.down_proj", "mlp.router": "mlp.gate",
              **dict.fromkeys(SHARED_HALVES, "mlp.shared_experts.gate_up_proj"),
              "mlp.shared.down": "mlp.shared_experts.down_proj",
              **{part: f"self_attn.indexer.{name}" for part, name in INDEX.items()}},
    "experts": STACKED, "fused": (("mlp.gate", "mlp.up"), SHARED_HALVES), "variants": ((CORRECTION, RELEASED),),
    "further": ("mtp.", "model.mtp.", "language_model.mtp.", "language_model.model.mtp.")}
"""Names of its language model alone."""

PARTS = "gate", "up", "down"
STEP_LAYER = {**NORMS, **ATTENTION, **MLP, "attn.gate": "self_attn.g_proj", "attn.q_norm": "self_attn.q_norm",
              "attn.k_norm": "self_attn.k_norm"}
STEP: dict[str, Any] = {
    "layer": {**STEP_LAYER, "mlp.router": "moe.gate",
              **{f"mlp.shared.{part}": f"share_expert.{part}_proj" for part in PARTS}},
    "experts": {f"mlp.{part}": f"moe.{part}_proj.weight" for part in PARTS}, "correction": "moe.router_bias",
    # The classes of transformers have other names, with which save_pretrained(save_original_format=False) writes.
    "variants": (("mlp.gate.e_score_correction_bias", {
        "layer": {**STEP_LAYER, "mlp.router": "mlp.gate",
                  **{f"mlp.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in PARTS}},
        "experts": STACKED, "fused": (("mlp.gate", "mlp.up"),), "correction": "mlp.gate.e_score_correction_bias"}),)}
"""Names of Step 3.5 and 3.7."""

NAMES: dict[str, dict[str, Any]] = {
    "step3p5": STEP,
    **{family: {"layer": MIXTRAL, "experts": EXPERTS} for family in ("mixtral", "phimoe")},
    "minimax_m2": {"layer": MIXTRAL, "experts": EXPERTS, "correction": CORRECTION}, "minimax_m3_vl_text": M3}
