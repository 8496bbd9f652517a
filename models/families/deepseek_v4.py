"""DeepSeek V4 (DeepSeek-AI, 2026): one key head with pooled keys beside a sliding window, hyper-connections, and
experts that are chosen by token ids in the first layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from decodax.models.blocks.options import Layer
from decodax.models.compressed.options import PoolIndex, Pooling, SharedKey
from decodax.models.config import DecoderConfig
from decodax.models.reading import Json, read_experts, read_rope, read_shape, refuse_others
from decodax.models.residual.options import HyperConnections
from decodax.models.rope import Dynamic, LongRope, Rope
from decodax.models.routing import ClippedSwiGLU

NEAR, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
BY_RATIO = {0: NEAR, 4: CSA, 128: HCA}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 129_280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "num_experts_per_tok": 6,
    "n_routed_experts": 256, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "max_position_embeddings": 1 << 20, "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}


def _deepseek_v4(c: Json) -> DecoderConfig:
    c = {**DEFAULTS, **c}
    refuse_others(c, num_key_value_heads=1, n_shared_experts=1, norm_topk_prob=True, attention_bias=False,
                  mlp_bias=False, hidden_act="silu", topk_method="noaux_tc")
    if c["scoring_func"] not in ("sqrtsoftplus", "sigmoid"):
        raise ValueError(f"scoring_func: got {c['scoring_func']!r}, supported are 'sqrtsoftplus' and 'sigmoid'")
    if c["sliding_window"] is None:
        raise ValueError("sliding_window: got None, takes the number of tokens of the window of all layers")
    if c["num_attention_heads"] % c["o_groups"]:
        raise ValueError(f"o_groups: got {c['o_groups']}, takes a divisor of num_attention_heads = "
                         f"{c['num_attention_heads']}")
    glu = ClippedSwiGLU(1.0, float(c["swiglu_limit"]), 0.0)
    shape = read_shape({**c, "intermediate_size": c["moe_intermediate_size"]}, glu=glu)
    near, far = _ropes(c, shape)
    if c["index_head_dim"] < far.width:
        raise ValueError(f"index_head_dim: got {c['index_head_dim']}, takes at least the number of rotated channels, "
                         f"{far.width}")
    eps = shape["norm"].eps
    shared = SharedKey(c["q_lora_rank"], c["o_groups"], c["o_lora_rank"], eps)
    rates = {CSA: 4, HCA: 128, **(c.get("compress_rates") or {})}
    rates |= {kind: c[key] for kind, key in ((CSA, "compress_rate_csa"), (HCA, "compress_rate_hca")) if key in c}
    if set(rates) != {CSA, HCA}:
        raise ValueError(f"compress_rates: got {sorted(rates)}, takes {CSA!r} and {HCA!r}")
    index = PoolIndex(c["index_n_heads"], c["index_head_dim"], c["index_topk"])
    pools = {CSA: Pooling(rates[CSA], shape["head_dim"], True, index), HCA: Pooling(rates[HCA], shape["head_dim"])}
    count, width = c["num_hidden_layers"], c["moe_intermediate_size"]
    kinds, hashed = _kinds(c, count), _hashed(c, count)
    scored = read_experts(c["n_routed_experts"], c["num_experts_per_tok"], width, score=c["scoring_func"],
                          correction=True, scale=float(c["routed_scaling_factor"]), shared=width,
                          glu=glu)
    told = dataclasses.replace(scored, correction=False, hashed=c["vocab_size"])

    def layer(i: int) -> Layer:
        pool = pools.get(kinds[i])
        return Layer(rope=near if pool is None else far, sliding=c["sliding_window"], sinks=True, shared_key=shared,
                     experts=told if hashed[i] else scored, recurrent=pool, beside=pool is not None)

    streams = HyperConnections(c["hc_mult"], c["hc_sinkhorn_iters"], float(c["hc_eps"]), eps)
    return DecoderConfig(layers=tuple(map(layer, range(count))), streams=streams, **shape)


def _kinds(c: Json, count: int) -> list[str]:
    """Returns the kind of attention of each layer, one of `BY_RATIO`."""
    kinds, ratios = c.get("layer_types"), c.get("compress_ratios")
    key = "layer_types" if kinds is not None else "compress_ratios"
    if kinds is None and ratios is not None:
        if not set(ratios) <= set(BY_RATIO):
            raise ValueError(f"compress_ratios: got {ratios}, takes a list of {', '.join(map(str, BY_RATIO))}")
        kinds = [BY_RATIO[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [HCA] * min(count, 2) + [CSA if i % 2 else HCA for i in range(count - 2)]
    if len(kinds) < count or not set(kinds) <= set(BY_RATIO.values()):
        raise ValueError(f"{key}: got {kinds} for num_hidden_layers = {count}, takes for each layer one of "
                         f"{', '.join(map(repr, BY_RATIO.values()))}")
    return list(kinds)


def _hashed(c: Json, count: int) -> list[bool]:
    """Returns for each layer True if its experts are chosen by token ids."""
    kinds = c.get("mlp_layer_types")
    if kinds is None:
        return [i < c.get("num_hash_layers", 3) for i in range(count)]
    if len(kinds) < count or not set(kinds) <= {"hash_moe", "moe"}:
        raise ValueError(f"mlp_layer_types: got {kinds} for num_hidden_layers = {count}, takes 'hash_moe' or 'moe' for "
                         "each layer")
    return [kind == "hash_moe" for kind in kinds]


def _ropes(c: Json, shape: Json) -> tuple[Rope, Rope]:
    """Returns the ropes of layers with a sliding window alone, and of those with pooled keys."""
    given = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    share = c.get("partial_rotary_factor") or (
        c["qk_rope_head_dim"] / c["head_dim"] if "qk_rope_head_dim" in c else 64 / 512)
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        main, far = given["main"], given["compress"]
    else:
        main = {}
        far = {key: value for key, value in given.items() if key not in ("main", "compress", "rope_theta")}
    main = {"rope_theta": c["rope_theta"], "partial_rotary_factor": share, **main}
    far = {"rope_theta": c["compress_rope_theta"], "partial_rotary_factor": share, **far}
    if (far.get("rope_type") or far.get("type")) == "yarn":
        far.setdefault("attention_factor", 1.0)     # DeepSeek's code has no factor of cosine and sine
    plain = {key: value for key, value in c.items() if key not in ("rope_scaling", "partial_rotary_factor")}
    ropes = [read_rope({**plain, "rope_parameters": own}, shape, True) for own in (main, far)]
    for rope in ropes:
        if isinstance(rope.scaling, Dynamic | LongRope):
            raise ValueError(f"rope_parameters: got {given}, takes a scaling that does not depend on the text's length")
    return ropes[0], ropes[1]


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {"deepseek_v4": _deepseek_v4}
