"""The experts of a sparse mixture (Shazeer et al., 2017): a few of them compute each token. `decodax.models.routing`
chooses them.

The choices are sorted by expert and computed in blocks of `BLOCK` rows, each block by one expert. So shapes are static,
no token is dropped, and the weights of experts that no token chose are not read. Every product has `BLOCK` rows, so a
token's result is bitwise the same whatever other tokens there are. `jax.lax.ragged_dot` would do the same on a TPU; on
CPU and GPU it multiplies every row with all experts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import DATA, EXPERT, MODEL, constrain, free_axes, shardwise
from decodax.models.packed import Kernel, Packed, by_expert, multiply

BLOCK = 8
"""Rows of a block: 4 are faster for single tokens, 16 for prompts. The number does not depend on the number of tokens,
since a product with another number of rows is rounded differently."""


Glu = Callable[[Array, Array], Array]
"""A function from the gate's and the other projection's result to the inner channels."""


def mix(x: Array, which: Array, weights: Array, gate: Kernel | None, up: Kernel, down: Kernel,
        activation: Callable[[Array], Array], biases: tuple[Array, Array, Array] | None = None,
        on_input: bool = False, glu: Glu | None = None, more: bool = False) -> Array:
    """Returns the weighted sum of the chosen experts' outputs for each token.

    Expert `e` computes `activation(x @ gate[e]) * (x @ up[e]) @ down[e]`, or without a gate `activation(x @ up[e]) @
    down[e]`. On a mesh each device has a part of the inner channels of all experts, or of some experts if the mesh has
    an axis "expert", and computes that part for its own tokens. The parts are summed once for all tokens. If the inner
    channels are divided, packed kernels whose inputs cannot be (`Packed.divides`) are left to the compiler.

    Args:
        x: `f[n, D]`.
        which: `i32[n, k]`, the chosen experts.
        weights: `f32[n, k]`, their weights.
        gate, up: `f[E, D, I]`, may be packed; `gate` may be None, without biases and `glu`.
        down: `f[E, I, D]`, may be packed.
        activation: elementwise function.
        biases: those of the three projections, `f[E, I]`, `f[E, I]` and `f[E, D]`, or None.
        on_input: True multiplies the experts' inputs by the weights in place of their outputs.
        glu: function of `x @ gate[e]` and `x @ up[e]`, in place of `activation` and the product.
        more: True if `which` may have numbers from `E` on, of experts that add nothing here and are not computed.

    Returns:
        `f[n, D]`, in the dtype of `x`.
    """
    inner, glu = () if biases is None else biases[:2], glu or (lambda gate, up: activation(gate) * up)
    if gate is None:
        glu = lambda gate, up: activation(up)
    kernels = [kernel for kernel in (gate, up, down) if kernel is not None]
    free = free_axes()
    parts = free.get(MODEL, 1)
    apart = [k for k in kernels if isinstance(k, Array)
             or (isinstance(k, Packed) and free and (parts == 1 or k.divides(parts)))]
    if len(apart) == len(kernels):
        out = _over_mesh(x, which, weights, apart, inner, glu, on_input, more)
    else:
        out = _mixed(x, which, weights, gate, up, down, inner, glu, on_input, more)
    if biases is None:
        return out
    # Here, since each device of a mesh would add the last one to its part of the sum.
    last = biases[2][which]
    return functools.reduce(jnp.add, (last[:, j] if on_input else last[:, j] * weights[:, j, None].astype(x.dtype)
                                      for j in range(which.shape[1])), out)


def _over_mesh(x: Array, which: Array, weights: Array, kernels: list[Array | Packed], inner: tuple[Array, ...],
               glu: Glu, on_input: bool, more: bool) -> Array:
    """Computes `mix` without the last biases, each device its part. `kernels` are gate, if there is one, up and down.
    """
    E, rows = kernels[0].shape[0], PartitionSpec(DATA)
    arrays, structure = jax.tree.flatten(kernels)
    layouts = [_layout(kernel, *((None, MODEL) if i == len(kernels) - 1 else (MODEL, None)))
               for i, kernel in enumerate(kernels)]

    def part(*own: Array) -> Array:
        x, which, weights, *rest = own
        *gate, up, down = jax.tree.unflatten(structure, rest[:len(arrays)])
        held = up.shape[0]
        if held < E:
            which = which - held * lax.axis_index(EXPERT)
        return _mixed(x, which, weights, gate[0] if gate else None, up, down, tuple(rest[len(arrays):]), glu, on_input,
                      more or held < E)[None, None]

    into = (rows, rows, rows, *itertools.chain(*layouts), *(PartitionSpec(EXPERT, MODEL) for _ in inner))
    out = shardwise(part, into, PartitionSpec(EXPERT, MODEL, DATA), x, which, weights, *arrays, *inner, rows=(DATA,))
    return constrain(out.sum((0, 1)), rows)


def _layout(kernel: Array | Packed, outputs: str | None, inputs: str | None) -> list[PartitionSpec]:
    """Returns the layout of each array of the kernels of all experts, over the axis "expert" and those of outputs and
    inputs."""
    if not isinstance(kernel, Packed):
        return [PartitionSpec(EXPERT, inputs, outputs)]
    return jax.tree.leaves(by_expert(kernel.specs(outputs, inputs, {MODEL: free_axes().get(MODEL, 1)}), EXPERT),
                           is_leaf=lambda x: isinstance(x, PartitionSpec))


def _mixed(x: Array, which: Array, weights: Array, gate: Kernel | None, up: Kernel, down: Kernel,
           inner: tuple[Array, ...], glu: Glu, on_input: bool, elsewhere: bool = False) -> Array:
    """Computes `mix` without the last biases on one device. With `elsewhere`, `which` may contain experts of other
    devices, or none of any device."""
    (n, k), E = which.shape, jax.tree.leaves(up)[0].shape[0]
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
    worth = jnp.ones(total * BLOCK, x.dtype)
    if on_input:
        worth = worth.at[place].set(weights.reshape(-1)[order].astype(x.dtype), mode="drop")

    def block(at: tuple[Array, Array, Array]) -> Array:
        rows, worth, e = at

        def run() -> Array:
            own = jax.tree.map(lambda kernel: kernel[jnp.minimum(e, E - 1)], (gate, up, down, inner))
            one, other, last, (first, second) = own[0], own[1], own[2], own[3] or (0, 0)
            own_x = x[rows] * worth[:, None] if on_input else x[rows]
            gated = jnp.zeros(()) if one is None else multiply(own_x, one) + first
            return multiply(glu(gated, multiply(own_x, other) + second), last)

        return lax.cond(e < E, run, lambda: jnp.zeros((BLOCK, x.shape[1]), x.dtype))

    made = lax.map(block, (rows.reshape(total, BLOCK), worth.reshape(total, BLOCK), owner)).reshape(total * BLOCK, -1)
    found = made[jnp.zeros(n * k, jnp.int32).at[order].set(place)].reshape(n, k, -1)
    if elsewhere:
        found = jnp.where(here[..., None], found, 0)
    # Added one after the other: the order of a reduction depends on the shape, that of a scatter on the positions.
    parts = (found[:, j] if on_input else found[:, j] * weights[:, j, None].astype(x.dtype) for j in range(k))
    return functools.reduce(jnp.add, parts)
