"""Matrix products with weights that are stored as integer codes and scales."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.common.axes import DATA, free_axes, platform, shardwise
from decodax.pallas_kernels.packed_matmul import reference

Implementation = Literal["xla", "mosaic_tpu"]

Axes = tuple[str | None, str | None]
"""The mesh axes over which the outputs and the inputs of a weight matrix are divided."""


def packed_matmul(x: Array, codes: Array, scales: Array, dtype: jax.typing.DTypeLike | None = None, *,
                  axes: Axes | None = None, implementation: Implementation | None = None) -> Array:
    """Returns `x @ w.T`, where each weight `w[n, k]` is its code times the scale of its group of inputs.

    Args:
        x: `f[R, K]`.
        codes: `i8[N, K]` or `i4[N, K]`.
        scales: `f32[N, groups]`; a group is `K // groups` consecutive inputs.
        dtype: dtype of the result; None: that of `x`.
        axes: the axes of the context's mesh over which the weights are divided. None: unknown; the compiler divides the
            product.
        implementation: "xla", or the kernel "mosaic_tpu", which runs in interpreter mode on a CPU. None: the fastest
            available (see `choose`).

    Returns:
        `f[R, N]`. Sums are float32; sums over devices that share the inputs are in `dtype`.
    """
    if implementation not in (None, "xla", "mosaic_tpu"):
        raise ValueError(f"implementation: got {implementation!r}, takes 'xla' or 'mosaic_tpu'")
    dtype = jnp.dtype(dtype or x.dtype)
    plain: Callable[..., Array] = functools.partial(reference.packed_matmul, dtype=dtype)
    implementation = implementation or choose(x, codes, scales, axes)
    if implementation == "xla":
        return plain(x, codes, scales)
    from decodax.pallas_kernels.packed_matmul import tpu  # imports modules that other platforms do not need

    kernel: Callable[..., Array] = functools.partial(tpu.packed_matmul, dtype=dtype)
    outputs, inputs = axes or (None, None)
    shared = inputs in free_axes()

    def local(*arrays: Array) -> Array:
        if implementation is None:
            y = lax.platform_dependent(*arrays, tpu=kernel, default=plain)
        else:
            y = kernel(*arrays, interpret=platform() == "cpu")
        return lax.psum(y, inputs) if shared else y

    weights = P(outputs, inputs)
    return shardwise(local, (P(DATA, inputs), weights, weights), P(DATA, outputs), x, codes, scales, whole=True)


def choose(x: Array, codes: Array, scales: Array, axes: Axes | None) -> Implementation | None:
    """Returns the implementation for the given arrays: "xla", or None for the kernel if the program is lowered for a
    TPU.

    With one scale for each output, XLA converts the weights within its product. The TPU kernel needs groups of a
    multiple of 128 inputs that are not divided over devices, and it needs the mesh, because the compiler cannot divide
    it over devices by itself.
    """
    (N, groups), sizes = scales.shape, free_axes()
    if platform() != "tpu" or x.dtype != jnp.bfloat16 or groups == 1 or x.shape[1] % (groups * 128):
        return "xla"
    known = axes is not None or all(size == 1 for size in sizes.values())
    alone = jax.sharding.get_abstract_mesh().empty
    if not known or (alone and jax.device_count() > 1):
        return "xla"
    over, among = (sizes.get(axis or "", 1) for axis in axes or (None, None))
    return "xla" if N % over or groups % among else None
