"""Tensor names of families in which some layers have a recurrent block: the fields of `decodax.models.names.Names`."""

from __future__ import annotations

from typing import Any

NORMS = {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm"}
MLP = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
ATTENTION = {**{f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"}, "attn.q_norm": "self_attn.q_norm",
             "attn.k_norm": "self_attn.k_norm"}
SHARED = {"mlp.router": "mlp.gate", "mlp.shared_gate": "mlp.shared_expert_gate",
          **{f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}}
TAPS = ("attn.q_taps", "attn.k_taps", "attn.v_taps")
INTO, RATES = ("attn.in_q", "attn.in_k", "attn.in_v"), ("attn.in_b", "attn.in_a")
GATED = ("attn.q", "attn.gate")
"""Queries and output gates of attention: one tensor, in which those of a head are side by side."""

DELTA = {"attn.out": "linear_attn.out_proj", "attn.y_norm": "linear_attn.norm"}
EXTRA = {"attn.A_log": "linear_attn.A_log", "attn.dt_bias": "linear_attn.dt_bias",
         **dict.fromkeys(TAPS, "linear_attn.conv1d.weight")}
STACKED = {"mlp.gate": "mlp.experts.gate_up_proj", "mlp.up": "mlp.experts.gate_up_proj",
           "mlp.down": "mlp.experts.down_proj"}

QWEN = {**NORMS, **MLP, **SHARED, **ATTENTION, "attn.gate": "self_attn.q_proj", **DELTA}
QWEN3_5: dict[str, Any] = {
    "layer": {**QWEN, **dict.fromkeys(INTO, "linear_attn.in_proj_qkv"),
              **{f"attn.in_{x}": f"linear_attn.in_proj_{x}" for x in "zba"}},
    "extra": EXTRA, "fused": (GATED, INTO, TAPS), "repeated": {GATED: "heads"}, "stacked": STACKED,
    "further": ("mtp.",)}

INDEX = ("attn.index.q", "attn.index.k")
GATES_OF_STREAMS = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
QWEN4: dict[str, Any] = {
    **QWEN3_5,
    "layer": {**QWEN3_5["layer"], **dict.fromkeys(INDEX, "self_attn.indexer.index_qk_proj"),
              **{f"attn.index.{x}_norm": f"self_attn.indexer.{x}_layernorm" for x in "qk"},
              **{f"{half}_hc.{ours}": f"{half}_hyper_connection.{theirs}" for half in ("attn", "mlp")
                 for ours, theirs in (*GATES_OF_STREAMS.items(), ("inject", "block_inject_weight"))},
              **{f"ngrams.{x}": f"ple.{x}_proj" for x in ("key", "value")},
              **{f"ngrams.{x}_norm": f"ple.norm_{x}" for x in ("key", "query", "conv")}},
    "extra": {**EXTRA, "ngrams.table": "ple.ple_embedding.ngram_embedding.weight",
              "ngrams.conv_taps": "ple.conv1d.weight"}, "fused": (*QWEN3_5["fused"], INDEX),
    "outside": {f"streams.{ours}.{'scale' if ours == 'norm' else 'kernel'}": f"hyper_connection_mixer.{theirs}.weight"
                for ours, theirs in GATES_OF_STREAMS.items()}}

RECURRENT_GEMMA: dict[str, Any] = {
    "layer": {"attn_in": "temporal_pre_norm", "mlp_in": "channel_pre_norm",
              **{f"attn.{x}": f"temporal_block.{x}_proj" for x in "qkvo"},
              **{f"attn.{x}": f"temporal_block.linear_{x}" for x in ("x", "y", "out")},
              **{f"mlp.{part}": f"mlp_block.{part}_proj" for part in ("gate", "up", "down")}}, "norm": "final_norm",
    "extra": {"attn.taps": "temporal_block.conv_1d.weight", "attn.conv_bias": "temporal_block.conv_1d.bias",
              **{f"attn.{ours}": f"temporal_block.rg_lru.{theirs}" for ours, theirs in (
                  ("decay", "recurrent_param"), ("input_gate", "input_gate_weight"), ("input_bias", "input_gate_bias"),
                  ("decay_gate", "recurrent_gate_weight"), ("decay_bias", "recurrent_gate_bias"))}}}

GATES = ("attn.b", "attn.c", "attn.x")
LFM2: dict[str, Any] = {
    "layer": {**{f"attn.{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attn.o": "self_attn.out_proj",
              "attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm",
              "attn_in": "operator_norm", "mlp_in": "ffn_norm", **dict.fromkeys(GATES, "conv.in_proj"),
              "attn.out": "conv.out_proj", "mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3",
              "mlp.down": "feed_forward.w2", "mlp.router": "feed_forward.gate"},
    "experts": {f"mlp.{part}": f"feed_forward.experts.{{expert}}.w{i}"
                for part, i in (("gate", 1), ("up", 3), ("down", 2))},
    "correction": "feed_forward.expert_bias", "norm": "embedding_norm", "fused": (GATES,),
    "extra": {"attn.conv_taps": "conv.conv.weight", "attn.conv_bias": "conv.conv.bias"}}

LFM3: dict[str, Any] = {**LFM2, "layer": {
    **LFM2["layer"], "attn.o": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "attn.gate": "self_attn.gate_proj", "attn_out": "post_operator_norm", "mlp_out": "post_ffn_norm"}}

KEYS_VALUES = ("attn.k_b", "attn.v_b")
KIMI: dict[str, Any] = {
    "layer": {**NORMS, **MLP, **{f"attn.{x}": f"self_attn.{x}_proj" for x in "qo"}, "attn.out": "self_attn.o_proj",
              "attn.q_a": "self_attn.q_a_proj", "attn.q_a_norm": "self_attn.q_a_layernorm",
              "attn.q_b": "self_attn.q_b_proj", "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
              "attn.kv_a_norm": "self_attn.kv_a_layernorm",
              **dict.fromkeys(KEYS_VALUES, "self_attn.kv_b_proj"), "attn.y_norm": "self_attn.o_norm",
              **{f"attn.in_{x}": f"self_attn.{x}_proj" for x in "qkvb"},
              **{f"attn.{ours}": f"self_attn.{theirs}_proj" for ours, theirs in (
                  ("low_a", "f_a"), ("in_a", "f_b"), ("low_z", "g_a"), ("in_z", "g_b"))},
              "mlp.router": "block_sparse_moe.gate",
              **{f"mlp.shared.{x}": f"block_sparse_moe.shared_experts.{x}_proj" for x in ("gate", "up", "down")}},
    "experts": {f"mlp.{part}": f"block_sparse_moe.experts.{{expert}}.w{i}"
                for part, i in (("gate", 1), ("up", 3), ("down", 2))},
    "correction": "block_sparse_moe.gate.e_score_correction_bias", "fused": (KEYS_VALUES,),
    "grouped": True, "padded": {"attn.A_log": (2, 1)},
    "extra": {"attn.A_log": "self_attn.A_log", "attn.dt_bias": "self_attn.dt_bias",
              **{f"attn.{x}_taps": f"self_attn.{x}_conv1d.weight" for x in "qkv"}}}

LING: dict[str, Any] = {
    "layer": {**{ours: name for ours, name in KIMI["layer"].items() if not ours.startswith(("attn.low", "mlp."))},
              **MLP, "attn.in_a": "self_attn.forget_gate.f_proj", "attn.in_z": "self_attn.g_proj",
              "attn.gate": "self_attn.g_proj", "mlp.router": "mlp.gate",
              **{f"mlp.shared.{x}": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}},
    "experts": STACKED, "fused": (KEYS_VALUES, ("mlp.gate", "mlp.up"), TAPS), "repeated": {KEYS_VALUES: "heads"},
    "extra": {"attn.A_log": "self_attn.forget_gate.A_log", "attn.dt_bias": "self_attn.forget_gate.dt_bias",
              **dict.fromkeys(TAPS, "self_attn.conv1d.weight")}}
LING["variants"] = (("word_embeddings.weight", {
    "stem": "model.", "embed": "word_embeddings", "fused": (KEYS_VALUES,),
    "correction": "mlp.gate.expert_bias",
    "layer": {ours: name.replace("self_attn.forget_gate.", "attention.").replace("self_attn.o_proj", "attention.dense")
              .replace("self_attn.", "attention.") for ours, name in LING["layer"].items()},
    "experts": {f"mlp.{x}": f"mlp.experts.{{expert}}.{x}_proj" for x in ("gate", "up", "down")},
    "extra": {"attn.A_log": "attention.A_log", "attn.dt_bias": "attention.dt_bias",
              **{f"attn.{x}_taps": f"attention.{x}_conv1d.weight" for x in "qkv"}}}),)

STATES = {"A_log": "A_log", "D": "D", "dt_bias": "dt_bias", "y_scale": "norm.weight", "conv_taps": "conv1d.weight",
          "conv_bias": "conv1d.bias"}
SSD = ("z", "x", "b", "c", "dt")
"""Parts of the first projection of a block of Mamba-2, in the order of its tensor."""


def ssd(inside: str, tensor: str) -> dict[str, str]:
    """Returns the names in a checkpoint of the projections of a Mamba-2 block, by the network path: `inside` is the
    block's path, `tensor` its prefix in the file. The parts of the first projection share one tensor."""
    return {**{f"{inside}.in_{x}": f"{tensor}.in_proj" for x in SSD}, f"{inside}.out": f"{tensor}.out_proj"}


INPUTS = tuple(f"attn.in_{x}" for x in SSD)
SCAN = ("attn.in_x", "attn.in_z")
NEMOTRON_H: dict[str, Any] = {
    "layer": {"attn_in": "norm", "mlp_in": "norm", **{f"attn.{x}": f"mixer.{x}_proj" for x in "qkvo"},
              **ssd("attn", "mixer"), "mlp.router": "mixer.gate",
              **{f"mlp.{x}": f"mixer.{x}_proj" for x in ("up", "down")},
              **{f"mlp.shared.{x}": f"mixer.shared_experts.{x}_proj" for x in ("up", "down")},
              "mlp.latent_in": "mixer.fc1_latent_proj", "mlp.latent_out": "mixer.fc2_latent_proj"},
    "experts": {f"mlp.{x}": f"mixer.experts.{{expert}}.{x}_proj" for x in ("up", "down")},
    "correction": "mixer.gate.e_score_correction_bias", "stem": "backbone.", "embed": "embeddings", "norm": "norm_f",
    "extra": {f"attn.{ours}": f"mixer.{theirs}" for ours, theirs in STATES.items()}, "further": ("mtp.",),
    "fused": (INPUTS,)}
MAMBA = {**{f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"}, **ssd("attn", "mamba")}
BAMBA: dict[str, Any] = {
    "layer": {**MAMBA, "attn_in": "input_layernorm", "mlp_in": "pre_ff_layernorm", "mlp.router": "feed_forward.router",
              **{f"mlp.{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")}},
    "experts": {f"mlp.{x}": f"feed_forward.experts.{{expert}}.{x}_proj" for x in ("gate", "up", "down")},
    "norm": "final_layernorm", "extra": {f"attn.{ours}": f"mamba.{theirs}" for ours, theirs in STATES.items()},
    "fused": (INPUTS,)}
SHARED_HALVES = ("mlp.shared.gate", "mlp.shared.up")
GRANITE: dict[str, Any] = {
    "layer": {**MAMBA, **NORMS, "mlp.router": "block_sparse_moe.router.layer",
              **dict.fromkeys((*SHARED_HALVES, "mlp.gate", "mlp.up"), "shared_mlp.input_linear"),
              **dict.fromkeys(("mlp.shared.down", "mlp.down"), "shared_mlp.output_linear")},
    "experts": {**dict.fromkeys(("mlp.gate", "mlp.up"), "block_sparse_moe.input_linear.weight"),
                "mlp.down": "block_sparse_moe.output_linear.weight"},
    "extra": BAMBA["extra"], "fused": (INPUTS, ("mlp.gate", "mlp.up"), SHARED_HALVES)}

NAMES: dict[str, dict[str, Any]] = {
    "kimi_linear": KIMI, "nemotron_h": NEMOTRON_H, "granitemoehybrid": GRANITE, "bamba": BAMBA,
    "falcon_h1": {**BAMBA, "layer": {**BAMBA["layer"], **ssd("beside", "mamba")},
                  "fused": (tuple(f"beside.in_{x}" for x in SSD),),
                  "extra": {f"beside.{ours}": f"mamba.{theirs}" for ours, theirs in STATES.items()}},
    "jamba": {**BAMBA, "fused": (SCAN,),
              "layer": {**BAMBA["layer"], "attn.low": "mamba.x_proj", "attn.dt": "mamba.dt_proj",
                        **{f"attn.{x}_norm": f"mamba.{x}_layernorm" for x in ("dt", "b", "c")}}},
    "recurrent_gemma": RECURRENT_GEMMA, "bailing_hybrid": LING, "lfm2": LFM2, "lfm2_moe": LFM2, "lfm3": LFM3,
    "qwen3_next": {
        "layer": {**QWEN, **dict.fromkeys((*INTO, "attn.in_z"), "linear_attn.in_proj_qkvz"),
                  **dict.fromkeys(RATES, "linear_attn.in_proj_ba")},
        "extra": EXTRA, "fused": (GATED, (*INTO, "attn.in_z"), RATES, TAPS), "further": ("mtp.",), "stacked": STACKED,
        "repeated": {GATED: "heads", (*INTO, "attn.in_z"): "key_heads", RATES: "key_heads"}},
    "qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_5, "qwen4_exp_text": QWEN4,
    "olmo_hybrid": {
        "layer": {**MLP, **ATTENTION, "attn_in": "attention_layer_norm", "mlp_in": "feedforward_layer_norm",
                  "attn_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm",
                  **{f"attn.in_{x}": f"linear_attn.{x}_proj" for x in "qkvab"}, "attn.in_z": "linear_attn.g_proj",
                  "attn.out": "linear_attn.o_proj", "attn.y_norm": "linear_attn.o_norm"},
        "extra": {**EXTRA, **{f"attn.{x}_taps": f"linear_attn.{x}_conv1d.weight" for x in "qkv"}}},
}
