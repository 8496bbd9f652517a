"""DFlash2: a block head with local convolutions, whose candidates a selector ranks anew (Z Lab and Inco, 2026).

The selector takes the likeliest tokens of a slot and adds a score of each candidate, of the token before it, and of the
slot's hidden state. All other tokens have no probability in the draft.
"""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dflash2", "DFlash2",
                     "Z Lab, Inco 2026", family="speculative-linear", needs="a trained drafter",
                     guarantee="seed-exact")
def dflash2(lm: Any, draft: Any = None, length: Count | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a block of tokens in one pass, from candidates that a selector ranks by the draft before.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of drafts that are verified; None: all that the block predicts.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = BlockDraft.trained(lm, draft, "dflash2")
    return Speculative(source, verify or SeedExact(), Chain(source.within(length)))
