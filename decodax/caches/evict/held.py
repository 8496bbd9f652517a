"""What a rule of eviction sees: one layer of one row, at the moment when something has to go."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.common.struct import Struct, static, struct


@struct
class HeldLayer(Struct):
    """A layer's entries of one row, in the order of their positions and without gaps.

    Attributes:
        keys, values: `f32[G, S, d]` and `f32[G, S, e]`; keys are rotated to their positions.
        positions: `i32[G, S]`. count: `i32[G]`, how many of the `S` slots each head holds.
        length: `i32[]`, tokens of the text so far.
        settled_at: `i32[]`, how many of them there were when the cache first chose, behind the prompt.
        since: `i32[]`, the length when something went last; the length itself when a prompt has just been read.
        queries: `f32[w, H, d]`, those of the latest `w` tokens, the newest last, rotated and scaled as attention takes
            them; the first ones are zeros where the text is shorter.
        gathered: what the score has gathered on the way (`TokenScore.gather`), of this row.
        outputs: `f32[H, e, D]`, how heads are projected to the residual stream, for scores that read it; else None.
        layer, depth: the layer's number, and how many there are. shape: its shape.
    """

    keys: Array
    values: Array
    positions: Array
    count: Array
    length: Array
    settled_at: Array
    since: Array
    queries: Array
    gathered: Any
    outputs: Array | None
    layer: int = static()
    depth: int = static()
    shape: KVLayer = static()

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def index(self) -> Array:
        """`i32[1, S]`: the place of each slot."""
        return jnp.arange(self.slots, dtype=jnp.int32)[None]

    @property
    def valid(self) -> Array:
        """`bool[G, S]`: which slots hold something."""
        return self.index < self.count[:, None]

    @property
    def asked_at(self) -> Array:
        """`i32[w]`: the positions of `queries`; below 0 where there is none."""
        return self.length - self.queries.shape[0] + jnp.arange(self.queries.shape[0], dtype=jnp.int32)

    def attention(self, queries: Array | None = None, asked_at: Array | None = None) -> Array:
        """`f32[G, r, w, S]`: the weights that `queries`, or others (`f32[w, H, d]` with their positions `i32[w]`), give
        to what is held, up to their own positions."""
        queries = self.queries if queries is None else queries
        asked_at = self.asked_at if asked_at is None else asked_at
        w, H, d = queries.shape
        G = self.keys.shape[0]
        scores = jnp.einsum("wgrd,gsd->grws", queries.reshape(w, G, H // G, d), self.keys)
        seen = (self.valid[:, None] & (self.positions[:, None] <= asked_at[:, None]))[:, None]
        return jax.nn.softmax(scores, axis=-1, where=seen) * (asked_at >= 0)[:, None]
