"""LongSpec: a drafter of constant memory that attends to the target's cache ("LongSpec: Long-Context Lossless
Speculative Decoding with Efficient Drafting and Verification", Yang et al., 2025).

One decoder layer has self-attention with a sliding window, so its own cache does not grow with the text, and then reads
the keys and values of the target's last layer. Training shows it long positions by short texts, whose tokens after the
first few are moved far back. The authors keep the 4, then 16, 16, 16 and 16 likeliest nodes of the levels of a tree;
here it is the likeliest nodes of all levels, as in EAGLE-2. Their attention to the prefix without a mask, merged with
that to the tree, is how every window attends here."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.cross_kv import CrossKVDraft
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("longspec", "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and "
                     "Verification", "Yang et al. 2025", family="speculative-tree", needs="a trained drafter",
                     guarantee="seed-exact")
def longspec(lm: Any, draft: Any = None, length: Count = 5, nodes: Whole = 68, width: Count = 16,
             shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts the likeliest tree of one decoder layer with a sliding window, which attends to the target's cache.

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
    return Speculative(CrossKVDraft.trained(lm, draft, "longspec"), verify or SeedExact(), tree)
