"""Residual streams that a layer reads and writes with learned shares: manifold-constrained hyper-connections ("mHC:
Manifold-Constrained Hyper-Connections", Xie et al., 2026, after "Hyper-Connections", Zhu et al., 2025), as in DeepSeek
V4.

Streams have the shape `f[B, W, n, D]`. Before each half of a layer, attention and MLP, a node's streams `X` give three
sets of shares: `pre` (`n` numbers) sums them into the input of the half, `post` (`n`) adds its output to each of them,
and `mix` (`n x n`) mixes them:

    X_k <- post_k half(sum over j of pre_j X_j) + sum over j of mix_jk X_j

Sinkhorn's steps (Sinkhorn and Knopp, 1967) make rows and columns of `mix` sum to one, so that no product of mixtures
over many layers grows. Shares are computed in float32.

Independent hyper-connections (Hunyuan Hy4; Tencent, 2026) have no mixture: each stream stays itself, and is summed up
with its share of the output in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from decodax.models.config import DecoderConfig
from decodax.models.layers import weight
from decodax.models.residual.options import HyperConnections


def sinkhorn(scores: Array, iterations: int, eps: float) -> Array:
    """Returns matrices whose rows and columns sum to about one, `f32[..., n, n]`, from scores of the same shape. The
    first step takes the softmax of each row; the columns are divided last.

    >>> made = sinkhorn(jnp.array([[2.0, 0.0], [1.0, 3.0]]), iterations=20, eps=1e-6)
    >>> [[round(float(x), 3) for x in row] for row in made]
    [[0.881, 0.119], [0.119, 0.881]]
    """
    over = lambda x, axis: x / (x.sum(axis, keepdims=True) + eps)
    first = over(jax.nn.softmax(scores, -1) + eps, -2)
    return lax.fori_loop(0, iterations - 1, lambda _, x: over(over(x, -1), -2), first)


class HyperConnection(nnx.Module):
    """The shares of one half of a layer, by which it reads the streams and writes to them."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        assert isinstance(c.streams, HyperConnections)
        self.options, n = c.streams, c.streams.count
        sets = (n, n) if c.streams.iterations is None else (n, n, n * n)
        self.fn = weight(rngs, (sum(sets), n * c.width), (None, None))
        self.base = nnx.Param(jnp.zeros(sum(sets)), axes=(None,))
        self.scale = nnx.Param(jnp.ones(len(sets)), axes=(None,))

    def __call__(self, streams: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the input of the half, `f[B, W, D]`, and a function from its output, of the same shape, to the
        streams after it. `streams` are those before it, `f[B, W, n, D]`."""
        n, dtype, steps = self.options.count, streams.dtype, self.options.iterations
        found = _projected(streams, self.fn[...], self.options.norm_eps)
        scale, base = self.scale[...].astype(jnp.float32), self.base[...].astype(jnp.float32)
        scores = [found[..., at] * scale[i] + base[at]
                  for i, at in enumerate((slice(n), slice(n, 2 * n), slice(2 * n, None))[:len(scale)])]
        pre, post = jax.nn.sigmoid(scores[0]) + self.options.eps, self.options.magnitude * jax.nn.sigmoid(scores[1])

        def added(out: Array) -> Array:
            shares = (post + self.options.eps)[..., None] * out[:, :, None].astype(jnp.float32)
            return (shares + streams.astype(jnp.float32)).astype(dtype)

        def mixed(out: Array) -> Array:
            assert steps is not None
            mix = sinkhorn(scores[2].reshape(*found.shape[:-1], n, n), steps, self.options.eps).astype(dtype)
            return post[..., None].astype(dtype) * out[:, :, None] + jnp.einsum("bwjk,bwjd->bwkd", mix, streams)

        return _summed(pre, streams), added if steps is None else mixed


class HyperEnds(nnx.Module):
    """Makes equal streams out of a token's embedding, and one vector out of the streams after the last layer."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        assert isinstance(c.streams, HyperConnections)
        self.options, n, learned = c.streams, c.streams.count, c.streams.joined == "shares"
        self.fn = weight(rngs, (n, n * c.width), (None, None)) if learned else None
        self.base = nnx.Param(jnp.zeros(n), axes=(None,)) if learned else None
        self.scale = nnx.Param(jnp.ones(1), axes=(None,)) if learned else None

    def split(self, x: Array) -> Array:
        """Returns the streams `f[B, W, n, D]` of embeddings `f[B, W, D]`."""
        return jnp.repeat(x[:, :, None], self.options.count, 2)

    def join(self, streams: Array) -> Array:
        """Returns the sum of the streams `f[B, W, n, D]` with learned shares, or their mean, `f[B, W, D]`."""
        if self.fn is None or self.base is None or self.scale is None:
            return streams.mean(2)
        found = _projected(streams, self.fn[...], self.options.norm_eps)
        shares = jax.nn.sigmoid(found * self.scale[...].astype(jnp.float32) + self.base[...].astype(jnp.float32))
        return _summed(shares + self.options.eps, streams)

    def shown(self, streams: Array) -> Array:
        """Returns what drafters and probes read after a layer, the mean of the streams, `f[B, W, D]`."""
        return streams.mean(2)


def _projected(streams: Array, kernel: Array, eps: float) -> Array:
    """Returns the products `f32[B, W, m]` of a matrix `f[m, n D]` and a node's streams, which are divided by the root
    mean square of all of them."""
    flat = streams.reshape(*streams.shape[:2], -1).astype(jnp.float32)
    flat = flat * lax.rsqrt(jnp.square(flat).mean(-1, keepdims=True) + eps)
    return flat @ kernel.astype(jnp.float32).T


def _summed(shares: Array, streams: Array) -> Array:
    """Returns the sum of the streams with shares `f32[B, W, n]`, `f[B, W, D]`."""
    return (shares[..., None] * streams.astype(jnp.float32)).sum(2).astype(streams.dtype)
