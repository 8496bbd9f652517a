"""Tensor names of Mixtral and MiniMax: the fields of `decodax.models.names.Names`."""

from __future__ import annotations

from typing import Any

from decodax.models.recurrent.names import ATTENTION, MLP, NORMS, SHARED_HALVES, STACKED

EXPERTS = {f"mlp.{part}": f"block_sparse_moe.experts.{{expert}}.w{i}"
           for part, i in (("gate", 1), ("up", 3), ("down", 2))}
CORRECTION = "block_sparse_moe.e_score_correction_bias"
MIXTRAL = {**NORMS, **ATTENTION, "mlp.router": "block_sparse_moe.gate"}
PARTS = ("q", "k", "q_norm", "k_norm")
M3 = {**MIXTRAL, **MLP, **{f"mlp.shared.{part}": f"block_sparse_moe.shared_experts.{part}_proj"
                      for part in ("gate", "up", "down")},
      **{f"attn.index.{part}": f"self_attn.index_{part}{'' if 'norm' in part else '_proj'}" for part in PARTS}}

SAVED: dict[str, Any] = {
    "layer": {**NORMS, **ATTENTION, **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
              "mlp.down": "mlp.down_proj", "mlp.router": "mlp.gate",
              **dict.fromkeys(SHARED_HALVES, "mlp.shared_experts.gate_up_proj"),
              "mlp.shared.down": "mlp.shared_experts.down_proj",
              **{f"attn.index.{part}": f"self_attn.indexer.{part}{'' if 'norm' in part else '_proj'}"
                 for part in PARTS}},
    "experts": STACKED, "correction": "mlp.gate.e_score_correction_bias",
    "fused": (("mlp.gate", "mlp.up"), SHARED_HALVES)}
"""Names of the language model alone, as transformers saves it."""

NAMES: dict[str, dict[str, Any]] = {
    **{family: {"layer": MIXTRAL, "experts": EXPERTS} for family in ("mixtral", "phimoe")},
    "minimax_m2": {"layer": MIXTRAL, "experts": EXPERTS, "correction": CORRECTION},
    "minimax_m3_vl_text": {
        "layer": M3, "experts": EXPERTS, "correction": CORRECTION, "other": (".gate_up_proj.weight", SAVED),
        "further": ("mtp.", "model.mtp.", "language_model.mtp.", "language_model.model.mtp.")}}
