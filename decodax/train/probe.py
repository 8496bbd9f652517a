"""Measures the cache budgets of heads (HeadKV) and of layers (PrefixKV) on a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.h2o import Accumulated
from decodax.caches.evict.selection import Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.core.capabilities import prefill_cache
from decodax.core.loaded import network_of
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.train.fitting import padded


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text that contains an answer.

    Attributes:
        tokens: token ids of the text. For `fit_heads` it ends just before the model would generate the answer again.
        start: index of the first token of the answer.
        stop: index after its last token.
    """

    tokens: Sequence[int]
    start: int
    stop: int


def fit_heads(lm: Any, probes: Sequence[Probe], params: Any = None) -> tuple[tuple[float, ...], ...]:
    """Measures the importance of each key head for retrieval (HeadKV; Fu et al., 2024).

    The importance of a head is the attention that the last query of a text pays to the answer, averaged over probes and
    normalized over all heads. The paper uses needle-in-a-haystack texts with and without reasoning as probes.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        probes: texts with the bounds of their answers.
        params: the weights of a bare `Model`.

    Returns:
        `[L][G]` numbers that sum to 1: the option `heads` of `decodax.caches.headkv`.

    Raises:
        ValueError: no probes, or an answer outside of its text.
    """
    if not probes:
        raise ValueError("probes: got none, takes at least one")
    model, weights = network_of(lm, params)
    model = model.with_cache(Eviction(Top(WindowAttention(1, 1)), 2))
    total: Any = 0.0
    for probe in probes:
        if not 0 <= probe.start < probe.stop <= len(probe.tokens):
            raise ValueError(f"probes: got an answer from {probe.start} to {probe.stop} in {len(probe.tokens)} tokens")
        paid = _paid(model, weights, padded([probe.tokens]), np.int32(len(probe.tokens)),
                     np.int32(probe.start), np.int32(probe.stop))
        total = total + np.asarray(paid, np.float64)
    return tuple(tuple(float(x) for x in row) for row in total / total.sum())


def fit_layers(lm: Any, texts: Sequence[Sequence[int]], share: float = 0.5, sinks: int = 4,
               params: Any = None) -> tuple[float, ...]:
    """Measures the share of a text that each layer keeps, such that all layers keep the same share of their attention.

    A layer whose attention is spread over many tokens keeps more of them ("PrefixKV: Adaptive Prefix KV Cache is What
    Vision Instruction-Following Models Need for Efficient Generation", Wang et al., 2024).

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids of typical texts.
        share: share of the tokens that all layers together keep, between 0 and 1.
        sinks: number of first tokens, which every layer keeps, as it keeps the last token.
        params: the weights of a bare `Model`.

    Returns:
        `[L]` shares whose mean is `share`: the option `layers` of `decodax.caches.prefixkv`.

    Raises:
        ValueError: no texts, one that is too short, or a share out of its range.
    """
    if not texts:
        raise ValueError("texts: got none, takes at least one")
    if not 0 < share < 1:
        raise ValueError(f"share: got {share}, takes a number between 0 and 1")
    model, weights = network_of(lm, params)
    model = model.with_cache(Eviction(Top(Accumulated()), 2))
    found = []
    for text in texts:
        if (length := len(text)) <= sinks + 2:
            raise ValueError(f"texts: got one of {length} tokens, takes more than {sinks + 2}")
        paid = _received(model, weights, padded([text]), np.int32(length))
        found.append(1 - num_dropped(np.asarray(paid, np.float64)[:, :length], 1 - share, sinks) / length)
    return tuple(float(x) for x in np.mean(found, 0))


def num_dropped(paid: np.ndarray, share: float, sinks: int) -> np.ndarray:
    """Returns the number of tokens of a text that each layer drops, `i64[L]`, from the attention that they received
    (`f64[L, T]`).

    All layers keep the same share of attention, which is found by bisection such that about the share `share` of all
    tokens is dropped.
    """
    target, kept = paid.size * share, np.cumsum(np.sort(paid, 1)[:, ::-1], 1) / paid.sum(1, keepdims=True)
    low, high, count = 0.0, 1.0, np.zeros(len(paid), np.int64)
    for _ in range(100):
        middle = (low + high) / 2
        first = np.array([np.searchsorted(row, middle) for row in kept])
        count = np.maximum(paid.shape[1] - (first + 1) - (sinks + 1), 0)
        if abs(count.sum() - target) < 5:
            break
        low, high = (low, middle) if count.sum() < target else (middle, high)
    # the rest in proportion
    return (count * target / count.sum()).astype(np.int64) if count.sum() else count


def _read(model: Model, params: Any, tokens: Array, length: Array) -> Evicting:
    """Returns the prefill cache after the first `length` of the tokens `i32[1, N]`, before any eviction."""
    cache = prefill_cache(model.init_cache(1, tokens.shape[1], params=params))
    live = jnp.arange(tokens.shape[1])[None] < length
    window = causal(tokens, jnp.zeros(1, jnp.int32), live).replace(is_prefill=True)
    out = model.apply(params, window, cache)
    cache = cache.commit(out.entries, jnp.where(live, window.positions, -1))
    if not isinstance(cache, Evicting):
        raise ValueError("lm: some of its layers have linear attention; takes a model whose layers all have keys and "
                         "values")
    return cache


@jax.jit(static_argnums=0)
def _received(model: Model, params: Any, tokens: Array, length: Array) -> Array:
    """Returns the attention that each token receives from all queries, averaged over heads, `f32[L, T]`."""
    cache = _read(model, params, tokens, length)
    return jnp.stack([own.slots[0].mean(0)[:tokens.shape[1]] for own in cache.gathered])


@jax.jit(static_argnums=0)
def _paid(model: Model, params: Any, tokens: Array, length: Array, start: Array, stop: Array) -> Array:
    """Returns the attention that the last query pays to the tokens from `start` to `stop`, `f32[L, G]`."""
    cache, rows = _read(model, params, tokens, length), []
    for kv, positions, queries, width in zip(cache.kv, cache.positions, cache.queries, cache.widths, strict=True):
        G, q = kv.shape[1], queries[0, :, 0].astype(jnp.float32)
        scores = jnp.einsum("grd,gsd->grs", q.reshape(G, -1, q.shape[-1]), kv[0, :, :, :width].astype(jnp.float32))
        weights = jax.nn.softmax(scores, axis=-1, where=(positions[0] >= 0)[:, None])
        inside = (positions[0] >= start) & (positions[0] < stop)
        rows.append(jnp.where(inside[:, None], weights, 0).sum(-1).mean(1))
    return jnp.stack(rows)
