"""Work on the logits of many nodes, a few of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import DATA, MODEL, free_axes, platform

T = TypeVar("T")

FAST = 64 << 20
"""Bytes of logits that a TPU keeps in fast memory beside what else is there: a v5e has 128 MiB, and XLA puts the 66 MB
of `f32[16, 8, 128256]` there by itself."""

TILE = 8
"""Nodes that fill a tile of f32."""

READS = 4
"""How often the head is read at most, in place of writing logits to main memory and holding them."""


def by_nodes(fn: Callable[[Array, Array | None], T], head: Callable[[Array], Array], hidden: Array,
             nodes: Array | None = None, once: bool = False) -> T:
    """`fn(head(hidden), nodes)`, arrays `[B, W, ...]` in which each node's part comes from its own logits.

    The logits of a large tree do not fit in a TPU's fast memory. If at most `READS` parts do, the head is applied to
    one after the other, and no logits are written to main memory or held there. Two calls with the same `hidden` share
    their logits, as the compiler sees that they are the same. Logits of more nodes are written to main memory, and
    brought in part by part for `fn`, which usually reads them several times.

    Args:
        fn: takes logits `f32[B, w, V]` and the places `i32[B, w]` of their nodes.
        head: maps hidden states `f[B, w, D]` to logits. hidden: `f[B, W, D]`.
        nodes: `i32[B, W]`, or None for 0 to W - 1.
        once: `fn` reads logits once, wherever they lie.
    """
    B, W, _ = hidden.shape
    width = fitting(jax.eval_shape(head, hidden))
    if width >= W:
        return fn(head(hidden), nodes)
    many = width * READS < W
    if many and once:
        return fn(head(hidden), nodes)
    if nodes is None:
        nodes = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))
    if many:
        return in_parts(fn, width, head(hidden), nodes)
    parts = [fn(head(hidden[:, at:at + width]), nodes[:, at:at + width]) for at in range(0, W, width)]
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts)


def fitting(logits: Array | jax.ShapeDtypeStruct) -> int:
    """How many nodes of logits `f32[B, W, V]` fit in fast memory; all, where it is no TPU."""
    B, W, V = logits.shape
    free = free_axes()
    divided = lambda size, axis: size // free.get(axis, 1) if size % free.get(axis, 1) == 0 else size
    width = max(1, FAST // (divided(B, DATA) * divided(V, MODEL) * logits.dtype.itemsize))
    if platform() != "tpu" or width >= W:
        return W
    return width - (width % TILE if width > TILE else 0)


def in_parts(fn: Callable[..., T], width: int, *arrays: Array) -> T:
    """`fn(*arrays)`, arrays `[B, W, ...]`, by a loop over parts `[B, width, ...]` of the arrays `[B, W, ...]`."""
    B, W = arrays[0].shape[:2]
    whole = lax.optimization_barrier(arrays)        # the barriers keep XLA from cutting out anew for each operation

    def part(i: Array) -> T:
        start = jnp.minimum(i * width, W - width)       # the last part overlaps the one before where it is not full
        return fn(*lax.optimization_barrier(tuple(lax.dynamic_slice_in_dim(x, start, width, 1) for x in whole)))

    def join(parts: Array) -> Array:
        full = jnp.moveaxis(parts[:-1], 0, 1).reshape(B, -1, *parts.shape[3:])
        return jnp.concatenate([full, parts[-1][:, full.shape[1] - W:]], 1)

    return jax.tree.map(join, lax.map(part, jnp.arange(-(-W // width), dtype=jnp.int32)))
