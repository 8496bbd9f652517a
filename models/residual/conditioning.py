"""Self-conditioning of a canvas on the model's last predictions, as in DiffusionGemma (Google DeepMind 2026; "Analog
Bits: Generating Discrete Data using Diffusion Models with Self-Conditioning", Chen et al., 2023).

Nodes of the text are those of a causal decoder. A node of a canvas starts from the norm of its token's embedding plus
an MLP of the expected embedding under the last step's prediction at its position; in the first step that is 0. It
attends to the whole canvas, and in layers with a sliding window to what the canvas's first node would attend to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.core.types import CanvasNodes
from decodax.core.window import Window
from decodax.models.config import DecoderConfig
from decodax.models.feed_forward import MLP
from decodax.models.layers import Norm


class SelfConditioning(nnx.Module):
    """Self-conditioning of a diffusion model: at the positions that are being filled (the canvas), adds a gated MLP of
    the expected embedding under the last predictions to the token's embedding, and normalizes the sum."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.norm = Norm(c.norm, (c.width,), ("embed",))
        self.mlp = MLP(c, rngs)
        self.last = Norm(dataclasses.replace(c.norm, scaled=False), (c.width,), ("embed",))

    def __call__(self, x: Array, canvas: CanvasNodes) -> Array:
        """Returns the residual stream before the first layer, from the embeddings `f[B, W, D]`."""
        own = self.last(x + self.mlp(self.norm(canvas.expected.astype(x.dtype))))
        return jnp.where(canvas.inside[..., None], own, x)


def reaching(window: Window, canvas: CanvasNodes | None) -> Window:
    """Returns the window with the positions by which a sliding window of attention is measured: for nodes of a canvas
    (a block that is being filled) the position where it starts, for others their own."""
    if canvas is None:
        return window
    return window.replace(positions=jnp.where(canvas.inside, canvas.start[:, None], window.positions))


def of(window: Window, network: Any) -> CanvasNodes | None:
    """Returns the description of the canvas (the block that is being filled) that comes with the window; None without
    one, or if the network has no self-conditioning."""
    return window.hint(CanvasNodes) if network.conditioning is not None else None
