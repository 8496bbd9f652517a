"""EAGLE-2's dynamic trees: keeps the drafts of which the draft model is most confident ("EAGLE-2: Faster Inference of
Language Models with Dynamic Draft Trees", Li, Wei, Zhang, Zhang, 2024).

A node's value is the product of the draft probabilities down to it. In each layer the `width` most valuable nodes are
expanded by `width` candidates each. Then all candidates of all layers are ranked, and the best `nodes` are verified. Of
equal values the shallower node ranks first, then the one with the more valuable parent, then the more likely sibling,
so the kept nodes are always a tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Children, Grower, Growth, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least, grow_layers
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class ConfidenceTree(Shape):
    """A tree of the most confident drafts (EAGLE-2). For a 7B target the paper takes 60 drafts in 6 layers.

    Children are the most likely tokens at temperature 1 and never draws, since a draw that is kept because of its own
    probability is no draw from q. Verifiers treat them as deterministic drafts and keep their guarantee. For a sampling
    row under `SeedExact` the noise of the target's draw is known; each token's share of the race with this noise then
    takes the place of its probability.

    Attributes:
        nodes: number of drafts to verify.
        length: number of layers; a draft takes `length - 1` steps of the source after the newest token.
        width: number of nodes expanded in a layer, and of children of each.
    """

    nodes: int = 60
    length: int = 6
    width: int = 10

    def __post_init__(self) -> None:
        at_least(nodes=self.nodes, length=self.length, width=self.width)

    @property
    def least_nodes(self) -> int:
        return min(self.nodes, self.width * self.width * self.length)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        return grow_layers(grower.ranked, state, confidence, jnp.zeros((grower.s.batch, 1)), nodes=self.nodes,
                           depth=self.length, width=self.width, fanout=self.width)


def confidence(g: Growth, slots: Array, children: Children, path: Array) -> tuple[Array, Array]:
    """Ranks candidate tree nodes by the log-probability of their path, the sum of those of its tokens (a `Rank` for
    `grow_layers`). Returns the ranks `f32[B, w, R]`, twice, since a child's rank is what its own children build on."""
    value = path[..., None] + children.log_p
    return value, value


@ALGORITHMS.register("confidence-tree",
                     "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (its tree)",
                     "Li et al. 2024", family="speculative-tree", needs="a draft model", guarantee="seed-exact")
def confidence_tree(draft: Any, nodes: Count = 24, length: Count = 5, width: Count = 6) -> Speculative:
    """Drafts the most likely nodes of each layer, then keeps the best of all layers (EAGLE-2's tree with a draft
    model).

    The usual tree for greedy decoding; the paper grows it with a trained head.

    Args:
        draft: the draft model.
        nodes: number of drafts to verify.
        length: number of layers.
        width: number of nodes expanded in a layer, and of children of each.
    """
    return Speculative(DraftModel(draft), shape=ConfidenceTree(nodes, length, width))
