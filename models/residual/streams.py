"""Several residual streams, of which one goes through the layers: AltUp ("Alternating Updates for Efficient
Transformers", Baykal et al., 2023), as in Gemma 3n (Google, 2025).

A layer first predicts all streams, each as a mixture of them. Attention and MLP read the predicted active stream and
change it. All streams are then corrected by that change, each times a factor. Mixture and factors come from a router
that reads the active stream. Streams have the shape `f[B, W, n, D]`.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig
from decodax.models.layers import STD, Linear, Norm
from decodax.models.residual.options import Streams


class StreamMixer(nnx.Module):
    """Mixes the residual streams of a layer (AltUp): predicts all streams before attention and MLP run on the active
    one, and corrects them by its result."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        assert isinstance(c.streams, Streams)
        self.c, self.options, n = c, c.streams, c.streams.count
        self.router_norm = Norm(c.norm, (c.width,), ("embed",))
        self.router = Linear(rngs, (c.width, n), ("embed", None), False)
        self.predict = Linear(rngs, (n, n * n), (None, None), False)
        self.correct = Linear(rngs, (n, n), (None, None), False)
        self.scale = nnx.Param(jnp.ones(c.width), axes=("embed",))

    def _routed(self, x: Array) -> Array:
        """Returns numbers between -1 and 1 for each stream, `f[B, W, n]`, from the active one, `f[B, W, D]`."""
        logits = self.router(self.router_norm(x) / self.c.width)
        return jnp.tanh(logits.astype(jnp.float32)).astype(x.dtype)

    def predicted(self, streams: Array) -> Array:
        """Returns the streams `f[B, W, n, D]` before a layer with a linear combination of them added to each; its
        factors are computed from the active stream."""
        n = self.options.count
        shares = self.predict(self._routed(streams[:, :, self.options.active]))
        shares = shares.reshape(*shares.shape[:-1], n, n)           # to, from
        return streams + jnp.einsum("bwij,bwjd->bwid", shares, streams)

    def corrected(self, predicted: Array, active: Array) -> Array:
        """Returns the streams `f[B, W, n, D]` after a layer: to each of the predicted ones is added the difference of
        `active`, `f[B, W, D]`, the result of attention and MLP, from its prediction, times a factor computed from
        `active`."""
        change = active - predicted[:, :, self.options.active]
        return predicted + (1 + self.correct(self._routed(active)))[..., None] * change[:, :, None]

    def scaled(self, streams: Array) -> Array:
        """Returns the active stream times its learned scale, `f[B, W, D]`."""
        active = streams[:, :, self.options.active]
        return active * self.scale[...].astype(active.dtype) if self.options.scaled else active


class StreamEnds(nnx.Module):
    """Makes the streams out of a token's embedding, and one vector out of the streams after the last layer."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        assert isinstance(c.streams, Streams)
        self.active, count = c.streams.active, c.streams.count
        each = lambda: nnx.Dict({str(i): Linear(rngs, (c.width, c.width), ("embed", None), False)
                                 for i in range(count - 1)})
        self.into, self.out = each(), each()

    def split(self, x: Array) -> Array:
        """Returns the streams `f[B, W, n, D]` of embeddings `f[B, W, D]`."""
        return jnp.stack([x, *(_as_large(part(x), x) for part in self.into.values())], 2)

    def join(self, streams: Array) -> Array:
        """Returns the mean of all streams `f[B, W, n, D]`, `f[B, W, D]`. All but the first are projected before, and
        scaled to the size of the first."""
        first = streams[:, :, 0]
        others = (_as_large(part(streams[:, :, i + 1]), first) for i, part in enumerate(self.out.values()))
        return jnp.stack([first, *others]).mean(0)

    def shown(self, streams: Array) -> Array:
        """Returns what drafters and probes read after a layer, the active stream, `f[B, W, D]`."""
        return streams[:, :, self.active]


class LowRankPath(nnx.Module):
    """A learned path beside attention, added to its result: LAuReL ("LAuReL: Learned Augmented Residual Layer",
    Menghani et al., 2024), as in Gemma 3n."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs, rank: int):
        self.narrow = Linear(rngs, (c.width, rank), ("embed", None), False)
        self.widen = Linear(rngs, (rank, c.width), (None, "embed"), False, STD / (2 * len(c.layers)) ** 0.5)
        self.norm = Norm(c.norm, (c.width,), ("embed",))

    def __call__(self, x: Array) -> Array:
        return x + self.norm(self.widen(self.narrow(x)))


def _as_large(y: Array, x: Array) -> Array:
    """Returns `y` with the root mean square of `x` over the last axis."""
    square = lambda z: jnp.square(z).mean(-1, keepdims=True)
    return y * jnp.sqrt(square(x)) / jnp.sqrt(jnp.maximum(square(y), 1e-5))
