"""PromptDistill: all layers keep the tokens that the newest query of one layer attends to ("PromptDistill: Query-based
Selective Token Retention in Intermediate Layers for Efficient Large Language Model Inference", Jin et al., 2025).

Layers up to the chosen one run on the whole prompt, later ones only on the tokens with the highest scores and the
newest token. In the end the first layers keep the same tokens, too.

The kept tokens are those of the authors' rule (472bfef). The model has to be one of this library's transformers. A
drafter that reads hidden states gets those of the layer where the prompt is cut.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Top
from decodax.caches.evict.snapkv import pooled
from decodax.caches.prefill.propagation import Propagation
from decodax.common.options import Count, Odd, Whole
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@dataclasses.dataclass(frozen=True)
class NewestScores(TokenScore):
    """Scores a token by the product of its key with the newest query, without a softmax, averaged over all heads and
    pooled over neighbours. The newest token is always kept (PromptDistill).

    Attributes:
        kernel_size: number of neighbouring tokens that are pooled, odd.
    """

    kernel_size: Odd = 5

    @property
    def latest(self) -> int:
        return 1

    @property
    def always(self) -> int:
        return 1

    def __call__(self, held: HeldLayer) -> Array:
        G, _, d = held.keys.shape
        early = held.index < held.count[:, None] - 1
        scores = jnp.einsum("grd,gsd->gs", held.queries[0].reshape(G, -1, d), held.keys).sum(0) / held.queries.shape[1]
        worth = pooled(jnp.where(early, scores, 0), self.kernel_size, "mean")
        return jnp.where(early, worth, jnp.inf)


@CACHES.register("promptdistill", "PromptDistill: Query-based Selective Token Retention in Intermediate Layers for "
                 "Efficient Large Language Model Inference", "Jin et al. 2025", family="prefill")
def promptdistill(budget: Count = 1024, layer: Whole | None = None, kernel_size: Odd = 5) -> CacheConfig:
    """Keeps the prompt tokens that the newest query of one layer attends to; later layers run on these only.

    It saves memory, and prefill time for long prompts. It needs a `decodax.models.Transformer`. Example:
    `cache="promptdistill:budget=512"`.

    Args:
        budget: number of tokens of a prompt that are kept beside its newest one.
        layer: the layer that chooses, and the last one that runs on the whole prompt, from 0. None: `depth * 14 / 32 -
            1`, rounded down, for a model of `depth` layers, as in the authors' experiments.
        kernel_size: number of neighbouring tokens whose scores are pooled, odd.
    """
    if not isinstance(budget, int):
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens")
    chooser = NewestScores(kernel_size)
    return Propagation(Eviction(Top(chooser), budget + 1, name="promptdistill"), chooser, budget + 1, layer, 14 / 32,
                       same=True)
