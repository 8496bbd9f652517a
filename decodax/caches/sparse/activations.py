"""Statistics of ActQKV: activation biases of queries, scores of blocks, and information densities of layers (Xiao et
al., 2025; see `decodax.caches.sparse.act_qkv`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import Struct, struct

LONGEST = 1000
"""Maximum number of windows in the running mean: later windows get the weight of the last one."""


@struct
class Activations(Struct):
    """Running mean and variance of the queries of one layer over the windows of a prompt so far.

    Attributes:
        mean, variance: `f32[B, m]`, for each of the `m` channels of all heads.
    """

    mean: Array
    variance: Array

    def after(self, x: Array, live: Array, count: Array) -> Activations:
        """Returns the mean and variance with one more window of queries included.

        Args:
            x: `f32[B, W, m]`, queries of the window.
            live: `bool[B, W]`, nodes that count.
            count: `i32[]`, number of windows before.
        """
        size = jnp.maximum(live.sum(1), 1)[:, None].astype(jnp.float32)
        some = live[..., None]
        mean = jnp.where(some, x, 0).sum(1) / size
        variance = jnp.where(some, jnp.square(x - mean[:, None]), 0).sum(1) / size
        n = jnp.maximum(count, 1).astype(jnp.float32)
        first = Activations(mean=mean, variance=variance * size / jnp.maximum(size - 1, 1))
        later = Activations(mean=(self.mean * n + mean) / (n + 1),
                            variance=(self.variance * (n - 1 / size) + variance
                                      + jnp.square(mean - self.mean) / (1 + 1 / n)) / (n + 1 - 1 / size))
        new = jax.tree.map(lambda a, b: jnp.where(count == 0, a, b), first, later)
        return jax.tree.map(lambda old, new: jnp.where(live.any(1)[:, None], new, old), self, new)

    def bias(self, x: Array, live: Array) -> Array:
        """Returns a weight for each query of a window, `f32[B, W]`: its mean squared distance from the mean in units of
        the variance, divided by the sum over the window. If all distances are zero, the weights of live nodes are
        equal.

        Args:
            x: `f32[B, W, m]`, queries of the window.
            live: `bool[B, W]`, nodes that count; the others get the weight 0.
        """
        spread = self.variance + self.variance.mean(-1, keepdims=True) / 100
        off = jnp.square(x - self.mean[:, None]) / jnp.maximum(spread, 1e-30)[:, None]
        off = jnp.where(live, off.mean(-1), 0)
        total = off.sum(1, keepdims=True)
        number = jnp.maximum(live.sum(1, keepdims=True), 1)
        return jnp.where(total > 0, off / jnp.maximum(total, 1e-30), jnp.where(live, 1 / number, 0))


def cosines(probe: Array, blocks: Array) -> Array:
    """Returns the cosines of a probe query `f32[H, d]` and the means of blocks `f32[H, N, d]`, over all heads together,
    `f32[N]`, rounded to 14 bits."""
    products = jnp.einsum("hd,hnd->n", probe, blocks)
    norms = jnp.sqrt(jnp.square(blocks).sum((0, 2))), jnp.sqrt(jnp.square(probe).sum())
    # in the first layer, blocks with the same tokens have the same keys up to the rounding of their rotation and its
    # inverse. They have to tie, so that the earlier one is taken in a batch of any size
    return jnp.round(products / jnp.maximum(norms[0], 1e-12) / jnp.maximum(norms[1], 1e-12) * 2 ** 14) / 2 ** 14


def density(scores: Array, there: Array) -> Array:
    """Returns the information density of a layer, `f32[]`: the entropy of the softmax over the first `there` (`i32[]`)
    of its blocks' scores (`f32[N]`), divided by the maximum entropy. -1 if `there` is below 2."""
    shares = jax.nn.softmax(scores, where=jnp.arange(len(scores)) < there)
    entropy = -(shares * jnp.log(shares + 1e-10)).sum()
    return jnp.where(there > 1, entropy / jnp.log(jnp.maximum(there, 2).astype(jnp.float32)), -1)


def divided(densities: Array, total: int, least: Array, most: Array) -> Array:
    """Divides `total` blocks over the layers in proportion to their densities, and returns the number of each,
    `i32[L]`.

    Layer by layer, the share of the blocks that are left is the layer's density divided by the sum of the densities
    from it on. The numbers are clipped, so their sum may differ from `total`.

    Args:
        densities: `f32[L]`, at least 0.
        total: number of blocks.
        least, most: `i32[]`, minimum and maximum number of a layer.
    """
    def one(left: Array, layer: tuple[Array, Array]) -> tuple[Array, Array]:
        own, rest = layer
        part = jnp.round(own / jnp.maximum(rest, 1e-30) * left)
        number = jnp.maximum(jnp.minimum(part, most), least)
        return left - number, number

    rest = jnp.cumsum(densities[::-1])[::-1]
    return lax.scan(one, jnp.float32(total), (densities, rest))[1].astype(jnp.int32)
