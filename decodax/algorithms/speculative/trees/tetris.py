"""TETRIS: all rows of a batch share one budget of draft tokens ("TETRIS: Optimal Draft Token Selection for Batch
Speculative Decoding", Wu et al., 2025).

Every row drafts a chain. Of all drafts in the batch, the `capacity` with the largest probability of being accepted are
verified; this probability is the product of the draft's probabilities down to a token. Products never rise along a
chain, so each row keeps a prefix: easy rows verify many drafts and hard rows few.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Children, Grower, SharesBudget
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.shared_chains import SharedChains
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Tetris(SharedChains, SharesBudget):
    """Chains whose drafts share one budget of the batch (Wu et al., 2025).

    The drafts of a row depend on the other rows of the batch, but its tokens do not. Sampled drafts that are left out
    because of their own probability would not be draws from q. So if a verifier needs q, the drafts are the most likely
    tokens and count as deterministic.

    Attributes:
        capacity: number of verified drafts of the batch in a round.
        length: largest number of drafts of a row.

    Raises:
        ValueError: a number below 1.
    """

    capacity: int
    length: int = 7

    def __post_init__(self) -> None:
        at_least(capacity=self.capacity, length=self.length)

    @property
    def batch_budget(self) -> int:
        return self.capacity

    def log_chance(self, child: Children) -> Array:
        return child.log_p[:, 0, 0]

    def count(self, log_p: Array, rows: Array) -> Array:
        return jnp.asarray(self.capacity, jnp.int32)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        return super().grow(grower.ranked, state)


@ALGORITHMS.register("tetris", "TETRIS: Optimal Draft Token Selection for Batch Speculative Decoding", "Wu et al. 2025",
                     family="batching-scheduling", needs="a draft model", guarantee="seed-exact")
def tetris(draft: Any, capacity: Count = 16, length: Count = 7) -> Speculative:
    """Spends one budget of drafts on the most likely drafts of the batch.

    For batches of easy and hard rows, if the time of a forward pass depends on its number of tokens.

    Args:
        draft: the draft model.
        capacity: number of verified drafts of the batch in a round.
        length: largest number of drafts of a row.
    """
    return Speculative(DraftModel(draft), shape=Tetris(capacity, length), packed=True)
