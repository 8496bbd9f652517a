"""Per-layer embeddings: each layer gets a narrow embedding of its own of each token (Gemma 3n and 4; Google, 2025).

One table has the embeddings of a token for all layers. The sum of a token's row and of a projection of its usual
embedding, both of about unit size, is computed once, before the first layer. Layer `i` multiplies its part of that sum,
`f[B, W, d]`, with a narrow projection of the residual stream, and adds a wide projection of the product to the stream.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig
from decodax.models.layers import ACTIVATIONS, STD, Linear, Norm, weight


class LayerInputTable(nnx.Module):
    """Computes the per-layer embeddings of tokens (Gemma 3n): for each layer a vector from a table, added to a
    projection of the token's usual embedding."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        assert c.layer_inputs is not None
        self.c, self.options, size = c, c.layer_inputs, len(c.layers) * c.layer_inputs.width
        self.table = weight(rngs, (self.options.rows, size), ("vocab", None))
        self.project = Linear(rngs, (c.width, size), ("embed", None), False)
        self.norm = Norm(c.norm, (self.options.width,), (None,))

    def __call__(self, tokens: Array, x: Array, which: Array | None = None) -> Array:
        """Returns the inputs `f[B, W, L, d]`.

        Args:
            tokens: `i32[B, W]`.
            x: `f[B, W, D]`, the residual stream before the first layer.
            which: `bool[B, W]`, nodes with other embeddings than their token's, which have the table's row of token 0,
                the padding token in Gemma; None: none.
        """
        width, rows = self.options.width, self.options.rows
        unknown = tokens >= rows if which is None else (tokens >= rows) | which
        own = self.table[...][jnp.where(unknown, 0, tokens)].astype(x.dtype)
        # The factor is rounded to the weights' dtype, as in the models' training.
        own = (own * jnp.asarray(width ** 0.5, x.dtype)).reshape(*tokens.shape, -1, width)
        of_stream = (self.project(x) * self.c.width ** -0.5).reshape(own.shape)
        return (self.norm(of_stream) + own) * 2 ** -0.5


class LayerInput(nnx.Module):
    """Computes what a layer adds to the residual stream from its per-layer embedding: a narrow projection of the
    stream, multiplied by that embedding, widened and normalized."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        assert c.layer_inputs is not None
        width = c.layer_inputs.width
        self.activation = c.activation
        self.narrow = Linear(rngs, (c.width, width), ("embed", None), False)
        self.widen = Linear(rngs, (width, c.width), (None, "embed"), False, STD / (2 * len(c.layers)) ** 0.5)
        self.norm = Norm(c.norm, (c.width,), ("embed",))

    def __call__(self, x: Array, own: Array) -> Array:
        """Returns `f[B, W, D]`, from the residual stream `f[B, W, D]` and the layer's input `f[B, W, d]`."""
        return self.norm(self.widen(ACTIVATIONS[self.activation](self.narrow(x)) * own))


class LayerFactor(nnx.Module):
    """Multiplies the residual stream after a layer by a learned number; with `conditioned` by another one at the
    positions that a diffusion model is filling (the canvas)."""

    def __init__(self, conditioned: bool = False) -> None:
        one = lambda: nnx.Param(jnp.ones(1), axes=(None,))
        self.scale, self.canvas = one(), one() if conditioned else None

    def __call__(self, x: Array, canvas: Array | None = None) -> Array:
        """Returns `f[B, W, D]`. `canvas` is `bool[B, W]`, the nodes of a canvas; None: there are none."""
        scale = self.scale[...]
        if canvas is not None and self.canvas is not None:
            scale = jnp.where(canvas[..., None], self.canvas[...], scale)
        return x * scale.astype(x.dtype)
