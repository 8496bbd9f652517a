"""A sparse mixture of experts (Shazeer et al., 2017) in place of a block's MLP: each token is processed by a few
experts.

The choices are sorted by expert and computed in blocks of `BLOCK` rows, each block by one expert. So shapes are static,
no token is dropped, and the weights of experts that no token chose are not read. Every product has `BLOCK` rows, so a
token's result is bitwise the same whatever other tokens there are. `jax.lax.ragged_dot` would do the same on a TPU; on
CPU and GPU it multiplies every row with all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import DATA, EXPERT, MODEL, shardwise
from decodax.models.config import Experts
from decodax.models.packed import Kernel, multiply

BLOCK = 8
"""Rows of a block: 4 are faster for single tokens, 16 for prompts. The number does not depend on the number of tokens,
since a product with another number of rows is rounded differently."""


def route(logits: Array, e: Experts) -> tuple[Array, Array]:
    """Returns the experts of each token and their weights.

    Args:
        logits: `f32[n, E]`, the router's logits.
        e: the mixture.

    Returns:
        `i32[n, k]`, the most likely experts first, and of equally likely ones the lower index; `f32[n, k]`, their
        weights.

    >>> which, weights = route(jnp.log(jnp.array([[0.1, 0.6, 0.3]])), Experts(count=3, chosen=2, width=1))
    >>> which.tolist(), [round(float(w), 3) for w in weights[0]]
    ([[1, 2]], [0.667, 0.333])
    """
    weights, which = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), e.chosen)
    return which, weights / weights.sum(-1, keepdims=True) if e.normalise else weights


def mix(x: Array, which: Array, weights: Array, gate: Kernel, up: Kernel, down: Kernel,
        activation: Callable[[Array], Array]) -> Array:
    """Returns the weighted sum of the chosen experts' outputs for each token.

    Expert `e` computes `activation(x @ gate[e]) * (x @ up[e]) @ down[e]`. On a mesh each device has a part of the inner
    channels of all experts, or of some experts if the mesh has an axis "expert", and computes that part for its own
    tokens. The parts are summed once for all tokens. The layout of packed kernels is left to the compiler.

    Args:
        x: `f[n, D]`.
        which: `i32[n, k]`, the chosen experts.
        weights: `f32[n, k]`, their weights.
        gate, up: `f[E, D, I]`, may be packed.
        down: `f[E, I, D]`, may be packed.
        activation: elementwise function.

    Returns:
        `f[n, D]`, in the dtype of `x`.
    """
    if not all(isinstance(kernel, Array) for kernel in (gate, up, down)):
        return _mixed(x, which, weights, gate, up, down, activation)
    E, rows = gate.shape[0], PartitionSpec(DATA)        # type: ignore[union-attr]
    wide, narrow = PartitionSpec(EXPERT, None, MODEL), PartitionSpec(EXPERT, MODEL)

    def part(*own: Array) -> Array:
        x, which, weights, gate, up, down = own
        held = gate.shape[0]
        if held < E:
            which = which - held * lax.axis_index(EXPERT)
        return _mixed(x, which, weights, gate, up, down, activation, held < E)[None, None]

    return shardwise(part, (rows, rows, rows, wide, wide, narrow), PartitionSpec(EXPERT, MODEL, DATA), x, which,
                     weights, gate, up, down).sum((0, 1))


def _mixed(x: Array, which: Array, weights: Array, gate: Kernel, up: Kernel, down: Kernel,
           activation: Callable[[Array], Array], elsewhere: bool = False) -> Array:
    """Computes `mix` on one device. With `elsewhere`, `which` may contain experts of other devices."""
    (n, k), E = which.shape, jax.tree.leaves(gate)[0].shape[0]
    if elsewhere:
        here = (which >= 0) & (which < E)
        which = jnp.where(here, which, E)       # sorted last, counted nowhere
    total = n * k // BLOCK + min(E, n * k)      # the most blocks: full ones, and a partial one per expert
    flat = which.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    expert = flat[order]
    sizes = jnp.bincount(flat, length=E)
    ends = jnp.cumsum(-(-sizes // BLOCK))       # counted in blocks
    owner = jnp.searchsorted(ends, jnp.arange(total), side="right").astype(jnp.int32)
    # Row of each sorted choice: its expert's first block plus its rank within that expert.
    rank = jnp.arange(n * k) - (jnp.cumsum(sizes) - sizes)[expert]
    place = ((ends - -(-sizes // BLOCK))[expert] * BLOCK + rank).astype(jnp.int32)
    if elsewhere:
        place = jnp.where(expert < E, place, total * BLOCK)
    rows = jnp.zeros(total * BLOCK, jnp.int32).at[place].set(order // k, mode="drop")

    def block(at: tuple[Array, Array]) -> Array:
        rows, e = at

        def run() -> Array:
            own = jax.tree.map(lambda kernel: kernel[jnp.minimum(e, E - 1)], (gate, up, down))
            one, other, last = own
            return multiply(activation(multiply(x[rows], one)) * multiply(x[rows], other), last)

        return lax.cond(e < E, run, lambda: jnp.zeros((BLOCK, x.shape[1]), x.dtype))

    made = lax.map(block, (rows.reshape(total, BLOCK), owner)).reshape(total * BLOCK, -1)
    found = made[jnp.zeros(n * k, jnp.int32).at[order].set(place)].reshape(n, k, -1)
    if elsewhere:
        found = jnp.where(here[..., None], found, 0)
    # Added one after the other: the order of a reduction depends on the shape, that of a scatter on the positions.
    parts = (found[:, j] * weights[:, j, None].astype(x.dtype) for j in range(k))
    return functools.reduce(jnp.add, parts)
