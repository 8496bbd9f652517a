"""Tensor names of DeepSeek V4: the fields of `decodax.models.names.Names`."""

from __future__ import annotations

from typing import Any

PARTS = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
LAYER = {"attn_in": "attn_norm", "mlp_in": "ffn_norm", "mlp.router": "ffn.gate",
         **{f"attn.{ours}": f"attn.{theirs}" for ours, theirs in (
             ("q_a", "wq_a"), ("q_a_norm", "q_norm"), ("q_b", "wq_b"), ("kv", "wkv"), ("kv_norm", "kv_norm"),
             ("o_a", "wo_a"), ("o_b", "wo_b"), ("pool.values", "compressor.wkv"), ("pool.scores", "compressor.wgate"),
             ("pool.norm", "compressor.norm"), ("pool.index_values", "indexer.compressor.wkv"),
             ("pool.index_scores", "indexer.compressor.wgate"), ("pool.index_norm", "indexer.compressor.norm"),
             ("pool.index_q", "indexer.wq_b"), ("pool.index_weigh", "indexer.weights_proj"))},
         **{f"mlp.shared.{ours}": f"ffn.shared_experts.{theirs}" for ours, theirs in PARTS}}
HYPER = ("fn", "base", "scale")
HALVES = {f"{ours}.{part}": f"{theirs}_{part}" for ours, theirs in (("attn_hc", "hc_attn"), ("mlp_hc", "hc_ffn"))
          for part in HYPER}
"""The shares of hyper-connections for the halves of a layer."""

DEEPSEEK_V4: dict[str, Any] = {
    "layer": LAYER, "experts": {f"mlp.{ours}": f"ffn.experts.{{expert}}.{theirs}" for ours, theirs in PARTS},
    "stem": "", "embed": "embed", "head": "head", "correction": "ffn.gate.bias",
    "extra": {"attn.sinks": "attn.attn_sink", "mlp.hashed": "ffn.gate.tid2eid", "attn.pool.bias": "attn.compressor.ape",
              "attn.pool.index_bias": "attn.indexer.compressor.ape",
              **HALVES},
    "outside": {f"streams.{part}": f"hc_head_{part}" for part in HYPER},
    # Directories that transformers has saved have some of its own names outside of layers, and one norm renamed.
    "variants": (("model.hc_head.hc_fn", {
        "stem": "model.", "embed": "embed_tokens", "layer": {**LAYER, "attn.kv_norm": "attn.norm"},
        "outside": {f"streams.{part}": f"hc_head.hc_{part}" for part in HYPER}}),)}

NAMES: dict[str, dict[str, Any]] = {"deepseek_v4": DEEPSEEK_V4}
