"""Work on the logits of many nodes, a few of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.axes import DATA, MODEL, free_axes, platform

T = TypeVar("T")

FAST = 64 << 20
"""Bytes of logits that a TPU keeps in fast memory beside what else is there: a v5e has 128 MiB, and XLA puts the 66 MB
of `f32[16, 8, 128256]` there by itself."""


def by_nodes(fn: Callable[[Array, Array | None], T], logits: Array, nodes: Array | None = None) -> T:
    """`fn(logits, nodes)`, arrays `[B, W, ...]` in which each node's part comes from its own logits.

    Most work on logits reads them several times. A TPU has room in fast memory for those of a few nodes, but not for
    those of a large tree. There they are brought in a few nodes at a time, and read from main memory once.

    Args:
        fn: takes logits `f32[B, w, V]` and the places `i32[B, w]` of their nodes.
        logits: `f32[B, W, V]`. nodes: `i32[B, W]`, or None for 0 to W - 1.
    """
    B, W, V = logits.shape
    free = free_axes()
    divided = lambda size, axis: size // free.get(axis, 1) if size % free.get(axis, 1) == 0 else size
    width = max(1, FAST // (divided(B, DATA) * divided(V, MODEL) * logits.dtype.itemsize))
    if platform() != "tpu" or width >= W:
        return fn(logits, nodes)
    width -= width % 8 if width > 8 else 0          # a tile of f32 has 8 nodes
    count = -(-W // width)
    if nodes is None:
        nodes = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))
    whole = lax.optimization_barrier(logits)        # the barriers keep XLA from cutting out anew for each operation

    def part(i: Array) -> T:
        start = jnp.minimum(i * width, W - width)       # the last part overlaps the one before where it is not full
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, width, 1)
        return fn(lax.optimization_barrier(cut(whole)), cut(nodes))

    def join(parts: Array) -> Array:
        full = jnp.moveaxis(parts[:-1], 0, 1).reshape(B, -1, *parts.shape[3:])
        return jnp.concatenate([full, parts[-1][:, full.shape[1] - W:]], 1)

    return jax.tree.map(join, lax.map(part, jnp.arange(count, dtype=jnp.int32)))
