"""The index of Qwen4 (Qwen Team, 2026): index keys of groups of tokens choose the groups that a query attends to.

Every token has one index key. Those of `Pooling.every` tokens that follow one another are added up; their mean, normed
and rotated as the first of these tokens, is the index key of the group. A query has several index queries, and a group
the score `sum_i relu(query_i . key)`. The query attends to the tokens of the groups with the highest scores, among
those that end at or before it, and to the tokens after the last whole group.

As with blocks (`decodax.models.blocks.block_index`), the cache stores index keys after the key of each head: that of a
group with its last token, zeros with the others. The index keys of the last tokens of a text, from which that of the
next group is made, are a state beside it (`decodax.models.compressed.pooling`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.blocks.options import GroupIndex, Layer
from decodax.models.compressed.options import Pooling
from decodax.models.compressed.pooling import PoolWalk
from decodax.models.config import DecoderConfig
from decodax.models.layers import Linear, Norm
from decodax.models.rope import rotate
from decodax.pallas_kernels.window_attention import TopGroups, TopKeys


class GroupIndexer(nnx.Module):
    """The projections of an index of groups, with a norm and the layer's rotation of index queries and keys."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        assert isinstance(layer.index, GroupIndex) and isinstance(layer.recurrent, Pooling)
        self.rule, self.pool, self.rope = layer.index, layer.recurrent, layer.rope
        into = lambda width: Linear(rngs, (c.width, width), ("embed", None), False)
        self.q, self.k = into(self.rule.heads * self.rule.width), into(self.rule.width)
        self.q_norm, self.k_norm = (Norm(c.norm, (self.rule.width,), (None,)) for _ in range(2))

    def __call__(self, index: int, x: Array, k: Array, tables: dict[Any, Any], attend: Any
                 ) -> tuple[Array, TopGroups, Any]:
        """Returns the keys with the index key after the key of each head, `f[B, W, G, d + width]`, the choice of
        groups, and what is to be committed to the state of pooled keys.

        Args:
            index: index of the layer.
            x: the layer's input, `f[B, W, D]`.
            k: its keys, `f[B, W, G, d]`.
            tables: see `Decoder.tables`.
            attend: the attention function.
        """
        rule, pool = self.rule, self.pool
        walk = PoolWalk(pool, (self.k(x),), jnp.zeros((pool.every, 0), x.dtype), tables[None])
        made, entry = attend(index, None, None, None, walk=walk)
        made = self._turned(self.k_norm(made)[:, :, None], tables, (self.rope, pool.every))
        asked = self.q_norm(self.q(x).reshape(*x.shape[:2], rule.heads, rule.width))
        weights = jnp.full(asked.shape[:3], rule.width ** -0.5, jnp.float32)
        choice = TopKeys(self._turned(asked, tables, self.rope), weights, rule.top)
        own = jnp.broadcast_to(made, (*k.shape[:3], rule.width)).astype(k.dtype)
        return jnp.concatenate([k, own], -1), TopGroups(choice, k.shape[-1], pool.every), entry

    def _turned(self, y: Array, tables: dict[Any, Any], at: Any) -> Array:
        """Rotates index queries or keys by the entry `at` of the tables, if the layer has a rope."""
        if self.rope is None:
            return y
        cos, sin = tables[at]
        return rotate(y, cos, sin, self.rope.interleaved)
