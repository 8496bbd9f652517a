"""The allowed values of the entries of a `config.json`: one table, checked before any entry is used.

Without the check, a wrong entry would fail late and with an unclear error: as a shape that does not fit, as a program
that never ends, or silently as a different model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from decodax.common.ids import named


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of entry.

    Attributes:
        takes: description of valid values.
        fits: returns True for a valid value.
    """

    takes: str
    fits: Callable[[Any], bool]


def _whole(low: int, high: int) -> Kind:
    return Kind(f"a whole number from {low} to {high:,}",
                lambda x: isinstance(x, int) and not isinstance(x, bool) and low <= x <= high)


def _number(takes: str, fits: Callable[[float], bool]) -> Kind:
    return Kind(takes, lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e30 and fits(x))


def _list(kind: Kind, what: str) -> Kind:
    return Kind(f"a list of {what}", lambda x: isinstance(x, list) and all(kind.fits(y) for y in x))


def _one_or_list(kind: Kind) -> Kind:
    return Kind(f"{kind.takes}, or a list of them", lambda x: kind.fits(x) or (
        isinstance(x, list) and x != [] and all(kind.fits(y) for y in x)))


TEXT = Kind("a name", lambda x: isinstance(x, str) and x != "")
FLAG = Kind("true or false", lambda x: isinstance(x, bool))
OBJECT = Kind("an object", lambda x: isinstance(x, Mapping))
NUMBER = _number("a number", lambda x: True)
POSITIVE = _number("a number above 0", lambda x: x > 0)
NOT_NEGATIVE = _number("a number from 0", lambda x: x >= 0)
SHARE = _number("a number above 0 and at most 1", lambda x: 0 < x <= 1)
LAYERS = _whole(1, 10_000)
HEADS = _whole(1, 1 << 16)
WIDTH = _whole(1, 1 << 20)
ENTRIES = _whole(1, 1 << 24)
POSITIONS = _whole(1, (1 << 31) - 1)
INDEX = _whole(0, (1 << 31) - 1)
IDS = Kind("a token id or a list of them",
           lambda x: all(INDEX.fits(y) for y in x) if isinstance(x, list) else INDEX.fits(x))
LAYERS_BY_NAME = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "linear_attention",
                  "conv", "attention", "mamba", "minimax_m3_sparse")
LAYER_TYPES = Kind(f"a list of {', '.join(map(repr, LAYERS_BY_NAME))}",
                   lambda x: isinstance(x, list) and all(y in LAYERS_BY_NAME for y in x))
PATTERN = Kind("a whole number from 1 to 10,000, or a text of L and G",
               lambda x: LAYERS.fits(x) or (isinstance(x, str) and x != "" and set(x) <= {"L", "G"}))

_KEYS: dict[Kind, str] = {
    TEXT: "model_type hidden_act hidden_activation activation_function activation_type rope_type type "
          "feed_forward_proj scoring_func topk_method position_embedding_type mlp_hidden_act mamba_hidden_act "
          "attention_method zero_expert_type att_impl_type moe_router_activation hybrid_override_pattern",
    FLAG: "attention_bias mlp_bias tie_word_embeddings use_sliding_window attention_k_eq_v enable_moe_block "
          "use_double_wide_mlp altup_correct_scale use_parallel_residual use_qkv_bias use_qk_norm qk_layernorm "
          "scale_attn_weights "
          "scale_attn_by_inverse_layer_idx add_cross_attention truncate include_qkv_bias weight_tying input_emb_norm "
          "scale_logits multi_query_attention causal_attn norm_topk_prob scale_decoder_outputs use_bias use_conv_bias "
          "residual_in_fp32 alibi new_decoder_architecture multi_query parallel_attn enable_bias "
          "do_layer_norm_before layer_norm_elementwise_affine apply_residual_connection_post_layernorm qkv_bias "
          "attention_out_bias attn_temperature_tuning lm_head_bias rope_interleave attn_output_gate "
          "linear_allow_neg_eigval moe_router_enable_expert_bias norm_head norm_softmax use_rmsnorm "
          "using_split_qkv_in_self_attention scale_embedding share_encoder_decoder_embeddings "
          "moe_apply_router_weight_on_input swa_attention_sink_enabled moe_router_use_sigmoid "
          "normalize_before add_final_layer_norm normalize_embedding mamba_conv_bias mamba_proj_bias mamba_rms_norm "
          "mamba_norm_before_gate projectors_bias conv_bias block_auto_adjust_ff_dim use_expert_bias tie_embedding "
          "use_cla use_mixed_mlp_moe use_attention_gate use_sandwich_norm group_limited_greedy indexer_rope_interleave "
          "use_gemma_norm use_routing_bias attention_output_gate use_sparse_attention kda_safe_gate moe_renormalize "
          "index_kpool_always_select_tail safe_gate mla_scale_q_lora mla_scale_kv_lora router_bias use_moe "
          "use_head_wise_attn_gate norm_expert_weight use_moe_router_bias zero_centered",
    OBJECT: "rope_scaling rope_parameters text_config full_attention sliding_attention diffusion "
            "dual_chunk_attention_config per_layer_config linear_attn_config sparse_attention_config main compress "
            "compress_rates attention_other_setting",
    NUMBER: "embedding_multiplier attention_multiplier residual_multiplier logit_scale mscale mscale_all_dim "
            "llama_4_scaling_beta attn_scale key_multiplier attention_in_multiplier attention_out_multiplier "
            "ssm_in_multiplier ssm_out_multiplier lm_head_multiplier hc_magnitude",
    POSITIVE: "rope_theta rope_local_base_freq query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping "
              "logits_scaling factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mlp_ratio "
              "expand rotary_emb_base clip_qkv alpha short_mscale long_mscale routed_scaling_factor "
              "router_scaling_factor floor_scale logits_soft_cap swiglu_alpha swiglu_limit attention_value_scale "
              "block_ffn_dim_multiplier moe_routed_scaling_factor qk_scale_factor output_multiplier "
              "compress_rope_theta moe_router_scaling_factor",
    NOT_NEGATIVE: "router_jitter_noise norm_eps norm_epsilon rms_norm_eps layer_norm_eps layer_norm_epsilon "
                  "post_norm_eps moe_router_logit_softcapping hc_eps",
    _number("a number below 0", lambda x: x < 0): "kda_lower_bound linear_lower_bound gate_lower_bound",
    SHARE: "partial_rotary_factor rotary_pct",
    PATTERN: "sliding_window_pattern",
    LAYERS: "num_hidden_layers n_layer n_layers no_rope_layer_interval decoder_sparse_step moe_layer_interval "
            "interleave_moe_layer_step num_layers num_decoder_layers full_attention_interval encoder_layers "
            "decoder_layers attn_layer_period expert_layer_period layer_group_size",
    HEADS: "num_attention_heads n_head n_heads num_key_value_heads n_kv_heads head_dim num_experts "
           "num_heads d_kv n_groups state_size conv_kernel conv1d_width num_kv_heads rotary_dim "
           "n_group topk_group n_routed_experts moe_num_experts moe_k num_ln_in_parallel_attn linear_num_key_heads "
           "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
           "qk_rope_head_dim qk_nope_head_dim v_head_dim index_n_heads index_head_dim encoder_attention_heads "
           "decoder_attention_heads num_mel_bins qk_head_dim top_k_experts num_global_key_value_heads global_head_dim "
           "altup_num_inputs conv_L_cache mamba_num_heads mamba_head_dim mamba_n_heads mamba_n_groups mamba_d_state "
           "mamba_d_conv mamba_expand ssm_state_size attention_head_dim linear_head_dim linear_num_heads "
           "num_experts_per_token num_attention_groups moe_top_k num_sliding_attention_heads "
           "num_expert_group short_conv_kernel_size sparse_num_index_heads sparse_index_dim "
           "hc_mult hc_sinkhorn_iters o_groups index_kpool hc_count indexer_n_heads indexer_kv_heads indexer_head_dim "
           "ple_conv_kernel_size ngram_size heads_per_ngram",
    WIDTH: "hidden_size n_embd n_embed d_model word_embed_proj_dim lru_width kv_lora_rank q_lora_rank laurel_rank "
           "mamba_d_ssm moe_latent_size o_lora_rank hc_lowrank ple_embed_dim",
    ENTRIES: "vocab_size embedding_size intermediate_size n_inner mlp_hidden_size moe_intermediate_size d_ff "
             "ffn_dim ffn_hidden_size intermediate_size_mlp shared_expert_intermediate_size "
             "dense_intermediate_size expert_intermediate_size expert_ffn_hidden_size "
             "share_expert_dim share_expert_dims relative_attention_num_buckets "
             "relative_attention_max_distance encoder_ffn_dim decoder_ffn_dim "
             "decoder_vocab_size vocab_size_per_layer_input block_ff_dim shared_intermediate_size "
             "moe_shared_expert_intermediate_size",
    POSITIONS: "max_position_embeddings n_positions max_sequence_length original_max_position_embeddings "
               "sliding_window sliding_window_size index_topk attention_window_size chunk_size seq_length "
               "attention_chunk_size max_source_positions max_target_positions block_multiple_of "
               "mamba_chunk_size index_block_size index_topk_blocks sparse_block_size sparse_topk_blocks "
               "compress_rate_csa compress_rate_hca compressed_sparse_attention heavily_compressed_attention "
               "indexer_budget indexer_compress_ratio ngram_vocab_size_base make_ngram_vocab_size_divisible_by "
               "split_ngram_parts",
    INDEX: "first_k_dense_replace n_shared_experts num_shared_experts moe_num_shared_experts moe_layer_start_index "
           "max_window_layers local_size mask_token_id text_mask_token_id bd_size block_size "
           "num_dense_layers num_local_experts num_experts_per_tok attn_layer_offset expert_layer_offset "
           "moe_layer_num_skipped index_topk_freq index_skip_topk_offset "
           "num_kv_shared_layers hidden_size_per_layer_input altup_active_idx index_local_blocks sparse_local_block "
           "sparse_init_block num_hash_layers seed zero_expert_num",
    IDS: "eos_token_id bos_token_id pad_token_id decoder_start_token_id",
    LAYER_TYPES: "layer_types",
    _list(_whole(0, 1), "0 and 1"): "no_rope_layers sparse_attention_freq sparse_disable_index_value",
    _one_or_list(HEADS): "moe_topk",
    _one_or_list(INDEX): "num_shared_expert",
    _list(NOT_NEGATIVE, "numbers from 0"): "layer_rope_theta",
    _list(HEADS, "whole numbers from 1 to 65,536"): "num_attention_heads_per_layer",
    Kind("true, 'per-head' or 'per-element'", lambda x: x is True or x in ("per-head", "per-element")): "gating",
    _list(INDEX, "numbers of tokens, 0 for none"): "compress_ratios",
    _list(INDEX, "layers, from 0 on"): "mlp_only_layers moe_layers full_attn_idxs attn_layer_indices full_attn_layers "
                                         "kv_source_layers kda_layers ple_layer_ids",
    _list(NUMBER, "numbers"): "mlp_multipliers ssm_multipliers",
    _list(TEXT, "names"): "layers_block_type gating_types",
    Kind("a whole number from 1 to 65,536, or 'auto'", lambda x: x == "auto" or HEADS.fits(x)):
        "mamba_d_head mamba_dt_rank",
    _list(Kind("", lambda x: x in ("recurrent", "attention")), "'recurrent' and 'attention'"): "block_types",
    _list(Kind("", lambda x: x in ("dense", "sparse")), "'dense' and 'sparse'"): "mlp_layer_types",
    _list(Kind("", lambda x: x in ("full", "shared")), "'full' and 'shared'"): "indexer_types",
    Kind("a text of F and S, or a list of 'full' and 'shared'", lambda x: isinstance(x, (str, list)) and (
        len(x) > 0 and all(y in (("F", "S") if isinstance(x, str) else ("full", "shared")) for y in x))):
        "index_topk_pattern",
    _list(POSITIVE, "numbers above 0"): "short_factor long_factor",
    _list(_number("", lambda x: 0 <= x < 1), "numbers from 0 and below 1"): "activation_sparsity_pattern",
}
KINDS = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
"""Kind by key, also for nested objects. Entries that are not listed are not checked."""

_LIMITS = Kind("a list of numbers from 0, or null", lambda x: isinstance(x, list) and all(
    y is None or NOT_NEGATIVE.fits(y) for y in x))
OWN = {**{("step3p5", key): _LIMITS for key in ("swiglu_limits", "swiglu_limits_shared")},
       ("longcat_flash", "moe_topk"): HEADS, ("step3p5", "rope_theta"): _one_or_list(POSITIVE),
       ("step3p5", "partial_rotary_factors"): _list(SHARE, "shares"),
       ("step3p5", "moe_layers_enum"): Kind("layers, as a list or with commas between them", lambda x: (
           isinstance(x, list) and all(INDEX.fits(y) for y in x)) or (
           isinstance(x, str) and all(y.strip().isdecimal() for y in x.split(",")))),
       ("minimax_m3_vl_text", "moe_layer_freq"): _list(_whole(0, 1), "0 and 1"),
       ("deepseek_v4", "layer_types"): _list(TEXT, "names"), ("deepseek_v4", "mlp_layer_types"): _list(TEXT, "names"),
       **{(kind, key): Kind("0", lambda x: x == 0) for kind in ("glm5_next", "glm5_next_text")
          for key in ("qk_rope_head_dim", "head_dim")},
       ("gemma3n_text", "intermediate_size"): _one_or_list(ENTRIES),
       ("hunyuan_v1_moe", "moe_intermediate_size"): _one_or_list(ENTRIES),
       **{("hunyuan_v1_moe", key): Kind("false", lambda x: x is False)
          for key in ("n_group", "topk_group", "routed_scaling_factor")}}
"""Kind of entries that differ in a family, by `model_type` and key."""

NESTED = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention", "text_config",
          "dual_chunk_attention_config", "linear_attn_config", "sparse_attention_config", "main", "compress",
          "compress_rates", "attention_other_setting")


INSIDE = {"step3p7": "step3p5"}
"""The `model_type` of the language model, by that of the whole, where transformers does not read the former."""


def checked(c: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Returns the entries of a `config.json` after checking them.

    A null counts as a missing entry, except for entries that it switches off (`OFF`). A negative token id counts as
    null.

    Args:
        c: the entries.
        inside: path of the entries within the file, for errors.

    Raises:
        ValueError: an entry is of the wrong type or out of its range; the message has its key.

    >>> checked({"vocab_size": 8, "head_dim": None, "sliding_window": None})
    {'vocab_size': 8, 'sliding_window': None}
    >>> checked({"rope_scaling": {"factor": "2"}})
    Traceback (most recent call last):
    ValueError: rope_scaling.factor: got '2', takes a number above 0
    """
    found: dict[str, Any] = {}
    for key, value in c.items():
        value = named(value) if key.endswith("_token_id") else value
        # transformers writes 0 for what these switches leave unused.
        if value == 0 and not isinstance(value, bool) and (
                (key == "sliding_window" and c.get("use_sliding_window") is False)
                or (key == "sliding_window_pattern" and c.get("sliding_window", 0) is None)):
            continue
        if value is None:
            if key in OFF:
                found[key] = None
            continue
        kind = OWN.get((str(c.get("model_type")), key), KINDS.get(key))
        if kind is not None and not kind.fits(value):
            shown = repr(value)
            shown = shown if len(shown) < 80 else f"{shown[:76]} ..."
            raise ValueError(f"{inside}{key}: got {shown}, takes {kind.takes}")
        if key == "text_config" and (kind_inside := INSIDE.get(str(c.get("model_type")))) is not None:
            value = {**value, "model_type": kind_inside}
        found[key] = checked(value, f"{inside}{key}.") if key in NESTED else value
    return found


OFF = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping",
       "q_lora_rank", "block_ffn_dim_multiplier", "mamba_d_ssm", "linear_lower_bound", "gate_lower_bound",
       "zero_expert_num")
"""Entries for which null switches something off that a missing entry leaves on."""
