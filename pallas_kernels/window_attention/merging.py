"""Attention to several disjoint sets of keys, as attention to all of them."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Combines attention to several disjoint sets of keys into attention to all of them. Each part, and the result, is
    a pair as `window_attention_lse` returns: output and logarithm of the softmax sum."""
    return functools.reduce(_merge, parts)


def with_sinks(part: tuple[Array, Array], sinks: Array) -> tuple[Array, Array]:
    """Returns attention with sinks (see `window_attention`). `part` is attention to all keys without them: the output
    and the logarithms of its softmax sums."""
    out, lse = part
    return merge(part, (jnp.zeros_like(out), jnp.broadcast_to(sinks.astype(lse.dtype), lse.shape)))


def _merge(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, x), (b, y) = one, other
    top = jnp.maximum(x, y)
    left, right = jnp.exp(x - top), jnp.exp(y - top)
    total = left + right
    return ((a * left[..., None] + b * right[..., None]) / total[..., None]).astype(a.dtype), top + jnp.log(total)
