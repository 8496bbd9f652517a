"""Domino: a block head whose logits a recurrent network corrects from draft to draft (Huang et al., 2026).

A GRU reads the embeddings of the drafts before, and a low-rank layer turns its state and the slot's hidden state into a
change of the slot's logits. The first drafts of a block may stay as they are (`PrefixGRU.first`).
"""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("domino", "Domino (arXiv 2605.29707)", "Huang et al. 2026",
                     family="speculative-linear", needs="a trained drafter", guarantee="seed-exact")
def domino(lm: Any, draft: Any = None, length: Count | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a block of tokens in one pass, corrected by a recurrent network over the drafts before.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of drafts that are verified; None: all that the block predicts.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = BlockDraft.trained(lm, draft, "domino")
    return Speculative(source, verify or SeedExact(), Chain(source.within(length)))
