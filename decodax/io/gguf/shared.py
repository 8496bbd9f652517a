"""Entries and tensor names that several architectures share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from decodax.io.gguf.metadata import Metadata

Entries = Callable[[Metadata, dict[str, Any]], dict[str, Any]]
"""Adds the entries of a family's `config.json` to those that all families share."""

SHARED = {f"mlp.shared.{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
LATE = {"mlp_in": "post_attention_norm"}
CORRECTION = {"mlp.correction": "exp_probs_b.bias"}
SHARED_GATE = {**SHARED, "mlp.shared_gate": "ffn_gate_inp_shexp"}


def plain(kind: str, more: Callable[[Metadata], dict[str, Any]] = lambda m: {}) -> Entries:
    """Returns the reader of a family that adds `more` to the entries that all families share."""
    return lambda m, c: {**c, "model_type": kind, **more(m)}


def experts(m: Metadata, count: str = "num_experts", width: bool = True) -> dict[str, Any]:
    """Returns the entries of a mixture; `count` is the name of the number of experts, `width` is False if experts have
    the inner width of other layers."""
    own = {"moe_intermediate_size": m.need("expert_feed_forward_length")} if width else {}
    return {count: m.need("expert_count"), "num_experts_per_tok": m.need("expert_used_count"), **own}


def routed(m: Metadata) -> dict[str, Any]:
    """Returns the entries of a mixture with shared experts, groups of experts and a factor."""
    return {**experts(m, "n_routed_experts"), "first_k_dense_replace": m.get("leading_dense_block_count", 0),
            "n_shared_experts": m.get("expert_shared_count", 0), "norm_topk_prob": m.get("expert_weights_norm", True),
            "routed_scaling_factor": m.get("expert_weights_scale", 1.0), "n_group": m.get("expert_group_count", 1),
            "topk_group": m.get("expert_group_used_count", 1)}


def kinds(near: Iterable[Any]) -> list[str]:
    """Returns the entry `layer_types`; `near` is true for layers with a sliding window."""
    return ["sliding_attention" if slides else "full_attention" for slides in near]


def depth(m: Metadata, c: dict[str, Any]) -> dict[str, int]:
    """Returns `num_hidden_layers`, the number of layers without those that predict further tokens, as an entry of
    `config.json`.

    Args:
        m: metadata of the GGUF file.
        c: the entries of `config.json` known so far, of which `num_hidden_layers` counts all layers.
    """
    return {"num_hidden_layers": c["num_hidden_layers"] - m.count("nextn_predict_layers", 0, 0)}


def scaled(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    """Returns the factors of Granite models by their names in `config.json`: those of embeddings, residuals, attention
    scores and logits.

    Args:
        m: metadata of the GGUF file.
        c: the entries of `config.json` known so far, of which `head_dim` is used.
    """
    return {"embedding_multiplier": m.get("embedding_scale", 1.0), "residual_multiplier": m.get("residual_scale", 1.0),
            "attention_multiplier": m.get("attention.scale", c["head_dim"] ** -0.5),
            "logits_scaling": m.get("logit_scale", 1.0)}
