"""EAGLE-2's dynamic trees (Li, Wei, Zhang, Zhang 2024): drafts where the draft is confident.

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

from decodax.algorithms.speculative.source import Children, Grower, Growth, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least, grow_layers


@dataclasses.dataclass(frozen=True)
class ConfidenceTree(Shape):
    """The `nodes` most confident drafts, at most `length` deep; the paper's are 60, 6 deep, for a 7B target.

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
    """Log-probabilities of paths, ranked by and handed on."""
    value = path[..., None] + children.log_p
    return value, value
