"""Decoders with multi-head latent attention: DeepSeek V2 and V3, and the families that took their form.

Hunyuan Hy4 (Tencent, 2026) has their experts, latents and indexer, with gates and sinks, around which several residual
streams are read and written by independent hyper-connections (`decodax.models.residual.hyper_connections`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from decodax.models.blocks.options import Layer, OutputGate, QueryScale
from decodax.models.config import DecoderConfig
from decodax.models.latent.shape import Indexer, Latent
from decodax.models.reading import (
    Json,
    read_experts,
    read_kinds,
    read_rope,
    read_shape,
    refuse_others,
    rotated_layers,
    with_experts,
)
from decodax.models.residual.options import HyperConnections
from decodax.models.rope import mscale
from decodax.models.routing import ClippedSwiGLU, Experts

DEEPSEEK_V3 = {
    "num_experts_per_tok": 8, "n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "max_position_embeddings": 4096}
HY4: dict[str, Any] = {
    "vocab_size": 120_832, "hidden_size": 2816, "intermediate_size": 6912, "moe_intermediate_size": 768,
    "num_hidden_layers": 34, "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827, "q_lora_rank": 1536, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "first_k_dense_replace": 1, "index_n_heads": 16, "index_topk_freq": 4, "hc_mult": 4, "hc_magnitude": 2.0,
    "hc_eps": 1e-6, "swiglu_limit": 10.0}
HY4_VL = {**HY4, "hidden_size": 6144, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
          "num_hidden_layers": 78, "num_attention_heads": 64, "q_lora_rank": 2048, "index_n_heads": 32}


def _deepseek_v2(c: Json) -> DecoderConfig:
    c = {"num_experts_per_tok": 6, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
         "first_k_dense_replace": 0, "q_lora_rank": 1536, **c}
    if c.get("norm_topk_prob"):
        raise ValueError("norm_topk_prob: got True, which transformers ignores for deepseek_v2; takes False")
    method = c.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method: got {method!r}, takes 'greedy' or 'group_limited_greedy'")
    _expects(c, scoring_func="softmax")
    groups: dict[str, Any] = {}
    if method == "group_limited_greedy":
        groups = dict(groups=c["n_group"], kept_groups=c["topk_group"], group_score="max")
    return latent_decoder(c, _experts(c, normalise=False, **groups), interleaved=True)


def _deepseek_v3(c: Json) -> DecoderConfig:
    return _sigmoid({**DEEPSEEK_V3, **c})


def _glm4_moe_lite(c: Json) -> DecoderConfig:
    return _sigmoid({"num_experts_per_tok": 4, "n_routed_experts": 64, "moe_intermediate_size": 1536,
                     "n_shared_experts": 1, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
                     "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, **c})


def _deepseek_v32(c: Json) -> DecoderConfig:
    c = {**DEEPSEEK_V3, "index_n_heads": 64, "max_position_embeddings": 163_840, **c, "rope_interleave": True}
    return _sigmoid(c, _indexer(c))


def _indexer(c: Json) -> Indexer:
    if any(kind != "indexed_attention" for kind in c.get("layer_types", ())):
        raise ValueError(f"layer_types: got {c['layer_types']}, takes 'indexed_attention' for every layer")
    width, turned = c.get("index_head_dim", 128), c.get("qk_rope_head_dim", 64)
    if width < turned:
        raise ValueError(f"index_head_dim: got {width}, takes at least qk_rope_head_dim = {turned}")
    return Indexer(c["index_n_heads"], width, c.get("index_topk", 2048))


def _hy_v4(c: Json) -> DecoderConfig:
    return _hunyuan({**HY4, **c}, 1e-6, False)


def _hy_v4_vl_text(c: Json) -> DecoderConfig:
    c = {**HY4_VL, **c}
    return _hunyuan(c, c["rms_norm_eps"], True)


def _hunyuan(c: Json, eps: float, interleaved: bool) -> DecoderConfig:
    """Returns the decoder of an Hy4. `eps` is that of the norms of latents; for `interleaved` see `Rope`."""
    refuse_others(c, hidden_act="silu")
    # Keys and values are those of all heads, whatever this entry says.
    c = {**c, "num_key_value_heads": c["num_attention_heads"], "rope_interleave": interleaved}
    glu = ClippedSwiGLU(1.0, float(c["swiglu_limit"]), 0.0)
    indexer = dataclasses.replace(_indexer(c), last=True, eps=c["rms_norm_eps"])
    found = _chosen(c, _sigmoid(c, indexer, glu=glu), interleaved)
    layers = tuple(dataclasses.replace(layer, sinks=True, output_gate=OutputGate("channels"),
                                       latent=layer.latent and dataclasses.replace(layer.latent, eps=eps))
                   for layer in found.layers)
    streams = HyperConnections(c["hc_mult"], None, float(c["hc_eps"]), c["rms_norm_eps"],
                               magnitude=float(c["hc_magnitude"]))
    return dataclasses.replace(found, layers=layers, streams=streams)


def _glm_moe_dsa(c: Json) -> DecoderConfig:
    c = {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
         "rms_norm_eps": 1e-5, "max_position_embeddings": 202_752, "index_n_heads": 32, **c}
    return _chosen(c, _deepseek_v32(c), c.get("indexer_rope_interleave", True))


def _chosen(c: Json, found: DecoderConfig, interleaved: bool) -> DecoderConfig:
    """Returns a decoder some of whose layers share the choice of tokens, as the entries `c` say. `interleaved`: see
    `Indexer`."""
    kinds = indexer_kinds(c)
    if kinds[0] == "shared":
        raise ValueError(f"indexer_types, index_topk_pattern: got {kinds}, takes 'full' for the first layer")
    layers = list(found.layers)
    for i, layer in enumerate(layers):
        assert layer.latent is not None and layer.latent.indexer is not None
        own = dataclasses.replace(layer.latent.indexer, interleaved=interleaved, shared=kinds[i] == "shared")
        layers[i] = dataclasses.replace(layer, latent=dataclasses.replace(layer.latent, indexer=own))
    return dataclasses.replace(found, layers=tuple(layers))


def indexer_kinds(c: Json) -> list[str]:
    """Returns for each layer "full" if it chooses tokens, or "shared" if it takes the choice of an earlier layer."""
    count, kinds, pattern = c["num_hidden_layers"], c.get("indexer_types"), c.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        period, offset = c.get("index_topk_freq", 1), c.get("index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - offset + 1, 0) % max(period, 1) else "full" for i in range(count)]
    if len(kinds) < count:
        raise ValueError(f"indexer_types, index_topk_pattern: got {kinds} for num_hidden_layers = {count}, takes "
                         "'full' or 'shared' for each layer")
    return list(kinds)


def check_indexed(c: Json) -> None:
    """Raises ValueError if a configuration with an indexer has no latent of queries."""
    if c.get("q_lora_rank") is None:
        raise ValueError("q_lora_rank: got None, takes the width of the latent of queries, which the indexer reads")


def _sigmoid(c: Json, indexer: Indexer | None = None, glu: ClippedSwiGLU | None = None) -> DecoderConfig:
    _expects(c, scoring_func="sigmoid", topk_method="noaux_tc")
    if indexer is not None:
        check_indexed(c)
    experts = _experts(c, normalise=c.get("norm_topk_prob", True), score="sigmoid", correction=True,
                       groups=c.get("n_group", 1), kept_groups=c.get("topk_group", 1), glu=glu)
    return latent_decoder(c, experts, indexer=indexer)


def _mistral4(c: Json) -> DecoderConfig:
    c = {"num_experts_per_tok": 4, "n_routed_experts": 128, "moe_intermediate_size": 2048, "n_shared_experts": 1,
         "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, **c}
    if not (c.get("rope_parameters") or c.get("rope_scaling")):
        c["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0,
                                "original_max_position_embeddings": 8192, "mscale": 1.0, "mscale_all_dim": 1.0,
                                "llama_4_scaling_beta": 0.1}
    experts = _experts(c, normalise=c.get("norm_topk_prob", True), groups=c.get("n_group", 1),
                       kept_groups=c.get("topk_group", 1))
    rope, growth = _rope_entries(c), None
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        trained = rope.get("original_max_position_embeddings", c.get("max_position_embeddings", 1 << 20))
        growth = QueryScale(float(beta), float(trained))
    return latent_decoder(c, experts, growth=growth)


def _mistral_large4(c: Json) -> DecoderConfig:
    experts = c.get("num_experts", c.get("n_routed_experts", c.get("num_local_experts", 128)))
    c = {"num_experts_per_tok": 4, "moe_intermediate_size": 6144, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "qk_nope_head_dim": 64, "rms_norm_eps": 1e-5, "index_n_heads": 32, "max_position_embeddings": 1 << 20,
         "final_logit_softcapping": 30.0, **c, "n_routed_experts": experts, "q_lora_rank": None}
    if not (c.get("rope_parameters") or c.get("rope_scaling")):
        c["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2048.0,
                                "original_max_position_embeddings": 512, "attention_factor": 1.0}
    if c.get("norm_topk_prob") is False:
        raise ValueError("norm_topk_prob: got False, supported is True")
    mixture = _experts(c, groups=c.get("n_group", 1), kept_groups=c.get("topk_group", 1))
    found = _chosen(c, latent_decoder(c, mixture, interleaved=True, indexer=_indexer(c)), True)
    rotated = rotated_layers(c)
    layers = list(found.layers)
    for i, source in enumerate(_latents(c, rotated)):
        layer = layers[i]
        assert layer.latent is not None
        layers[i] = dataclasses.replace(
            layer, rope=layer.rope if rotated[i] else None, reads=None if source == i else source,
            latent=dataclasses.replace(layer.latent, eps=c["rms_norm_eps"], log_scale=True))
    return dataclasses.replace(found, layers=tuple(layers), rope_factors=c.get("qk_rope_head_dim", 64) // 2,
                               logit_softcap=c["final_logit_softcapping"])


def _latents(c: Json, rotated: Sequence[int]) -> Sequence[int]:
    """Returns for each layer the one whose latents it attends to. `rotated`: 1 for layers with a rope, else 0."""
    count = c["num_hidden_layers"]
    found: Sequence[int] = c.get("kv_source_layers") or range(count)
    if len(found) != count:
        raise ValueError(f"kv_source_layers: got {len(found)} entries for num_hidden_layers = {count}")
    for i, source in enumerate(found):
        # transformers keeps the latest latents that others read, with and without a rope, whatever the entry says.
        held = [j for j in range(i) if j in found[j + 1:] and found[j] == j and rotated[j] == rotated[i]]
        if source not in (i, *held[-1:]):
            raise ValueError(f"kv_source_layers: got {source} for layer {i}, takes {i} or the latest layer before it "
                             "that others read, which reads none, and has a rotary embedding if this one has "
                             "(no_rope_layers)")
    return found


def _youtu(c: Json) -> DecoderConfig:
    return latent_decoder({"q_lora_rank": 1536, "tie_word_embeddings": True, **c}, None)


def _expects(c: Json, **entries: str) -> None:
    """Refuses entries with other values than the given ones."""
    refuse_others(c, **entries)
    if c.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"moe_layer_freq: got {c['moe_layer_freq']}, supported is 1")


def _experts(c: Json, **fields: Any) -> Experts:
    width = c["moe_intermediate_size"]
    return read_experts(c["n_routed_experts"], c["num_experts_per_tok"], width,
                        scale=float(c.get("routed_scaling_factor", 1.0)), shared=width * c["n_shared_experts"],
                        **fields)


def _rope_entries(c: Json) -> Json:
    return {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}


def latent_decoder(c: Json, experts: Experts | None = None, interleaved: bool | None = None,
                   growth: QueryScale | None = None, indexer: Indexer | None = None) -> DecoderConfig:
    """Returns the decoder with multi-head latent attention of a configuration `c` with its defaults.

    Args:
        c: the configuration.
        experts: the mixture in all layers but the first dense ones; None: all are dense.
        interleaved: see `Rope`; None: as `rope_interleave` says.
        growth: the factor of the queries, see `Layer.query_scale`.
        indexer: see `Latent`.
    """
    turned, plain = c.get("qk_rope_head_dim", 64), c.get("qk_nope_head_dim", 128)
    bias, heads = c.get("attention_bias", False), c["num_attention_heads"]
    if c.get("num_key_value_heads", heads) != heads:
        raise ValueError(f"num_key_value_heads: got {c['num_key_value_heads']}, takes num_attention_heads = {heads}, "
                         "since each head has its own part of the matrices for keys and values")
    if c.get("mlp_bias"):
        raise ValueError("mlp_bias: got True, supported is False")
    shape = read_shape(c, head_dim=plain + turned, qkv_bias=bias, out_bias=bias)
    rope = _rope_entries(c)
    own = {key: value for key, value in c.items() if key not in ("rope_scaling", "partial_rotary_factor")}
    own["rope_parameters"] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    layer = Layer(
        rope=read_rope(own, {**shape, "head_dim": turned},
                       c.get("rope_interleave", True) if interleaved is None else interleaved),
        scale=_scale(rope, plain + turned), query_scale=growth,
        latent=Latent(c.get("kv_lora_rank", 512), c.get("v_head_dim", 128), c.get("q_lora_rank"), indexer=indexer))
    layers = (layer,) * c["num_hidden_layers"]
    if experts is not None:
        layers = with_experts(layers, experts, _sparse(c))
    return DecoderConfig(layers=layers, **shape)


def _scale(rope: Json, width: int) -> float | None:
    """Returns the factor of the scores, which YaRN's `mscale_all_dim` changes; None: that of the heads' width."""
    every = rope.get("mscale_all_dim")
    if (rope.get("rope_type") or rope.get("type") or "default") == "default" or not every:
        return None
    return width ** -0.5 * mscale(float(rope["factor"]), every) ** 2


def _sparse(c: Json) -> Callable[[int], bool]:
    """Returns which layers are mixtures, by index."""
    first = c.get("first_k_dense_replace", 0)
    kinds = read_kinds(c, "mlp_layer_types", None, ("dense", "sparse"), lambda i: i >= first)
    return lambda i: kinds[i] == "sparse"


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3, "deepseek_v32": _deepseek_v32,
    "glm4_moe_lite": _glm4_moe_lite, "glm_moe_dsa": _glm_moe_dsa, "hy_v4": _hy_v4, "hy_v4_vl_text": _hy_v4_vl_text,
    "kimi_k2": _deepseek_v3, "mistral4": _mistral4, "mistral_large4_text": _mistral_large4, "youtu": _youtu}
