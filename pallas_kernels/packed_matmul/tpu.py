"""Matrix products with packed weights on TPUs (Mosaic).

If scales belong to groups of inputs, XLA writes the converted weights to memory. Here a program instance takes a block
of outputs with all of their inputs. It multiplies the rows with the codes of one group after the other and adds up the
products times their scales, so it scales `R` products for each output and group instead of `K` weights.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.dtypes import itemsize_bits
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
ROWS = 16
"""Number of rows of a bfloat16 tile."""

OUTPUTS = 512
"""Maximum number of outputs of an instance."""

CODES = 4 << 20
"""Maximum bytes of an instance's codes; two such blocks are in memory at a time."""

INPUTS = 2 << 20
"""Maximum bytes of a tile of rows; two such tiles are in memory at a time."""

SEVERAL = 8
"""Maximum number of groups in one unrolled step, so that the matrix unit need not wait between groups."""


def block_of(N: int, K: int, bits: int) -> int:
    """Returns the number of the `N` outputs that one instance of the TPU kernel computes, for `K` inputs with codes of
    `bits` bits.

    >>> block_of(8192, 2048, 4), block_of(4096, 14336, 8), block_of(4096, 14336, 4), block_of(200, 2048, 4)
    (512, 256, 512, 200)
    """
    most = CODES * 8 // (K * bits) // LANES * LANES
    return min(N, OUTPUTS, max(most, LANES))


def packed_matmul(x: Array, codes: Array, scales: Array, dtype: Any, *, block: int | None = None,
                  interpret: Any = False) -> Array:
    """Returns `x @ w.T`, `f[R, N]`, by a TPU kernel that multiplies in bfloat16 and sums in float32; a weight is its
    code times the scale of its group of consecutive inputs.

    Args:
        x: `bf16[R, K]`.
        codes: `i8[N, K]` or `i4[N, K]`.
        scales: `f32[N, groups]`; each group is a multiple of 128 inputs.
        dtype: dtype of the result.
        block: number of outputs of an instance, a multiple of 128 or all of them; None: `block_of`.
        interpret: whether to run without a TPU; True, or `pltpu.InterpretParams`.
    """
    (R, K), (N, groups) = x.shape, scales.shape
    if K % (groups * LANES):
        raise ValueError(f"scales: got {groups} groups of {K} inputs, takes groups of a multiple of {LANES}")
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"x: got {x.dtype}, takes bfloat16")
    block = block or block_of(N, K, itemsize_bits(codes.dtype))
    tile = min(max(INPUTS // (2 * K) // ROWS, 1), -(-R // ROWS)) * ROWS
    # The padding of the last blocks, of rows or outputs, is multiplied too but not written.
    return pl.pallas_call(
        functools.partial(_kernel, group=K // groups),
        grid=(pl.cdiv(N, block), pl.cdiv(R, tile)),       # rows are the inner axis, so codes are transferred once
        in_specs=[pl.BlockSpec((tile, K), lambda n, r: (r, 0)), pl.BlockSpec((block, K), lambda n, r: (n, 0)),
                  pl.BlockSpec((groups, block), lambda n, r: (0, n))],
        out_specs=pl.BlockSpec((tile, block), lambda n, r: (r, n)),
        out_shape=jax.ShapeDtypeStruct((R, N), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(flops=2 * R * K * N, transcendentals=0,
                                      bytes_accessed=N * K * itemsize_bits(codes.dtype) // 8 + 4 * N * groups),
        name="packed_matmul",
        # XLA itself lays scales out with outputs in lanes, because few groups would be padded to 128.
    )(x, codes, scales.T)


def _kernel(x: Array, codes: Array, scales: Array, out: Array, *, group: int) -> None:
    groups = scales.shape[0]
    several = max(n for n in range(1, SEVERAL + 1) if groups % n == 0)

    def add(step: Array, total: Array) -> Array:
        for i in range(several):
            g = step * several + i
            where = pl.ds(pl.multiple_of(g * group, LANES), group)
            part = lax.dot_general(x[:, where], codes[:, where].astype(x.dtype), (((1,), (1,)), ((), ())),
                                   preferred_element_type=jnp.float32)
            total = total + part * scales[pl.ds(g, 1), :]
        return total

    total = lax.fori_loop(0, groups // several, add, jnp.zeros(out.shape, jnp.float32))
    out[...] = total.astype(out.dtype)
