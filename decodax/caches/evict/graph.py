"""GraphKV: tokens that are like better ones give way ("GraphKV: Breaking the Static Selection Paradigm with Graph-Based
KV Cache Eviction", Li et al., 2025).

Any score says how much a token is worth by itself. The best of them are often alike, and a few of them would do. So the
best `sources` of a head send a signal to the tokens whose keys are nearest to theirs, and what those are worth decays
by the similarity; then the best tokens are chosen.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.scores import TokenScore
from decodax.caches.evict.selection import Selection, best, whole


@dataclasses.dataclass(frozen=True)
class Decayed(Selection):
    """The best tokens of each head, by scores that have decayed along a graph of similar keys.

    With `e_ij` the cosine of the keys of source `i` and another token `j`, each source decays its `m` nearest tokens,
    and `s_j` becomes `s_j` times the product of `1 - e_ij` over the sources that `j` is near to, once in each round.
    Tokens that stay in any case are no part of the graph.

    Attributes:
        sources: which share of the tokens that stay are sources, the best ones; at least one is.
        neighbours: `m`, the tokens that a source decays.
        rounds: of the propagation.
    """

    score: TokenScore
    sources: float = 0.3
    neighbours: int = 4
    rounds: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.sources <= 1:
            raise ValueError(f"sources: got {self.sources}, takes a share above 0 and at most 1")
        if self.neighbours < 1 or self.rounds < 0:
            raise ValueError(f"neighbours, rounds: got {self.neighbours} and {self.rounds}, takes 1 or more neighbours "
                             "and 0 or more rounds")

    def choose(self, held: HeldLayer, count: Array) -> Array:
        worth = self.score(held)
        nodes = held.valid & jnp.isfinite(worth)
        left = self.decayed(worth, nodes, held.keys, jnp.maximum(whole(count, self.sources), 1))
        return best(left, held.valid, count)

    def decayed(self, worth: Array, nodes: Array, keys: Array, sources: Array) -> Array:
        """What tokens are worth behind the propagation.

        Args:
            worth: `f32[G, S]`, 0 or more. nodes: `bool[G, S]`, what takes part. keys: `f32[G, S, d]`.
            sources: `i32[]`, how many there are, if there are so many nodes.
        """
        unit = keys * lax.rsqrt(jnp.maximum(jnp.square(keys).sum(-1, keepdims=True), 1e-30))
        # the newer one first where two tie, as everywhere
        order = jnp.argsort(jnp.where(nodes, -worth, jnp.inf)[:, ::-1], axis=-1, stable=True)
        order, near = worth.shape[1] - 1 - order, min(self.neighbours, worth.shape[1])

        def send(i: Array, factor: Array) -> Array:
            source = order[:, i, None]
            own = jnp.take_along_axis(unit, source[..., None], 1)
            edges = jnp.where(nodes.at[jnp.arange(len(nodes)), source[:, 0]].set(False),
                              jnp.einsum("gsd,gqd->gs", unit, own), -jnp.inf)
            least = jax.lax.top_k(edges, near)[0][:, -1:]
            reached = (edges >= least) & jnp.isfinite(edges) & jnp.take_along_axis(nodes, source, 1)
            return jnp.where(reached, factor * (1 - edges), factor)

        factor = lax.fori_loop(0, jnp.minimum(sources, worth.shape[1]), send, jnp.ones_like(worth))
        return jnp.where(nodes, worth * factor ** self.rounds, worth)
