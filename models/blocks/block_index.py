"""The block index of MiniMax M3 ("MiniMax Sparse Attention", MiniMax, 2026): small index heads choose the blocks of
text that a query attends to.

Every token has one index key, and a query one index query for each index head. A block of `BlockIndex.size` positions
has as its score the largest product of the index query and an index key in it, and the query heads that belong to the
index head attend to the tokens of the best `BlockIndex.top` blocks, among them the latest ones in any case.

The cache stores the index key of a token after the key of each of its heads. So a cache of keys by position takes it,
and a device of a mesh that has some heads chooses for these by itself. A device with several heads stores the index key
as often: with the 4 heads of M3 on one device, 1,536 numbers a token and layer, where one copy would take 1,152.
Attention reads the blocks that some query has chosen, and of the others the index key of one head.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.blocks.options import BlockIndex, Layer
from decodax.models.config import DecoderConfig
from decodax.models.layers import Linear, Norm
from decodax.models.rope import rotate
from decodax.pallas_kernels.window_attention import TopBlocks


class BlockIndexer(nnx.Module):
    """The projections of a block index, with a norm and the layer's rotation of index queries and keys."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        rule = layer.index
        assert isinstance(rule, BlockIndex)
        self.c, self.layer, self.rule = c, layer, rule
        self.q = Linear(rngs, (c.width, rule.heads * rule.width), ("embed", None), False)
        self.k = Linear(rngs, (c.width, rule.width), ("embed", None), False)
        self.q_norm, self.k_norm = (Norm(c.norm, (rule.width,), (None,)) for _ in range(2))

    def __call__(self, x: Array, k: Array, tables: dict[Any, Any]) -> tuple[Array, TopBlocks]:
        """Returns the keys with the index key after the key of each head, `f[B, W, G, d + width]`, and the choice of
        blocks.

        Args:
            x: the layer's normalised input, `f[B, W, D]`.
            k: its keys, `f[B, W, G, d]`.
            tables: see `Decoder.tables`.
        """
        rule, plain = self.rule, k.shape[-1]
        own = self._placed(self.k(x), self.k_norm, tables)
        asked = self._placed(self.q(x), self.q_norm, tables)
        # An index head that several key heads share asks once for each of them.
        asked = jnp.repeat(asked, max(k.shape[2] // rule.heads, 1), 2)
        k = jnp.concatenate([k, jnp.broadcast_to(own, (*k.shape[:3], rule.width))], -1)
        return k, TopBlocks(asked, plain, rule.top, rule.size, rule.local)

    def _placed(self, y: Array, norm: Norm, tables: dict[Any, Any]) -> Array:
        """Splits index queries or keys into heads, `f[B, W, N, width]`, norms and rotates them."""
        y = norm(y.reshape(*y.shape[:2], -1, self.rule.width))
        if (rope := self.layer.rope) is None:
            return y
        cos, sin = tables[rope]
        return rotate(y, cos, sin, rope.interleaved)
