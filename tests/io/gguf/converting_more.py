"""Writes small checkpoints of further families as GGUF files, see `tests.io.gguf.converting`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.io.gguf.converting import Kind, Tensors


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


MORE = {
    "gpt-oss": Kind("gpt-oss", "gpt-oss", sinks, gpt_oss, {
        "hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 7.0}),
    "gpt-oss-mxfp4": Kind("gpt-oss", "gpt-oss", sinks, gpt_oss, {
        "hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 7.0},
        lambda place: Type.MXFP4 if place.endswith("exps.weight") else Type.F32)}
"""Small checkpoints by name."""
