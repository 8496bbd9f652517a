"""Computations on the logits of many nodes, a few nodes at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import DATA, MODEL, free_axes, part, platform

T = TypeVar("T")

FAST = 64 << 20
"""Maximum bytes of logits that fit in a TPU's fast memory together with everything else: a v5e has 128 MiB, and XLA
itself puts the 66 MB of `f32[16, 8, 128256]` there."""

TILE = 8
"""Number of nodes in a float32 tile."""

READS = 4
"""Maximum number of times that the head's weights are read to avoid writing logits to main memory."""


def by_nodes(fn: Callable[[Array, Array | None], T], head: Callable[[Array], Array], hidden: Array,
             nodes: Array | None = None, once: bool = False) -> T:
    """Returns `fn(head(hidden), nodes)`, computed in parts if the logits are large.

    The result has arrays `[B, W, ...]`, in which each node's part depends on its own logits only. The logits of a large
    tree do not fit in a TPU's fast memory. If they fit in at most `READS` parts, the head is applied to one part after
    the other, and no logits are written to main memory. Two calls with the same `hidden` share their logits, because
    the compiler recognizes equal computations. With more parts, the logits are written to main memory and read part by
    part for `fn`, which usually reads them several times.

    Args:
        fn: takes logits `f32[B, w, V]` and the indices `i32[B, w]` of their nodes.
        head: maps hidden states `f[B, w, D]` to logits.
        hidden: `f[B, W, D]`.
        nodes: `i32[B, W]`, indices of the nodes; None: 0 to W - 1.
        once: True if `fn` reads the logits only once, so that it may read them from main memory.
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
    """Returns the number of nodes of logits `f32[B, W, V]` that fit in fast memory; `W` on other platforms than
    TPUs."""
    rows, W, entries = part(PartitionSpec(DATA, None, MODEL), logits.shape, free_axes())
    width = max(1, FAST // (rows * entries * logits.dtype.itemsize))
    if platform() != "tpu" or width >= W:
        return W
    return width - (width % TILE if width > TILE else 0)


def in_parts(fn: Callable[..., T], width: int, *arrays: Array) -> T:
    """Returns `fn(*arrays)`, computed by a loop over parts `[B, width, ...]` of the arrays `[B, W, ...]`."""
    B, W = arrays[0].shape[:2]
    whole = lax.optimization_barrier(arrays)        # keeps XLA from slicing again for each operation

    def part(i: Array) -> T:
        start = jnp.minimum(i * width, W - width)       # the last part overlaps the one before to be full
        return fn(*lax.optimization_barrier(tuple(lax.dynamic_slice_in_dim(x, start, width, 1) for x in whole)))

    def join(parts: Array) -> Array:
        full = jnp.moveaxis(parts[:-1], 0, 1).reshape(B, -1, *parts.shape[3:])
        return jnp.concatenate([full, parts[-1][:, full.shape[1] - W:]], 1)

    return jax.tree.map(join, lax.map(part, jnp.arange(-(-W // width), dtype=jnp.int32)))
