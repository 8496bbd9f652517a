"""EAGLE-3: a decoder layer that reads several of the target's layers and is trained on its own outputs ("EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test", Li et al., 2025).

The outputs of three layers are projected to one state. Attention reads the embedding of the next token and this state
side by side; the output takes the state's place for the next token. Training unrolls the head as in drafting."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("eagle-3", "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time "
                     "Test", "Li et al. 2025", family="speculative-tree", needs="a trained drafter",
                     guarantee="seed-exact")
def eagle3(lm: Any, draft: Any = None, length: Count = 6, nodes: Whole = 60, width: Count = 10,
           shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts the tree of which a head on several of the target's layers is most confident.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of levels.
        nodes: number of drafts to verify; 0: a chain of `length`.
        width: number of nodes expanded in a level, and of children of each.
        shape: another shape of the draft tree.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    tree = shape or (ConfidenceTree(nodes, length, width) if nodes else Chain(length))
    return Speculative(trained(lm, draft, "eagle-3"), verify or SeedExact(), tree)
