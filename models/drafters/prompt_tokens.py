"""Trained prompt tokens: a few embeddings by which the target itself predicts several tokens at once (PPD, Chen et al.,
2024; PaSS, Monea et al., 2023).

The target does not change. Prompt tokens stand after a token of the text; the target's hidden state at the `j`-th of
them predicts the token `j + 2` places after that token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from decodax.models.drafters.head import Depth, Weights
from decodax.models.drafters.stack import IndependentHeads
from decodax.models.layers import weight


@dataclasses.dataclass(frozen=True)
class PromptTokensHead(IndependentHeads):
    """The embeddings of prompt tokens. Its hidden states are the target's, so it has no network of its own.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        width: width `D` of the target.
        heads: number of prompt tokens `K`, the largest number of drafts on a path.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=3, kw_only=True)

    @property
    def own_head(self) -> bool:
        """False: the vocabulary matrix is the target's."""
        return False

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        module.prompts = weight(rngs, (self.heads, self.width), (None, "embed"), 0.02)
        return module

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return head(hidden)


__all__ = ["PromptTokensHead"]
