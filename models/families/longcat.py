"""LongCat-Flash (Meituan, 2025): layers of two attention blocks and two MLPs, with one mixture of experts that reads
what the first MLP reads and is added after the second one (shortcut-connected). Some of its experts are the identity.

Here each such layer is two layers of the decoder, the first of which has the mixture as its `shortcut`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from decodax.models.config import DecoderConfig
from decodax.models.families.deepseek import latent_decoder
from decodax.models.reading import Json, read_experts, refuse_others, renamed

FLASH: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 6144, "ffn_hidden_size": 12_288, "num_layers": 28, "num_attention_heads": 64,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "moe_topk": 12, "n_routed_experts": 512, "zero_expert_num": 256, "expert_ffn_hidden_size": 2048,
    "routed_scaling_factor": 6.0}
SAME = {"num_local_experts": "n_routed_experts", "num_experts_per_tok": "moe_topk",
        "moe_intermediate_size": "expert_ffn_hidden_size", "intermediate_size": "ffn_hidden_size"}
"""Entries by their other names."""
FIXED = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA", "zero_expert_type": "identity",
         "router_bias": False, "norm_topk_prob": False}
"""Entries of released files, with the values that transformers computes in any case."""


def _longcat_flash(c: Json) -> DecoderConfig:
    c = _counted(renamed(c, SAME))
    c = {**c, "intermediate_size": c["ffn_hidden_size"]}
    turned, plain = c.get("qk_rope_head_dim", 64), c.get("qk_nope_head_dim", 128)
    refuse_others(c, **FIXED)
    for key, value, of in (("head_dim", turned, "qk_rope_head_dim"),
                           ("qk_head_dim", turned + plain, "qk_rope_head_dim and qk_nope_head_dim together")):
        if c.get(key, value) != value:
            raise ValueError(f"{key}: got {c[key]}, supported is {value}, {of}")
    if c["q_lora_rank"] is None:
        raise ValueError("q_lora_rank: got None, takes the width of the latent of queries")
    if not (c.get("rope_parameters") or {}).get("rope_theta") and not c.get("rope_theta"):
        c["rope_theta"] = 1e7
    experts = read_experts(
        c["n_routed_experts"], c["moe_topk"], c["expert_ffn_hidden_size"], False, key="moe_topk", correction=True,
        scale=float(c["routed_scaling_factor"]), zero=c["zero_expert_num"] or 0)
    found = latent_decoder({key: value for key, value in c.items() if key != "head_dim"}, interleaved=True)
    one, *_ = found.layers
    assert one.latent is not None
    factor, query_factor = ((found.width / rank) ** 0.5 for rank in (one.latent.rank, c["q_lora_rank"]))
    one = dataclasses.replace(one, latent=dataclasses.replace(one.latent, factor=factor, query_factor=query_factor))
    return dataclasses.replace(found, layers=(dataclasses.replace(one, shortcut=experts), one) * c["num_layers"])


def _counted(c: Json) -> dict[str, Any]:
    """Returns the entries with defaults, and with both numbers of layers: `num_layers`, and twice as many."""
    own = {**FLASH, **c}
    if "num_hidden_layers" in c and "num_layers" not in c:
        if c["num_hidden_layers"] < 2 or c["num_hidden_layers"] % 2:
            raise ValueError(f"num_hidden_layers: got {c['num_hidden_layers']}, takes an even number from 2")
        own["num_layers"] = c["num_hidden_layers"] // 2
    both = 2 * own["num_layers"]
    if c.get("num_hidden_layers", both) not in (both, own["num_layers"]):
        raise ValueError(f"num_hidden_layers: got {c['num_hidden_layers']}, takes {both}, two for each of num_layers = "
                         f"{own['num_layers']}")
    return {**own, "num_hidden_layers": both}


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"longcat_flash": _longcat_flash}
