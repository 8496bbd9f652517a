"""XPress: a block head with a causal refiner (XPress, 2026).

The refiner changes the logits of a slot by the drafts before, the slot's hidden state and the mean over the block. The
paper resolves a block by six parallel passes over the likeliest tokens. Their fixed point is the walk from draft to
draft that is computed here, which also gives the distribution that a sampled draft was drawn from.
"""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("xpress", "XPress (arXiv 2608.02438)", "2026",
                     family="speculative-linear", needs="a trained drafter", guarantee="seed-exact")
def xpress(lm: Any, draft: Any = None, length: Count | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a block of tokens in one pass, corrected by a refiner that mixes the drafts before.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of drafts that are verified; None: all that the block predicts.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = BlockDraft.trained(lm, draft, "xpress")
    return Speculative(source, verify or SeedExact(), Chain(source.within(length)))
