"""Architectures of llama.cpp for families whose layers with a sliding window differ from the others, and for further
mixtures of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.gguf.metadata import Architecture, Metadata
from decodax.io.gguf.shared import CORRECTION, SHARED, depth, experts, kinds, plain, scaled
from decodax.io.gguf.views import Stored

GATE = {"attn.gate": "attn_gate"}
TURNED = r"blk\.\d+\.attn_[qk]_norm\.weight"


def _hy3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    count, wide = depth(m, c)["num_hidden_layers"], m.need("expert_feed_forward_length")
    if not m.get("expert_weights_norm", True):
        raise CheckpointError(f"{m.file.path}: {m.name}.expert_weights_norm: got False, takes True")
    return {**c, **depth(m, c), **experts(m), "model_type": "hy_v3", "attention_bias": m.biased,
            "mlp_layer_types": ["sparse" if mixes else "dense" for mixes in m.mixes()[:count]],
            "router_scaling_factor": m.get("expert_weights_scale", 1.0),
            "num_shared_experts": m.get("expert_shared_feed_forward_length", wide) // wide}


def _laguna(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    count, window = c["num_hidden_layers"], m.get("attention.sliding_window") or None
    heads, head = m.each("attention.head_count"), c["head_dim"]
    # Without a pattern every fourth layer attends to all positions, from the first on.
    near = m.each("attention.sliding_window_pattern", [i % 4 != 0 for i in range(count)]) if window else [False] * count
    gates = {m.file.tensors[name].shape[0] // own for i, own in enumerate(heads)
             if (name := f"blk.{i}.attn_gate.weight") in m.file.tensors}
    if gates not in ({1}, {head}):
        raise CheckpointError(f"{m.file.path}: blk.N.attn_gate.weight: got {sorted(gates)} outputs for each head, "
                              f"takes 1 or head_dim = {head} in every layer")
    own = {k: v for k, v in c.items() if k not in ("partial_rotary_factor", "rope_scaling")}
    far = {"rope_type": "default", "rope_theta": c["rope_theta"], **c.get("rope_scaling", {}),
           "partial_rotary_factor": c.get("partial_rotary_factor", 1.0)}
    close = {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", c["rope_theta"]),
             "partial_rotary_factor": m.get("rope.dimension_count_swa", head) / head}
    inner = m.need("expert_feed_forward_length")
    return {**own, **experts(m), "model_type": "laguna", "num_attention_heads": heads[0],
            "num_attention_heads_per_layer": heads, "layer_types": kinds(near), "sliding_window": window or 512,
            "mlp_layer_types": ["sparse" if mixes else "dense" for mixes in m.mixes()],
            "gating": "per-head" if gates == {1} else "per-element", "attention_bias": m.biased,
            "moe_routed_scaling_factor": m.get("expert_weights_scale", 1.0),
            "shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length", 0) or (
                inner * m.get("expert_shared_count", 1)),
            "rope_parameters": {"full_attention": far, "sliding_attention": close}}


def _muse(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    count, scales = c["num_hidden_layers"], {"q": 1.0, "k": 1.0}
    near = m.each("attention.sliding_window_pattern", [(i + 1) % 4 != 0 for i in range(count)])
    # The converter writes the factor of normed queries as a norm's weights.
    for part in scales:
        found = np.unique([np.unique(x) for name, x in m.factors.items() if f"attn_{part}_norm" in name])
        if len(found) != 1:
            raise CheckpointError(f"{m.file.path}: blk.N.attn_{part}_norm.weight: got {found.tolist()[:4]}, takes one "
                                  "number")
        scales[part] = float(f"{found[0]:.7g}")
    return {**c, "model_type": "muse_glimmer_text", "attention_bias": m.biased, "layer_types": kinds(near),
            "sliding_window": m.need("attention.sliding_window"), "output_multiplier": m.need("logit_scale"),
            "final_logit_softcapping": m.get("final_logit_softcapping"), "hidden_activation": "silu",
            "qk_scale_factor": scales["q"] * scales["k"], "layer_rope_theta": [
                c["rope_theta"] if slides else 0 for slides in near]}


def _granite_swa(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    turns, count = m.each("attention.rope_pattern", True), m.get("expert_count", 0)
    more = {"model_type": "granite_swa", "mlp_bias": m.has("ffn_up.bias")} if not count else {
        "model_type": "granitemoe_swa", **experts(m, "num_local_experts", False),
        "shared_intermediate_size": m.get("expert_shared_feed_forward_length", 0)}
    return {**c, **more, **scaled(m, c), "attention_bias": m.biased, "sliding_window": m.need(
        "attention.sliding_window"), "layer_types": kinds(m.each("attention.sliding_window_pattern")),
        "layer_rope_theta": [c["rope_theta"] if each else 0 for each in turns]}


SHARED_INPUTS = ("mlp.shared.gate.kernel", "mlp.shared.up.kernel")

WINDOWED: dict[str, Architecture] = {
    "chatglm": Architecture(plain("glm", lambda m: {"attention_bias": m.biased})),
    "granite_swa": Architecture(_granite_swa, permuted=True, names={
        "attn.sinks": "attn_sinks.weight", "mlp.shared.down": "ffn_down_shexp"}, views={
            path: Stored("ffn_up_shexp.weight", SHARED_INPUTS) for path in SHARED_INPUTS}),
    "hy_v3": Architecture(_hy3, names={**SHARED, "mlp.correction": "exp_probs_b"}),
    "laguna": Architecture(_laguna, names=SHARED | CORRECTION | GATE, by_layer=True),
    "muse-glimmer": Architecture(_muse, permuted=True, shifted=True, numbers=TURNED, names=GATE, outside={
        "norm.scale": Stored("output_norm.weight")})}       # whose scale has no offset
"""Architectures by their names in `general.architecture`."""
