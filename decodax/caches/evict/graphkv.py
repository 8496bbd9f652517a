"""GraphKV: lowers the scores of tokens that are similar to better ones ("GraphKV: Breaking the Static Selection
Paradigm with Graph-Based KV Cache Eviction", Li et al., 2025).

The best tokens by a score are often similar, and a few of them would be enough. So the best tokens of a head, the
sources, lower the scores of the tokens whose keys are nearest to theirs, in proportion to the similarity. Then the best
tokens are chosen.

The authors' repository (21a850b) does not contain the rule. The number of neighbours, which the paper leaves open, is
an option; tokens of the window are not part of the graph.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Every, Selection, best, whole
from decodax.caches.evict.snapkv import Pooling, WindowAttention
from decodax.common.options import Count, Odd, Range, Whole
from decodax.common.registry import CACHES

Sources = Annotated[float, Range(0, 1, above=True)]


@dataclasses.dataclass(frozen=True)
class GraphDecay(Selection):
    """Keeps the best tokens of each head, by scores that have decayed along a graph of similar keys.

    With `e_ij` the cosine of the keys of source `i` and another token `j`, each source decays the scores of its nearest
    tokens: in each round, `s_j` is multiplied by the product of `1 - e_ij` over the sources that have `j` among their
    nearest. Tokens that are always kept are not part of the graph.

    Attributes:
        score: score of the tokens.
        sources: number of sources, as a share of the number of kept tokens; at least one. The best tokens are the
            sources.
        neighbours: number of tokens that a source decays.
        rounds: number of rounds of the decay.
    """

    score: TokenScore
    sources: Sources = 0.3
    neighbours: Count = 4
    rounds: Whole = 1

    def choose(self, held: HeldLayer, count: Array) -> Array:
        worth = self.score(held)
        nodes = held.valid & jnp.isfinite(worth)
        left = self.decayed(worth, nodes, held.keys, jnp.maximum(whole(count, self.sources), 1))
        return best(left, held.valid, count)

    def decayed(self, worth: Array, nodes: Array, keys: Array, sources: Array) -> Array:
        """Returns the scores after all rounds of the decay.

        Args:
            worth: `f32[G, S]`, scores, at least 0.
            nodes: `bool[G, S]`, slots that are in the graph.
            keys: `f32[G, S, d]`.
            sources: `i32[]`, number of sources; at most the number of nodes is used.
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


@CACHES.register("graphkv", "GraphKV: Breaking the Static Selection Paradigm with Graph-Based KV Cache Eviction",
                 "Li et al. 2025", family="evict")
def graphkv(budget: Budget = 512, every: Every = None, sources: Sources = 0.3, neighbours: Count = 4,
            rounds: Whole = 1, window_size: Count = 32, kernel_size: Odd = 5, pooling: Pooling = "mean") -> Eviction:
    """Keeps the best tokens by SnapKV's scores, which are lowered for tokens whose keys are similar to those of better
    ones.

    With `rounds=0` it is SnapKV. The paper does not give the number of neighbours.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        sources: number of best tokens that lower the scores of others, as a share of the number of kept tokens.
        neighbours: number of tokens whose scores such a token lowers.
        rounds: number of rounds in which scores are lowered.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how ("mean" or "max").
    """
    score = WindowAttention(window_size, kernel_size, pooling)
    return Eviction(GraphDecay(score, sources, neighbours, rounds), budget, every, name="graphkv")
