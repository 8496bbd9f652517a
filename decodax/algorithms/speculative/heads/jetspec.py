"""JetSpec: a causal block head whose one pass gives a whole draft tree (Hu et al., 2026).

Each slot of the block sees the slots before it only. The pass gives a table of probabilities by depth and token, and
the tree has the nodes with the largest products of probabilities along their path. So a wide tree costs no further pass
of the head, and one forward of the target verifies it.
"""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS

SYSTEMS = ("jetspec", "dflash")


@ALGORITHMS.register("jetspec", "JetSpec (arXiv 2606.18394)", "Hu et al. 2026",
                     family="speculative-tree", needs="a trained drafter", drafters=SYSTEMS, guarantee="seed-exact")
def jetspec(lm: Any, draft: Any = None, nodes: Count = 64, length: Count | None = None, width: Count = 7,
            verify: Verifier | None = None) -> Speculative:
    """Drafts a tree of the most likely paths from one pass of a trained block head.

    Made for causal heads. A tree of a head whose slots see each other works, too, and scores branches that the head
    cannot tell apart.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        nodes: number of drafts to verify; the paper takes 128 to 256 on an H100.
        length: largest number of drafts on a path; None: all that the block predicts.
        width: number of nodes expanded in a layer, and of children of each.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = BlockDraft.trained(lm, draft, *SYSTEMS)
    return Speculative(source, verify or SeedExact(), ConfidenceTree(nodes, source.within(length), width))
