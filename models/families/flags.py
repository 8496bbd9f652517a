"""Entries of a `config.json` that change what a model computes, in families that may not read them.

An entry that is ignored gives another model without a word. So each of these is compared with the decoder that was
read; one that it does not show is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from decodax.models.blocks.options import Layer
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.reading import Json
from decodax.models.residual.options import HyperConnections


def _clipped(field: str) -> Callable[[DecoderConfig, Any], bool]:
    """Returns the test that the clipped activation of all mixtures has a value of a field, and that there is one."""
    def shown(d: DecoderConfig, value: Any) -> bool:
        found = {layer.mixture.glu for layer in d.layers if layer.mixture is not None}
        return len(found) == 1 and (glu := found.pop()) is not None and getattr(glu, field) == value

    return shown


def _mixtures(field: str) -> Callable[[DecoderConfig, Any], bool]:
    """Returns the test that all mixtures of a decoder have a value of a field, and that there is one."""
    def shown(d: DecoderConfig, value: Any) -> bool:
        found = {getattr(layer.mixture, field) for layer in d.layers if layer.mixture is not None}
        return found == {value}

    return shown


def _chosen(layer: Layer) -> int | None:
    """Returns the number of keys that a query of a layer attends to, which an index chooses; None without one."""
    if layer.latent is not None:
        return None if layer.latent.indexer is None else layer.latent.indexer.top
    return layer.recurrent.index.top if isinstance(layer.recurrent, Pooling) and layer.recurrent.index else None


SHOWN: dict[str, Callable[[DecoderConfig, Any], bool]] = {
    "alibi": lambda d, value: any(layer.bias is not None for layer in d.layers),
    "altup_num_inputs": lambda d, value: d.streams is not None and d.streams.count == value,
    "attention_k_eq_v": lambda d, value: any(layer.keys_as_values for layer in d.layers),
    "attn_logit_softcapping": lambda d, value: d.attention_softcap == value,
    "attn_output_gate": lambda d, value: any(layer.output_gate for layer in d.layers),
    "use_attention_gate": lambda d, value: any(
        layer.output_gate is not None and layer.output_gate.each == "heads" for layer in d.layers),
    "clip_qkv": lambda d, value: d.qkv_clip == value,
    "embedding_multiplier": lambda d, value: d.embed_scale == value,
    "enable_moe_block": lambda d, value: any(layer.experts is not None for layer in d.layers),
    "hidden_size_per_layer_input": lambda d, value: d.layer_inputs is not None and d.layer_inputs.width == value,
    "hc_magnitude": lambda d, value: isinstance(d.streams, HyperConnections) and d.streams.magnitude == value,
    "hc_mult": lambda d, value: isinstance(d.streams, HyperConnections) and d.streams.count == value,
    "index_topk": lambda d, value: all(_chosen(layer) in (None, value) for layer in d.layers) and any(
        layer.shared_key or _chosen(layer) for layer in d.layers),
    # Layers of MiniMax M3 may leave the index out, and such an activation in MLPs is that of no other family.
    "index_topk_blocks": lambda d, value: d.glu is not None and d.glu.shift == 1.0 and all(
        layer.index is None or layer.index.top == value for layer in d.layers),
    "kv_lora_rank": lambda d, value: all(layer.latent is not None and layer.latent.rank == value
                                         for layer in d.layers if layer.recurrent is None),
    "o_lora_rank": lambda d, value: all(layer.shared_key is not None and layer.shared_key.out_rank == value
                                        for layer in d.layers),
    "q_lora_rank": lambda d, value: all((own := layer.latent or layer.shared_key) is not None
                                        and own.query_rank == value
                                        for layer in d.layers if layer.recurrent is None or layer.shared_key),
    "final_logit_softcapping": lambda d, value: d.logit_softcap == value,
    "logits_scaling": lambda d, value: math.isclose(d.logit_scale * value, 1.0),
    "num_kv_shared_layers": lambda d, value: sum(layer.reads is not None for layer in d.layers) == value,
    "moe_routed_scaling_factor": _mixtures("scale"),
    "moe_router_logit_softcapping": _mixtures("softcap"),
    "n_group": _mixtures("groups"),
    "output_multiplier": lambda d, value: d.logit_scale == value,
    "qk_scale_factor": lambda d, value: all(layer.scale == value * d.head_dim ** -0.5 for layer in d.layers),
    "qk_layernorm": lambda d, value: d.qk_norm is not None,
    "residual_multiplier": lambda d, value: d.residual_scale == value,
    "routed_scaling_factor": _mixtures("scale"),
    "scale_attn_by_inverse_layer_idx": lambda d, value: len({layer.scale for layer in d.layers}) == len(d.layers),
    "swiglu_alpha": _clipped("alpha"),
    "swiglu_limit": _clipped("limit"),
    # Of the tokens of an image alone, which no text has.
    "use_bidirectional_attention": lambda d, value: value == "vision",
    "use_parallel_residual": lambda d, value: d.block == "parallel",
    "use_sandwich_norm": lambda d, value: d.block == "sandwich",
    "use_qk_norm": lambda d, value: d.qk_norm is not None,
}
"""Tests of whether a decoder does what an entry says."""

MISSING = ("apply_residual_connection_post_layernorm", "scale_depth", "scale_emb", "use_attention_sinks")
"""Entries that no family here has."""

HARMLESS = re.compile(
    r"(^_|drop|initializer|init_std|variance_scale|init_method|token_id$|token_index$|router_aux|output_|jitter|summary_|dtype|version"
    r"|architectures|auto_map|use_cache|is_decoder|is_encoder_decoder|return_dict|problem_type|id2label|label2id|chunk_size"
    r"|gradient_checkpointing|pretraining_tp|slow_but_exact|reorder_and_upcast_attn|name_or_path|unsloth|task_specific"
    r"|tokenizer_class|linear_dt_|linear_a_log_|model_max_length|fp32_combine|nextn|norm_min|coef_clip|quantization_config|attn_implementation"
    r"|sink_init|mamba_kernels|mambapy|associative_scan|logits_to_keep|z_loss|prenorm_residual|shared_expert_overlap|^mtp_"
    r"|time_step_(floor|min|max))")
"""Entries that do not change what a model computes, or that are read elsewhere."""


def refuse_unread(c: Json, found: DecoderConfig) -> None:
    """Refuses entries of a `config.json` that change what a model computes and that the decoder `found` does not show.

    Raises:
        ValueError: there is one; the message has its key.
    """
    for key, value in c.items():
        shown = SHOWN.get(key, (lambda d, value: False) if key in MISSING else None)
        # No factor or number among these entries changes anything at 0 or 1.
        off = value is None or value is False or (not isinstance(value, bool) and value in (0, 1))
        if shown is None or off or shown(found, value):
            continue
        raise ValueError(f"{key}: got {value!r}, which a {c.get('model_type')} model does not have here; takes none")
