"""DySpec: grows a tree greedily by the value of each further draw ("DySpec: Faster Speculative Decoding with Dynamic
Token Tree Structure", Xiong, Zhang, Li, Wu, Zou, 2024).

The value of drawing one more child at a node is the product of the draft probabilities down to the node, times the
probability that the children drawn there before leave in its distribution. If the target were equal to the draft, this
is the probability that verification reaches the new child. The paper's heap takes the best such draw and adds two new
ones: the child's first child and its next sibling. Values fall along both, so its tree has the best N draws of all.
Here these are found layer by layer, in `length` instead of N steps of the draft; the result is that of the heap if no
layer needs more than `width` expanded nodes. `threshold` is the paper's second variant: all draws of at least this
value, however many steps they take.

The value of a draw does not depend on its outcome, so every child is a true draw without replacement from q given the
earlier ones, and `MultiRound()` keeps the target's distribution.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Children, Grower, Growth, Shape, distinct
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.algorithms.speculative.trees.layers import at_least, drawn_from, grow_layers, left_before
from decodax.algorithms.speculative.verify.mcsd import MultiRound
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class DySpec(Shape):
    """A tree that grows by the most valuable draws (Xiong et al., 2024). For `SeedExact` and `MultiRound()`.

    The value of a draw is the probability that verification would reach it if the target were equal to the draft.

    Attributes:
        nodes: largest number of drafts.
        length: largest number of layers.
        fanout: largest number of children of a node.
        width: largest number of nodes expanded in a layer, the most valuable ones; None: no limit.
        threshold: draws of a smaller value are not made; 0: no threshold.

    Raises:
        ValueError: a number below 1, a threshold outside [0, 1), or, when the tree grows, a verifier that needs
            siblings drawn with replacement.
    """

    nodes: int = 32
    length: int = 8
    fanout: int = 8
    width: int | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        at_least(nodes=self.nodes, length=self.length, fanout=self.fanout, width=self.width or 1)
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold: got {self.threshold}, takes 0 <= threshold < 1")

    def check_drawn(self, drawn: Drawn) -> None:
        distinct(self, drawn)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        self.check_drawn(grower.drawn)
        least = math.log(self.threshold) if self.threshold else -math.inf

        def worth(g: Growth, slots: Array, children: Children, path: Array) -> tuple[Array, Array]:
            log_q = drawn_from(children)
            value = path[..., None] + left_before(log_q)
            return jnp.where(value >= least, value, -jnp.inf), path[..., None] + log_q

        return grow_layers(grower, state, worth, jnp.zeros((grower.s.batch, 1)), nodes=self.nodes, depth=self.length,
                           width=self.width or self.nodes, fanout=self.fanout)


@ALGORITHMS.register("dyspec", "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure",
                     "Xiong et al. 2024", family="speculative-tree", needs="a draft model",
                     guarantee="distribution-exact")
def dyspec(draft: Any, nodes: Count = 16, length: Count = 6, width: Count | None = 8) -> Speculative:
    """Drafts a tree that grows by the draws that are most likely to be reached in verification.

    For sampled texts: children are true draws, and the tree still follows the draft model's confidence.

    Args:
        draft: the draft model.
        nodes: number of drafts.
        length: largest number of layers.
        width: largest number of nodes expanded in a layer; None: no limit.
    """
    return Speculative(DraftModel(draft), MultiRound(), DySpec(nodes, length, width=width))
