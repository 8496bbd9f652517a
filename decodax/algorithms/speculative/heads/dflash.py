"""DFlash: block diffusion for flash speculative decoding (Chen, Liang and Liu, 2026).

A small network predicts a block of tokens in one pass. It reads the target's hidden states as keys and values in every
layer, and its slots see each other. Slots are independent given the context: each is drawn by itself, so the product of
their distributions is what a chain was drawn from. The authors' code drafts the likeliest token of each slot at any
temperature; here drafts are drawn as the verifier asks.
"""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dflash", "DFlash: Block Diffusion for Flash Speculative Decoding", "Chen, Liang, Liu 2026",
                     family="speculative-linear", needs="a trained drafter", guarantee="seed-exact")
def dflash(lm: Any, draft: Any = None, length: Count | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a block of tokens in one pass of a trained head that reads the target's hidden states.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of drafts that are verified; None: all that the block predicts. Fewer pay off under load.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = BlockDraft.trained(lm, draft, "dflash")
    return Speculative(source, verify or SeedExact(), Chain(source.within(length)))
