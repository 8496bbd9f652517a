"""CacheBlend: joins texts that were prefilled separately, and recomputes a few of their tokens ("CacheBlend: Fast Large
Language Model Serving for RAG with Cached Knowledge Fusion", Yao et al., 2024).

With `score="kvshare"`, tokens are chosen as in the first stage of KVShare ("KVShare: An LLM Service System with
Efficient and Effective Multi-Tenant KV Cache Reuse", Yang et al., 2025), and the result includes the statistics that
its second stage needs (`decodax.caches.prefix.kvshare`).

Tokens after a recomputed one are masked by their positions; in the authors' code (55ad026) they are masked by their
place among the recomputed ones.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.prefix import Prefix, PrefixReuse
from decodax.caches.prefill.listening import Listening
from decodax.caches.prefix.prefix import STEP, model_dtype, on_model_mesh, shifted
from decodax.caches.shapes import layers_of
from decodax.core.loaded import network_of
from decodax.core.mesh import auto_region
from decodax.core.types import LayeredModel
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import slot_weights, window_attention_lse

Score = Literal["cacheblend", "kvshare"]

ROUNDING = 64
"""Relative differences of values up to this number of units in the last place are rounding errors."""


def matched(prefix: Prefix, text: Sequence[int], least: int = 8) -> list[Prefix | list[int]]:
    """Divides a text into parts that also occur in a prefix, and the token ids between them, in order. The result is
    the `parts` of `blended`.

    Args:
        prefix: the prefix.
        text: token ids.
        least: minimum number of tokens of a part that is reused.
    """
    ids = [int(token) for token in text]
    parts: list[Prefix | list[int]] = []
    done = 0
    for match in difflib.SequenceMatcher(None, prefix.tokens, ids, autojunk=False).get_matching_blocks():
        if match.size < least and match.b < len(ids):
            continue
        if match.b > done:
            parts.append(ids[done:match.b])
        if match.size:
            parts.append(prefix[match.a:match.a + match.size])
        done = match.b + match.size
    return parts


@on_model_mesh
def blended(lm: Any, parts: Sequence[Prefix | Sequence[int]], recompute: float = 0.15, check: int = 1,
            params: Any = None, score: Score = "cacheblend") -> Prefix:
    """Joins prefixes and token ids into one text, and recomputes a share of the prefixes' tokens.

    Keys are rotated to their new positions. The layers up to `check` are computed for all tokens, and there the tokens
    with the highest scores are chosen. Only these tokens and the new ids go through the later layers, where they attend
    to all tokens before them. The first prefix needs no recomputation, but its tokens compete with the others, as in
    the code of CacheBlend's authors.

    Args:
        lm: a result of `decodax.load`, or a `Model`.
        parts: prefixes and token ids, in order.
        recompute: share of the prefixes' tokens that are recomputed.
        check: layer in which tokens are chosen, from 0. The default is that of the code of CacheBlend's authors.
        params: the weights of a bare `Model`.
        score: score of a token in layer `check`. "cacheblend": squared difference between its new value and the stored
            one. "kvshare": sum of the absolute differences, times the attention that the token receives from all
            queries.

    Raises:
        ValueError: there are no tokens, a number is out of its range, or the model has no rotary positions or cannot be
            run layer by layer.
    """
    model, weights = network_of(lm, params)
    if not isinstance(model, LayeredModel):
        raise ValueError("lm: got a model whose layers cannot be run one by one")
    if not 0 <= recompute <= 1:
        raise ValueError(f"recompute: got {recompute}, takes a share from 0 to 1")
    if score not in ("cacheblend", "kvshare"):
        raise ValueError(f"score: got {score!r}, takes cacheblend or kvshare")
    if not 0 <= check < model.depth:
        raise ValueError(f"check: got {check}, takes one of {model.depth} layers")
    shapes, tokens, known, stored = layers_of(model), [], [], [[] for _ in layers_of(model)]  # type: ignore[var-annotated]
    for part in parts:
        old = isinstance(part, Prefix)
        ids = part.tokens if isinstance(part, Prefix) else [int(token) for token in part]
        for layer, shape in enumerate(shapes):
            if isinstance(part, Prefix):
                new = shifted(shape, part.kv[layer], len(tokens) - part.begin)
            else:
                new = np.zeros((shape.heads, len(ids), shape.both), model_dtype(model))
            stored[layer].append(new)
        tokens += ids
        known += [old] * len(ids)
    if not tokens:
        raise ValueError("parts: got no tokens, takes at least one")
    n, pad = len(tokens), -len(tokens) % STEP
    kv = tuple(np.pad(np.concatenate(x, 1), ((0, 0), (0, pad), (0, 0)))[None] for x in stored)
    count = int(sum(known) * recompute) + n - sum(known)
    if count == 0 and score == "cacheblend":
        return Prefix(tuple(tokens), tuple(x[0, :, :n] for x in kv))
    made, reuse = _blend(model, check, count, score, weights, np.pad(np.array(tokens, np.int32), (0, pad))[None],
                         np.pad(np.array(known), (0, pad), constant_values=True)[None], kv, np.int32(n))
    return Prefix(tuple(tokens), tuple(np.asarray(x)[0, :, :n] for x in made),
                  reuse=None if reuse is None else PrefixReuse(*(np.asarray(x)[0, :n] for x in reuse)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _blend(model: LayeredModel, check: int, count: int, score: Score, *arrays: Any) -> Any:
    return auto_region(functools.partial(_blending, model, check, count, score), *arrays)


def _blending(model: LayeredModel, check: int, count: int, score: Score, params: Any, tokens: Array, known: Array,
              kv: tuple[Array, ...], length: Array) -> tuple[tuple[Array, ...], tuple[Array, Array] | None]:
    """Returns keys and values of each layer, `f[1, G, N, d + e]`, and for KVShare the arrays of `PrefixReuse`, `f32[1,
    N]`, else None."""
    network, N = model.pieces(params), tokens.shape[1]
    every = jnp.arange(N, dtype=jnp.int32)[None]
    live = every < length
    x = network.embed(causal(tokens, jnp.zeros(1, jnp.int32), live), Listening())
    made: list[Array] = []
    asked: list[tuple[Array, Array, dict[str, Any]]] = []

    def attend(held: Array | None, at: Array, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Any:
        new = jnp.concatenate([k, v], -1)
        both = new.swapaxes(1, 2) if held is None else held.at[:, :, at[0]].set(new.swapaxes(1, 2)[0], mode="drop")
        made.append(both)
        whole = both.swapaxes(1, 2)
        seen = (every[:, None] <= at[:, :, None]) & live[:, None]
        seen |= (jnp.arange(N) == 0)[None, None]
        out, lse = window_attention_lse(q, whole[..., :k.shape[-1]], whole[..., k.shape[-1]:], seen, at,
                                        key_positions=every, **options)
        asked.append((q, lse, options))
        return out, ()

    for layer in range(check + 1):
        change, _ = network.attention(layer, x, every, functools.partial(attend, None, every))
        x = x + change
        x = x + network.mlp(layer, x)
    width = layers_of(model)[check].width
    apart = (made[check] - kv[check])[..., width:].astype(jnp.float32)
    if score == "kvshare":
        change, size = jnp.abs(apart).sum((1, 3)), jnp.abs(made[check][..., width:].astype(jnp.float32)).sum((1, 3))
        # values that differ by rounding alone count as equal: a program of another shape may add in another order
        change = jnp.where(live & known & (change > ROUNDING * jnp.finfo(made[check].dtype).eps * size), change, 0)
        attention = _received(*asked[check], every, live, made[check], length)
        worth = attention * change
    else:
        worth = jnp.square(apart).sum((1, 3))
    worth = jnp.where(live, jnp.where(known, worth, jnp.inf), -1)
    at = jnp.sort(lax.top_k(worth, count)[1], -1).astype(jnp.int32)
    reuse = (attention, change.at[:, at[0]].set(0)) if score == "kvshare" else None
    if count == 0:
        return (*made, *kv[check + 1:]), reuse
    x = jnp.take_along_axis(x, at[..., None], 1)
    for layer in range(check + 1, model.depth):
        change, _ = network.attention(layer, x, at, functools.partial(attend, kv[layer], at))
        x = x + change
        x = x + network.mlp(layer, x)
    return tuple(made), reuse


def _received(q: Array, lse: Array, options: dict[str, Any], at: Array, live: Array, kv: Array,
              length: Array) -> Array:
    """Returns the attention that each token receives from `live` tokens, averaged over heads, `f32[1, N]`."""
    if options.get("bias") is not None:
        raise ValueError("score: kvshare goes by attention of queries to keys alone; takes a model without a bias of "
                         "its attention scores, or score='cacheblend'")
    some = {name: options[name] for name in ("scale", "sliding", "softcap") if name in options}
    weights = slot_weights(q, jnp.where(live[..., None], lse, jnp.inf), at, kv, length[None], causal=True, **some)
    return weights.sum(1) / q.shape[2]
