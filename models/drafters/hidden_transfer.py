"""Hidden transfer: window nodes without tokens, which are made after a layer from the hidden states of other nodes
("Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration", Wu et al., 2024)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, static, struct
from decodax.core.window import take


@struct
class Transfer(Struct):
    """A hint (`Window.hints`): the last nodes of the window have no tokens. After one layer each is set to a linear map
    of another node's residual stream, and runs through the layers above (hidden transfer, Wu et al., 2024).

    Attributes:
        maps: `f[K, D, D]`, the maps of the `K` nodes that belong to one source.
        sources: `i32[B or 1, A]`, the nodes that are mapped. The `K` nodes of the first are followed by those of the
            second, and so on; these are the last `A K` of the window.
        layers: static; the layer, counted from 0, after whose output each map is applied.
    """

    maps: Array
    sources: Array
    layers: tuple[int, ...] = static()

    def __call__(self, layer: int, x: Array) -> Array:
        """Returns the residual stream `f[B, W, D]` after a layer."""
        made = [i for i, at in enumerate(self.layers) if at == layer]
        if not made:
            return x
        B, W, D = x.shape
        first = W - self.sources.shape[1] * len(self.layers)
        source = take(x, jnp.broadcast_to(self.sources, (B, self.sources.shape[1])))
        nodes = x[:, first:].reshape(B, -1, len(self.layers), D)
        for i in made:
            nodes = nodes.at[:, :, i].set(source @ self.maps[i].astype(x.dtype))
        return jnp.concatenate([x[:, :first], nodes.reshape(B, W - first, D)], 1)
