"""Tensor names of families with per-layer embeddings: the fields of `decodax.models.names.Names`."""

from __future__ import annotations

from typing import Any

from decodax.models.recurrent.names import ATTENTION, MLP, STACKED

GEMMA: dict[str, str] = {
    **ATTENTION, **MLP, "attn_in": "input_layernorm", "attn_out": "post_attention_layernorm",
    "mlp_in": "pre_feedforward_layernorm", "mlp_out": "post_feedforward_layernorm",
    "inputs.narrow": "per_layer_input_gate", "inputs.widen": "per_layer_projection",
    "inputs.norm": "post_per_layer_input_norm"}
OUTSIDE = {"layer_inputs.table": "embed_tokens_per_layer.weight",
           "layer_inputs.project.kernel": "per_layer_model_projection.weight",
           "layer_inputs.norm.scale": "per_layer_projection_norm.weight"}

GEMMA4: dict[str, Any] = {
    "layer": {**GEMMA, "mlp.router": "router.proj",
              **{f"mlp.shared.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
              "mlp.shared_in": "pre_feedforward_layernorm", "mlp.shared_out": "post_feedforward_layernorm_1",
              "mlp.experts_in": "pre_feedforward_layernorm_2", "mlp.experts_out": "post_feedforward_layernorm_2"},
    "experts": {part: name.removeprefix("mlp.") for part, name in STACKED.items()}, "fused": (("mlp.gate", "mlp.up"),),
    "extra": {"factor.scale": "layer_scalar", "mlp.router_in.scale": "router.scale",
              "mlp.expert_scale": "router.per_expert_scale"},
    "outside": OUTSIDE}

GEMMA3N: dict[str, Any] = {
    "layer": {**GEMMA, **{f"streams.{ours}": f"altup.{theirs}" for ours, theirs in (
                  ("router", "modality_router"), ("router_norm", "router_norm"), ("predict", "prediction_coefs"),
                  ("correct", "correction_coefs"))},
              **{f"low_rank.{ours}": f"laurel.{theirs}" for ours, theirs in (
                  ("narrow", "linear_left"), ("widen", "linear_right"), ("norm", "post_laurel_norm"))}},
    "extra": {"streams.scale": "altup.correct_output_scale"},
    "outside": {**OUTSIDE, **{f"streams.{ours}.{i}.kernel": f"{theirs}.{i}.weight"
                              for i in range(64) for ours, theirs in (
                                  ("into", "altup_projections"), ("out", "altup_unembed_projections"))}}}

DIFFUSION_GEMMA: dict[str, Any] = {
    **GEMMA4, "layers": "decoder.layers", "embed": "decoder.embed_tokens", "norm": "decoder.norm",
    "extra": {**GEMMA4["extra"], "factor.canvas": "layer_scalar"},
    "outside": {"conditioning.norm.scale": "decoder.self_conditioning.pre_norm.weight",
                **{f"conditioning.mlp.{part}.kernel": f"decoder.self_conditioning.{part}_proj.weight"
                   for part in ("gate", "up", "down")},
                # All other tensors of the encoder are those of the decoder.
                **{f"layers.{i}.factor.scale": f"encoder.language_model.layers.{i}.layer_scalar" for i in range(256)}}}

NAMES: dict[str, dict[str, Any]] = {
    "diffusion_gemma_text": DIFFUSION_GEMMA, "gemma4_text": GEMMA4, "gemma4_unified_text": GEMMA4,
    "gemma3n_text": GEMMA3N}
