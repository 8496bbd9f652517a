"""OPT-Tree: drafts the tree with the largest expected acceptance length ("OPT-Tree: Speculative Decoding with Adaptive
Draft Tree Structure", Wang, Su, Li, Xia, Ye, Duan, Wang, Zhang, 2024).

The expectation E is the sum over nodes of the product of draft probabilities down to them. Each layer keeps the n nodes
with the largest path probability, and the best n of all layers are the tree so far. The draft goes one layer deeper as
long as E grows by more than `delta`. The nodes of the last layer, whose gain was too small, are kept, too, since they
have been drafted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.eagle2 import confidence
from decodax.algorithms.speculative.trees.layers import at_least, grow_layers
from decodax.common.options import Count, NonNegative
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class OptTree(Shape):
    """A tree of the drafts with the largest expected number of accepted tokens `E` (Wang et al., 2024). Each row stops
    growing by itself.

    Children are the most likely tokens, as in `ConfidenceTree`, and count as deterministic drafts.

    Attributes:
        nodes: number of drafts, `n`.
        delta: smallest gain of `E` by a layer for which a row grows another layer; a good value is the cost of a draft
            step, in forward passes of the target.
        length: largest number of layers.

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

    @property
    def least_nodes(self) -> int:
        return self.nodes

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        gains = lambda before, after: jnp.exp(after).sum(-1) - jnp.exp(before).sum(-1) > self.delta
        return grow_layers(grower.ranked, state, confidence, jnp.zeros((grower.s.batch, 1)), nodes=self.nodes,
                           depth=self.length, width=self.nodes, fanout=self.nodes, deeper=gains)


@ALGORITHMS.register("opt-tree", "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure",
                     "Wang et al. 2024", family="speculative-tree", needs="a draft model", guarantee="seed-exact")
def opt_tree(draft: Any, nodes: Count = 24, delta: NonNegative = 0.5, length: Count = 8) -> Speculative:
    """Drafts the tree with the largest expected number of accepted tokens, and goes deeper as long as that pays.

    The tree follows the draft model's probabilities in each round; nothing has to be fitted.

    Args:
        draft: the draft model.
        nodes: number of drafts.
        delta: smallest gain in expected tokens by a layer for which a row grows another layer; a good value is the cost
            of a draft step, in forward passes of the target.
        length: largest number of layers.
    """
    return Speculative(DraftModel(draft), shape=OptTree(nodes, delta, length))
