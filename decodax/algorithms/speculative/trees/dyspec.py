"""DySpec: grows a tree greedily by the value that a draw has before it is made ("DySpec: Faster Speculative Decoding
with Dynamic Token Tree Structure", Xiong, Zhang, Li, Wu, Zou, 2024).

Drawing one more child at a node is worth the product of draft probabilities down to the node times what the children
drawn there before leave of its distribution: that is the chance, if the target were the draft, that verification gets
to the new child. The paper's heap pops the best such draw, makes it, and pushes two: the child's first child and the
child's next sibling. Values fall along both, so its tree is the best N draws of all; here they are found layer by
layer, in `length` steps of the draft and not N, and are the heap's own as long as no layer needs more than `width`
expanded nodes. `threshold` is the paper's second variant: only draws worth that much, however many steps they take.

A draw's worth does not depend on its outcome, so every child is a true draw without replacement from q given what was
drawn before it, and `MultiRound()` keeps the target's distribution.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Children, Grower, Growth, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least, drawn_from, grow_layers, left_before
from decodax.algorithms.speculative.verify.mcsd import MultiRound
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class DySpec(Shape):
    """A tree that grows where the next draw is worth most. For `SeedExact` and `MultiRound()`.

    Attributes:
        nodes: most drafts. length: most layers. fanout: most children of a node.
        width: most nodes expanded in a layer, the most valuable ones; None: no bound.
        threshold: draws worth less are not made; 0 spends the whole budget.

    Raises:
        ValueError: a number below 1, a threshold outside [0, 1), or, when it grows, a verifier that wants siblings
            drawn with replacement.
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

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        grower.distinct(self)
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
    """Drafts a tree that grows greedily where the next draw is worth most.

    For sampled texts: children are true draws, and the tree still follows the draft model's confidence.

    Args:
        draft: the draft model. nodes: number of drafts. length: most layers.
        width: most nodes expanded in a layer; None: no bound.
    """
    return Speculative(DraftModel(draft), MultiRound(), DySpec(nodes, length, width=width))
