"""EAGLE-2's dynamic trees: keeps the drafts of which the draft model is most confident ("EAGLE-2: Faster Inference of
Language Models with Dynamic Draft Trees", Li, Wei, Zhang, Zhang, 2024).

A node's value is the product of draft probabilities down to it. Each layer asks what follows its `width` most valuable
nodes, each giving `width` candidates; then all candidates of all layers are ranked again and the best `nodes` are
verified. Of equal values the shallower comes first, then the more valuable parent's and the likelier sibling, so what
is kept is always a tree.
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
    """A tree of the most confident drafts. The paper takes 60 drafts, 6 deep, for a 7B target.

    Children are the likeliest at temperature 1 and never draws: a draw that is kept for its own probability is no draw
    from q. Verifiers see deterministic drafts, and every one of them keeps its guarantee. Where a row samples under
    `SeedExact` the noise of the target's draw is known, and each token's share of the race takes the place of its
    probability.

    Attributes:
        nodes: drafts to verify. length: layers; the source is asked `length - 1` times after the newest token.
        width: nodes expanded in a layer, and children of each.
    """

    nodes: int = 60
    length: int = 6
    width: int = 10

    def __post_init__(self) -> None:
        at_least(nodes=self.nodes, length=self.length, width=self.width)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        return grow_layers(grower.ranked, state, confidence, jnp.zeros((grower.s.batch, 1)), nodes=self.nodes,
                           depth=self.length, width=self.width, fanout=self.width)


def confidence(g: Growth, slots: Array, children: Children, path: Array) -> tuple[Array, Array]:
    """Ranks children by the log-probabilities of their paths, and hands these on."""
    value = path[..., None] + children.log_p
    return value, value


@ALGORITHMS.register("confidence-tree",
                     "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (its tree)",
                     "Li et al. 2024", family="speculative-tree", needs="a draft model", guarantee="seed-exact")
def confidence_tree(draft: Any, nodes: Count = 24, length: Count = 5, width: Count = 6) -> Speculative:
    """Drafts the likeliest nodes of each layer, ranked again over all layers (EAGLE-2's tree with a draft model).

    The common choice of a tree for greedy decoding; the paper grows it with a trained head.

    Args:
        draft: the draft model. nodes: drafts to verify. length: layers.
        width: nodes expanded in a layer, and children of each.
    """
    return Speculative(DraftModel(draft), shape=ConfidenceTree(nodes, length, width))
