"""OPT-Tree: drafts the tree with the greatest expected acceptance length ("OPT-Tree: Speculative Decoding with Adaptive
Draft Tree Structure", Wang, Su, Li, Xia, Ye, Duan, Wang, Zhang, 2024).

The expectation is E = the sum over nodes of the product of draft probabilities down to them. Each layer keeps the n
nodes of greatest path probability, the best n of all layers are the tree so far, and the draft goes one layer deeper
while E grows by more than `delta`. The layer whose gain was too small is drafted already, so its nodes still count.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.eagle2 import confidence
from decodax.algorithms.speculative.trees.layers import at_least, grow_layers
from decodax.common.options import Count, Range
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class OptTree(Shape):
    """A tree of the drafts with the greatest expected acceptance. Rows stop growing one by one.

    Children are chosen as in `ConfidenceTree`: likeliest first, deterministic.

    Attributes:
        nodes: number of drafts, `n`.
        delta: least gain of E in one layer that lets a row go deeper; the cost of a draft step, in target forwards, is
            a good value.
        length: most layers.

    Raises:
        ValueError: nodes or length below 1, or a delta below 0.
    """

    nodes: int = 50
    delta: float = 0.5
    length: int = 10

    def __post_init__(self) -> None:
        at_least(nodes=self.nodes, length=self.length)
        if not self.delta >= 0:
            raise ValueError(f"delta: got {self.delta}, takes at least 0")

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        gains = lambda before, after: jnp.exp(after).sum(-1) - jnp.exp(before).sum(-1) > self.delta
        return grow_layers(grower.ranked, state, confidence, jnp.zeros((grower.s.batch, 1)), nodes=self.nodes,
                           depth=self.length, width=self.nodes, fanout=self.nodes, deeper=gains)


@ALGORITHMS.register("opt-tree", "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure",
                     "Wang et al. 2024", family="speculative-tree", needs="a draft model", guarantee="seed-exact")
def opt_tree(draft: Any, nodes: Count = 24, delta: Annotated[float, Range(0)] = 0.5, length: Count = 8) -> Speculative:
    """Drafts the tree with the largest expected number of accepted tokens, and goes deeper while that pays.

    The tree follows the draft model's probabilities round by round; nothing is fitted.

    Args:
        draft: the draft model. nodes: number of drafts.
        delta: least gain of a layer for which a row goes deeper; the cost of a draft step in target forwards.
        length: most layers.
    """
    return Speculative(DraftModel(draft), shape=OptTree(nodes, delta, length))
