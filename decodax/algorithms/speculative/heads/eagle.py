"""EAGLE: a decoder layer that continues the target's hidden states ("EAGLE: Speculative Sampling Requires Rethinking
Feature Uncertainty", Li et al., 2024), and EAGLE-2's dynamic tree on the same weights ("EAGLE-2: Faster Inference of
Language Models with Dynamic Draft Trees", Li et al., 2024).

The layer reads the hidden state of a position and the embedding of the token after it, and predicts the next hidden
state, to which the target's own head is applied. Training: smooth L1 distance to the target's states, and 0.1 times the
cross-entropy of the two distributions. HASS (Zhang et al., 2024) trains the same network on its own states."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.trees.published import EAGLE_25
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS

SYSTEMS = ("eagle", "hass")


@ALGORITHMS.register("eagle", "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", "Li et al. 2024",
                     family="speculative-tree", needs="a trained drafter", drafters=SYSTEMS, guarantee="seed-exact")
def eagle(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a fixed tree with a decoder layer that predicts the target's next hidden states.

    Args:
        lm: the target.
        draft: a drafter of "eagle" or "hass" from `decodax.load_drafter`; None: the shipped one.
        shape: shape of the draft tree; None: the authors' 25 nodes in 5 levels.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    return Speculative(trained(lm, draft, *SYSTEMS), verify or SeedExact(), shape or EAGLE_25)


@ALGORITHMS.register("eagle-2", "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees",
                     "Li et al. 2024", family="speculative-tree", needs="a trained drafter", drafters=SYSTEMS,
                     guarantee="seed-exact")
def eagle2(lm: Any, draft: Any = None, nodes: Count = 60, length: Count = 6, width: Count = 10,
           verify: Verifier | None = None) -> Speculative:
    """Drafts the tree of which EAGLE's head is most confident.

    Args:
        lm: the target.
        draft: a drafter of "eagle" or "hass" from `decodax.load_drafter`; None: the shipped one.
        nodes: number of drafts to verify.
        length: number of levels.
        width: number of nodes expanded in a level, and of children of each.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    return Speculative(trained(lm, draft, *SYSTEMS), verify or SeedExact(), ConfidenceTree(nodes, length, width))
