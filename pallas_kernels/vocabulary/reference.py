"""Draws a token in plain XLA, by the operations of the sampling policy's own transforms one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.pallas_kernels.vocabulary.noise import exponentials
from decodax.pallas_kernels.vocabulary.temperature import cooled
from decodax.pallas_kernels.vocabulary.threshold import kth_largest, largest_threshold, less, once


def draw(logits: Array, address: Array, temperature: Array, k: Array | None = None, p: Array | None = None,
         min_p: Array | None = None) -> tuple[Array, Array]:
    """Draws one token for each row of `logits`, `f32[R, V]`, by plain XLA operations, with temperature, top-k, top-p
    and min-p.

    The other arguments and the results, tokens `i32[R]` and their scores in the race `f32[R]`, are those of
    `decodax.pallas_kernels.vocabulary.draw` with one row in place of batch and nodes: an entry or an address for each
    of `R` rows.
    """

    def row(logits: Array, temperature: Array, k: Array | None, p: Array | None, min_p: Array | None) -> Array:
        x = once(cooled(logits, temperature))
        if k is not None:
            x = once(jnp.where(less(x, kth_largest(x, jnp.where(k > 0, k, x.shape[0]))), -jnp.inf, x))
        top = x.max()
        weights = jnp.exp(x - top)
        if p is not None:
            cut = largest_threshold(x, weights, p)
            x = jnp.where(less(x, cut) & (p < 1) & (x < top), -jnp.inf, x)
        if min_p is not None:
            x = jnp.where((weights < min_p) & (x < top), -jnp.inf, x)
        return x

    cold = temperature == 0
    x = jax.vmap(row)(logits, jnp.where(cold, 1, temperature), k, p, min_p)
    top = x.max(1, keepdims=True)
    scores = jnp.where(cold[:, None], logits, -exponentials(address, x.shape[1]) * jnp.exp(top - x))
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    first = jnp.where(jnp.isinf(top[:, 0]) & (top[:, 0] < 0), -jnp.inf, scores.max(1))
    return scores.argmax(1).astype(jnp.int32), first
