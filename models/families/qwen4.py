"""Qwen4 (Qwen Team, 2026; experimental): the gated delta rule in most layers, in the others gated attention to groups
of tokens that an index chooses; embeddings of n-grams before some layers; residual streams with gates; mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decodax.models.blocks.options import GroupIndex, Layer, OutputGate
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import Json, read_experts, read_rope, read_shape, refuse_others, with_experts
from decodax.models.recurrent.options import GatedDelta
from decodax.models.residual.options import GatedConnections, HashedNGrams

ATTENDS = ("indexed_attention", "full_attention")
INDEX = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 32_768, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512,
    "hidden_act": "silu", "hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3,
    "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "seed": 1234}


def _qwen4(c: Json) -> DecoderConfig:
    c = {**DEFAULTS, **c}
    refuse_others(c, hidden_act="silu", attn_output_gate=True)
    gate = c.get("output_gate_type", "silu")
    if gate not in ("silu", "sigmoid"):
        raise ValueError(f"output_gate_type: got {gate!r}, takes 'silu' or 'sigmoid'")
    if c["hc_count"] < 2:
        raise ValueError(f"hc_count: got {c['hc_count']}, takes 2 or more")
    if missing := [key for key in INDEX if key not in c]:
        raise ValueError(f"{', '.join(missing)}: got none, takes numbers for the index of attention")
    refuse_others(c, indexer_kv_heads=1)
    every, budget, keys = c["indexer_compress_ratio"], c["indexer_budget"], c["linear_num_key_heads"]
    if budget % every:
        raise ValueError(f"indexer_budget: got {budget}, takes a multiple of indexer_compress_ratio = {every}")
    if c["linear_num_value_heads"] % keys:
        raise ValueError(f"linear_num_value_heads: got {c['linear_num_value_heads']}, takes a multiple of "
                         f"linear_num_key_heads = {keys}")
    bias, eps = c.get("attention_bias", False), c.get("rms_norm_eps", 1e-6)
    c = {"intermediate_size": c["moe_intermediate_size"], **c}
    shape = read_shape(c, norm=NormConfig(eps=eps, unit_offset=True), qk_norm="head", qkv_bias=bias, out_bias=bias)
    rope, width = read_rope(c, shape), c["indexer_head_dim"]
    if rope.width > width:
        raise ValueError(f"indexer_head_dim: got {width}, takes at least the rotated part of a head, "
                         f"{rope.width} by rope_parameters and partial_rotary_factor")
    attention = Layer(rope=rope, output_gate=OutputGate("channels", bias=bias), recurrent=Pooling(
        every, width, scored=False), beside=True, index=GroupIndex(c["indexer_n_heads"], width, budget // every))
    delta = GatedDelta(keys, c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"],
                       c["linear_conv_kernel_dim"], eps=eps, gate=gate)
    kinds, ngrams = _kinds(c), _ngrams(c)
    if without := [i + 1 for i in ngrams if kinds[i] in ATTENDS]:
        raise ValueError(f"ple_layer_ids: got {without}, takes layers without attention, by layer_types "
                         "or full_attention_interval")
    experts = read_experts(c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"],
                           c.get("norm_topk_prob", True), shared=c["shared_expert_intermediate_size"], shared_gate=True)
    layers = tuple(attention if kind in ATTENDS else Layer(recurrent=delta, ngrams=ngrams.get(i))
                   for i, kind in enumerate(kinds))
    return DecoderConfig(layers=with_experts(layers, experts),
                         streams=GatedConnections(c["hc_count"], c["hc_lowrank"]), **shape)


def _kinds(c: Json) -> list[str]:
    """Returns the type of each layer. Released files call all attention "full_attention"."""
    count, period = c["num_hidden_layers"], c.get("full_attention_interval", 4)
    kinds = c.get("layer_types") or ["linear_attention" if (i + 1) % period else ATTENDS[0] for i in range(count)]
    if len(kinds) < count or not set(kinds) <= {"linear_attention", *ATTENDS}:
        raise ValueError(f"layer_types: got {kinds}, takes 'linear_attention' or 'indexed_attention' for each of "
                         f"num_hidden_layers = {count}")
    if not set(ATTENDS) & set(kinds[:count]):
        raise ValueError(f"layer_types: got {kinds[:count]} for num_hidden_layers = {count}, takes one or more "
                         "'indexed_attention', or a full_attention_interval that leaves some")
    return list(kinds[:count])


def _ngrams(c: Json) -> dict[int, HashedNGrams]:
    """Returns the options of the embeddings of n-grams, by the index of the layer before which they are added."""
    found: list[int] = sorted(set(c.get("ple_layer_ids") or ()))
    if not found:
        return {}
    if not all(1 <= layer <= c["num_hidden_layers"] for layer in found):
        raise ValueError(f"ple_layer_ids: got {found}, takes numbers of layers from 1 to num_hidden_layers = "
                         f"{c['num_hidden_layers']}")
    ends = c.get("eos_token_id")
    stop = (ends[0] if ends else None) if isinstance(ends, list) else ends
    if stop is None:
        raise ValueError("eos_token_id: got none with ple_layer_ids, takes the token that ends a text")
    width, count = c.get("ple_embed_dim", c["hidden_size"]), (c["ngram_size"] - 1) * c["heads_per_ngram"]
    if c["ngram_size"] < 2 or width % count:
        raise ValueError(f"ple_embed_dim: got {width} with ngram_size = {c['ngram_size']}, takes a multiple of the "
                         f"number of tables, (ngram_size - 1) heads_per_ngram = {count}, and an ngram_size from 2")
    try:
        return {layer - 1: HashedNGrams(
            width, c["ngram_size"], c["heads_per_ngram"], c["ngram_vocab_size_base"], number, c["seed"],
            c["make_ngram_vocab_size_divisible_by"], stop, c["vocab_size"], (c["hc_count"], c["hidden_size"]),
            c["ple_conv_kernel_size"]) for number, layer in enumerate(found)}
    except ValueError as e:
        raise ValueError(f"eos_token_id, vocab_size or ngram_vocab_size_base: {e}") from None


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"qwen4_exp_text": _qwen4}
