"""CriticalKV: scores tokens by their attention and by how much their values change the output ("Identify Critical KV
Cache in LLM Inference from an Output Perturbation Perspective", Feng et al., 2025).

The first part of the budget goes to the best tokens by SnapKV's score. The second part goes to the best of the
remaining tokens by this score times the norm of their projected values.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.heads.adakv import AdaptiveHeads, HeadCap
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Selection, Top, best, whole
from decodax.caches.evict.snapkv import Pooling, WindowAttention
from decodax.common.options import Count, Odd, Share
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class TwoStages(Selection):
    """Keeps the best tokens by a score, and the best of the others by that score times the norm of their projected
    values.

    Attributes:
        score: score of the tokens; it should not include norms of values.
        first_stage_ratio: share of the budget for the score alone.
        floor_alpha: None: all heads keep the same number of tokens. A number: the heads of a layer share their budget,
            and each keeps at least this share, as in `AdaptiveHeads`.
        head_cap: see `HeadCap`.
        epsilon: added to the score before it is multiplied by the norm.
    """

    score: TokenScore
    first_stage_ratio: Share = 0.5
    floor_alpha: Share | None = None
    head_cap: HeadCap = None
    epsilon: float = 1e-4

    projects = True

    @property
    def uniform(self) -> bool:      # type: ignore[override]
        return self.floor_alpha is None

    @property
    def _sizes(self) -> Selection:
        """The selection that determines the number of tokens of each head."""
        return Top(self.score) if self.floor_alpha is None else AdaptiveHeads(
            self.score, self.floor_alpha, self.head_cap)

    def slots(self, table: np.ndarray, heads: int) -> int:
        return self._sizes.slots(table, heads)

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        return self._sizes.together(table, heads, layer)

    def choose(self, held: HeldLayer, count: Array) -> Array:
        worth, valid = self.score(held), held.valid
        own: Array = jnp.broadcast_to(count, held.count.shape)
        first = whole(own, self.first_stage_ratio)
        if isinstance(sizes := self._sizes, AdaptiveHeads):
            own = sizes.shared(worth, valid, count).sum(-1)
            first = jnp.maximum(whole(own, self.first_stage_ratio), whole(count, sizes.floor_alpha))
        chosen = best(worth, valid, first)
        return best(jnp.where(chosen, jnp.inf, (worth + self.epsilon) * self._norms(held)), valid, own)

    def _norms(self, held: HeldLayer) -> Array:
        """Returns `|W_o v|_1` for each token, averaged over the heads of a group, `f32[G, S]`."""
        assert held.outputs is not None
        G = held.values.shape[0]
        heads = held.outputs.reshape(G, -1, *held.outputs.shape[1:])
        norm = lambda head: jnp.abs(jnp.einsum("gse,ged->gsd", held.values, head)).sum(-1)      # one head of each group
        return jnp.asarray(sum(norm(heads[:, i]) for i in range(heads.shape[1]))) / heads.shape[1]


@CACHES.register("criticalkv", "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
                 "Feng et al. 2025", family="evict")
def criticalkv(budget: Budget = 1024, window_size: Count = 32, kernel_size: Odd = 7, pooling: Pooling = "max",
               first_stage_ratio: Share = 0.5, floor_alpha: Share | None = None, head_cap: HeadCap = None) -> Eviction:
    """Keeps the tokens that SnapKV chooses, and tokens whose values change the output of attention most.

    Evicts once, after the prompt.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how ("mean" or "max").
        first_stage_ratio: share of the budget that is chosen by SnapKV's scores alone.
        floor_alpha: None: all heads keep the same number of tokens. A number: the heads of a layer share their budget,
            and each keeps at least this share, as in `adakv`.
        head_cap: a head keeps at most this multiple of the budget. None: no bound.
    """
    score = WindowAttention(window_size, kernel_size, pooling)
    return Eviction(TwoStages(score, first_stage_ratio, floor_alpha, head_cap), budget, name="criticalkv")
