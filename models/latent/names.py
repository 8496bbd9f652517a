"""Tensor names of families with multi-head latent attention: the fields of `decodax.models.names.Names`."""

from __future__ import annotations

import re
from typing import Any

from decodax.models.compressed.names import HALVES
from decodax.models.recurrent.names import KIMI, STACKED, TAPS

PARTS = ("gate", "up", "down")
OWN = {"gate": "w1", "up": "w3", "down": "w2"}
MLA: dict[str, Any] = {
    "layer": {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm",
              **{f"attn.{ours}": f"self_attn.{theirs}" for ours, theirs in (
                  ("q", "q_proj"), ("q_a", "q_a_proj"), ("q_a_norm", "q_a_layernorm"), ("q_b", "q_b_proj"),
                  ("kv_a", "kv_a_proj_with_mqa"), ("kv_a_norm", "kv_a_layernorm"), ("k_b", "kv_b_proj"),
                  ("v_b", "kv_b_proj"), ("o", "o_proj"), ("indexer.q", "indexer.wq_b"), ("indexer.k", "indexer.wk"),
                  ("indexer.k_norm", "indexer.k_norm"), ("indexer.weigh", "indexer.weights_proj"))},
              **{f"mlp.{part}": f"mlp.{part}_proj" for part in PARTS}, "mlp.router": "mlp.gate",
              **{f"mlp.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in PARTS}},
    "fused": (("attn.k_b", "attn.v_b"),), "grouped": True}
"""Tensor names of DeepSeek's layers. Keys and values of a head are two halves of one tensor."""

MISTRAL: dict[str, Any] = {
    **MLA, "fused": (*MLA["fused"], ("mlp.gate", "mlp.up")),
    "experts": {"mlp.gate": "mlp.experts.gate_up_proj", "mlp.up": "mlp.experts.gate_up_proj",
                "mlp.down": "mlp.experts.down_proj"}}

LARGE: dict[str, Any] = {
    "stem": "", "embed": "tok_embeddings", "head": "output", "fused": MLA["fused"],
    "outside": {"rope_factors": "lerope.alpha"},
    "layer": {"attn_in": "attention_norm", "mlp_in": "ffn_norm", "mlp.router": "gate",
              **{f"attn.{ours}": f"attention.{theirs}" for ours, theirs in (
                  ("q", "wq"), ("kv_a", "wkv_a_with_mqa"), ("kv_a_norm", "kv_a_norm"), ("k_b", "wkv_b"),
                  ("v_b", "wkv_b"), ("o", "wo"), ("indexer.q_in", "indexer.q_input_norm"),
                  ("indexer.q", "indexer.wq_b"), ("indexer.k", "indexer.wk"), ("indexer.k_norm", "indexer.k_norm"),
                  ("indexer.weigh", "indexer.weights_proj"))},
              **{f"mlp.{ours}{part}": f"{theirs}.{own}" for ours, theirs in (("", "feed_forward"),
                                                                            ("shared.", "shared_experts"))
                 for part, own in OWN.items()}},
    "experts": {f"mlp.{part}": f"experts.{{expert}}.{own}" for part, own in OWN.items()},
    "extra": {f"attn.{part}growth.{leaf}": f"attention.{part}ssmax_scaling.{leaf[0]}"
              for part in ("", "indexer.") for leaf in ("scale", "bias")}}
"""Fields that have other values in the files of Mistral Large 4 that Mistral AI released."""

GATED = {**MLA["layer"], "attn.gate": "self_attn.linear_gate"}
GATES = {**GATED, **{f"mlp.{ours}gate": f"mlp.{theirs}linear_gate" for ours, theirs in (
    ("", ""), ("shared.", "shared_experts."))}}


def _streams(attention: str, mlp: str, sinks: str) -> dict[str, str]:
    """Returns the names inside a layer of the sinks, and of the weights of the hyper-connections of both halves, whose
    prefixes are `attention` and `mlp`."""
    return {"attn.sinks": f"self_attn.{sinks}", **{
        f"{ours}.{leaf}": f"{theirs}{leaf}"
        for ours, theirs in (("attn_hc", attention), ("mlp_hc", mlp)) for leaf in ("fn", "base", "scale")}}


def _ends(prefix: str) -> dict[str, str]:
    """Returns the names of the weights that make one vector out of the streams, which have a common `prefix`."""
    return {f"streams.{leaf}": f"{prefix}{leaf}" for leaf in ("fn", "base", "scale")}


PLACES = ("", ""), ("", "hc_pre."), ("hc_pre.", "")
HY4: dict[str, Any] = {
    **MISTRAL, "layer": {**MLA["layer"], "attn.gate": "self_attn.gate_proj"},
    "extra": _streams("attn_hc.", "ffn_hc.", "sinks"), "outside": _ends("hc_head.hc_"),
    # transformers loads several layouts of released files. The one that it saves has other prefixes, and puts the name
    # of attention's gates into the MLPs, too.
    "variants": (
        (".self_attn.linear_gate.weight", {"layer": GATED}),
        *((f".{part}.linear_gate.weight", {"layer": GATES}) for part in ("mlp", "shared_experts")),
        *((f".{start}hc_attn_layer.{inner}hc_fn", {"extra": _streams(
            f"{start}hc_attn_layer.{inner}hc_", f"{start}hc_mlp_layer.{inner}hc_", "learnable_sink_param")})
          for start, inner in PLACES),
        *((f".{start}hc_head.{inner}hc_head_fn", {"outside": _ends(f"{start}hc_head.{inner}hc_head_")})
          for start, inner in PLACES))}
"""Tensor names of Hunyuan Hy4."""

# The gated delta rule of Kimi Linear, and the hyper-connections of DeepSeek V4.
GLM: dict[str, Any] = {
    **MLA, "layer": {**{ours: name for ours, name in KIMI["layer"].items() if not ours.startswith("mlp.")},
                     **MLA["layer"]},
    "extra": {**KIMI["extra"], **HALVES, "attn.indexer.pool.scores": "self_attn.indexer.index_kpool_compress_gate",
              "attn.indexer.pool.bias": "self_attn.indexer.index_kpool_compress_ape"}}
GLM["variants"] = (("forget_gate.A_log", {
    "fused": (*MLA["fused"], ("mlp.gate", "mlp.up"), TAPS), "grouped": False,
    "repeated": {MLA["fused"][0]: "heads"}, "experts": STACKED,
    "layer": {ours: re.sub(r"\.(f_[ab]_proj)", r".forget_gate.\1", name) for ours, name in GLM["layer"].items()},
    "extra": {**GLM["extra"], **dict.fromkeys(TAPS, "self_attn.conv1d.weight"),
              **{f"attn.{x}": f"self_attn.forget_gate.{x}" for x in ("A_log", "dt_bias")},
              **{ours: re.sub(r"hc_(\w+)_(\w+)", r"\1_hc.\2", name) for ours, name in HALVES.items()}}}),)

LONGCAT: dict[str, Any] = {
    **MLA, "halves": 2, "correction": "mlp.router.e_score_correction_bias", "further": ("model.mtp.", "mtp."),
    "layer": {**{ours: name.replace("self_attn.", "self_attn.{half}.") for ours, name in MLA["layer"].items()
                 if ours.startswith("attn.")},
              "attn_in": "input_layernorm.{half}", "mlp_in": "post_attention_layernorm.{half}",
              **{f"mlp.{part}": f"mlps.{{half}}.{part}_proj" for part in PARTS},
              "shortcut.router": "mlp.router.classifier"},
    "experts": {f"shortcut.{part}": f"mlp.experts.{{expert}}.{part}_proj" for part in PARTS}}
"""Tensor names of LongCat-Flash, each of whose layers is two of the decoder."""

NAMES: dict[str, dict[str, Any]] = {
    "longcat_flash": LONGCAT,
    "hy_v4": HY4, "hy_v4_vl_text": HY4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "youtu"),
                    MLA),
    "glm5_next_text": GLM, "mistral4": MISTRAL,
    "mistral_large4_text": {
        **MISTRAL, "further": ("mtp_dspark.",), "outside": {"rope_factors": "rotary_emb.alpha"},
        "layer": {**MLA["layer"], "attn.indexer.q_in": "self_attn.indexer.q_input_norm"},
        "extra": {f"attn.{part}growth.{leaf}": f"self_attn.{part}softmax_scaling.{leaf}"
                  for part in ("", "indexer.") for leaf in ("scale", "bias")},
        "variants": (("tok_embeddings.weight", LARGE),)}}
