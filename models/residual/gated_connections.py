"""Residual streams that are read through gates of single channels (Qwen4; Qwen Team, 2026), another kind of
hyper-connections (Zhu et al., 2025).

Streams have the shape `f[B, W, n, D]`. Before each half of a layer, attention and MLP, and after the last layer, each
stream is divided by its root mean square and scaled: `Y_k`. With two narrow matrices, `A` and `U`,

    g = sigmoid(U silu(A Y / n))        x = mean over k of g_k Y_k        X_k <- X_k + 2 sigmoid(C Y / n)_k half(x)

where `Y` is the vector of all `Y_k`, and `g_k Y_k` is taken channel by channel. Halves have no norm of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.layers import Linear, Norm
from decodax.models.residual.options import GatedConnections


class StreamNorm(nnx.Module):
    """A norm of each stream, `f[..., n, D]`, with a scale of its own."""

    def __init__(self, config: NormConfig, count: int, width: int):
        self.plain, self.offset = Norm(dataclasses.replace(config, scaled=False), (width,), (None,)), config.unit_offset
        # Stored as in files, those of all streams side by side.
        self.scale = nnx.Param(jnp.full(count * width, 0.0 if self.offset else 1.0), axes=(None,))

    def __call__(self, x: Array) -> Array:
        scale = self.scale[...].astype(jnp.float32).reshape(x.shape[-2:]) + (1.0 if self.offset else 0.0)
        return (self.plain(x.astype(jnp.float32)) * scale).astype(x.dtype)


class StreamGates(nnx.Module):
    """The norm of the streams, and the gates through which they are read."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        assert isinstance(c.streams, GatedConnections)
        self.count, size = c.streams.count, c.streams.count * c.width
        self.norm = StreamNorm(c.norm, self.count, c.width)
        self.down = Linear(rngs, (size, c.streams.rank), (None, None), False)
        self.up = Linear(rngs, (c.streams.rank, size), (None, None), False)

    def read(self, streams: Array) -> tuple[Array, Array]:
        """Returns the input of the half, `f[B, W, D]`, and the norms of all streams side by side, `f[B, W, n D]`."""
        normed = self.norm(streams)
        flat = normed.reshape(*normed.shape[:2], -1)
        gates = jax.nn.sigmoid(self.up(jax.nn.silu(self.down(flat) / self.count)))
        return (gates.reshape(normed.shape) * normed).mean(2), flat


class GatedConnection(StreamGates):
    """The gates of one half of a layer, and the shares of its output that are added to the streams."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        super().__init__(c, rngs)
        self.inject = Linear(rngs, (self.count * c.width, self.count), (None, None), False)

    def __call__(self, streams: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the input of the half, and a function from its output to the streams after it, as
        `HyperConnection.__call__`."""
        active, flat = self.read(streams)
        shares = 2 * jax.nn.sigmoid(self.inject(flat) / self.count)
        return active, lambda out: streams + shares[..., None] * out[:, :, None]


class GatedEnds(StreamGates):
    """Makes equal streams out of a token's embedding, and one vector out of the streams after the last layer, which has
    no other norm."""

    def split(self, x: Array) -> Array:
        """Returns the streams `f[B, W, n, D]` of embeddings `f[B, W, D]`."""
        return jnp.repeat(x[:, :, None], self.count, 2)

    def join(self, streams: Array) -> Array:
        """Returns the mean of the streams times their gates, `f[B, W, D]`."""
        return self.read(streams)[0]

    def shown(self, streams: Array) -> Array:
        """Returns what drafters and probes read after a layer, the mean of the streams, `f[B, W, D]`."""
        return streams.mean(2)
