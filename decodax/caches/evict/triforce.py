"""The chunks of the cache that TriForce's drafts attend to ("TriForce: Lossless Acceleration of Long Sequence
Generation with Hierarchical Speculative Decoding", Sun et al., 2024). The algorithm is
`decodax.algorithms.triforce`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.common.options import Count


@dataclasses.dataclass(frozen=True)
class ChunkMeans(TokenScore):
    """Scores a token by the product of the newest query with the mean key of the token's chunk.

    The first chunk and the last one, which may be shorter, are always kept. The query heads of a group share the
    maximum of their scores.

    Attributes:
        chunk: number of tokens of a chunk.
    """

    chunk: Count = 8

    @property
    def latest(self) -> int:
        return 1

    @property
    def always(self) -> int:
        return 2 * self.chunk

    def __call__(self, held: HeldLayer) -> Array:
        G, S, d = held.keys.shape
        keys = jnp.pad(jnp.where(held.valid[..., None], held.keys, 0), ((0, 0), (0, -S % self.chunk), (0, 0)))
        number = jnp.clip(held.count[:, None] - self.chunk * jnp.arange(keys.shape[1] // self.chunk), 1, self.chunk)
        means = keys.reshape(G, -1, self.chunk, d).sum(2) / number[..., None]
        worth = jnp.einsum("grd,gnd->grn", held.queries[0].reshape(G, -1, d), means).max(1)
        stays = (held.index < self.chunk) | (held.index // self.chunk >= (held.count // self.chunk)[:, None])
        return jnp.where(stays, jnp.inf, jnp.repeat(worth, self.chunk, 1)[:, :S])
