"""Clover: one state that takes in the drafted tokens one by one ("Clover: Regressive Lightweight Speculative Decoding
with Sequential Knowledge", Xiao et al., 2024), and its successor ("Clover-2: Accurate Inference for Regressive
Lightweight Speculative Decoding", Xiao, Gui, Su and Chen, 2024).

A decoder layer adapts the target's hidden states to drafting. Each draft is then one step without attention to the
text. Training: cross-entropy of the two distributions at each draft, for Clover-2 also the distance of the hidden state
before the vocabulary matrix to the target's."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.published import EAGLE_25, within
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS

SYSTEMS = ("clover", "clover-2")


@ALGORITHMS.register("clover", "Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge",
                     "Xiao et al. 2024", family="speculative-tree", needs="a trained drafter", drafters=SYSTEMS,
                     guarantee="seed-exact")
def clover(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a tree with a recurrent state, which starts as the output of a decoder layer over the target's states.

    Args:
        lm: the target.
        draft: a drafter of "clover" or "clover-2" from `decodax.load_drafter`; None: the one shipped for the
            target, if any.
        shape: shape of the draft tree; None: EAGLE's 25 nodes in 5 levels, as in the code of Clover-2, or a chain for a
            drafter of fewer tokens.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = trained(lm, draft, *SYSTEMS)
    return Speculative(source, verify or SeedExact(), shape or within(EAGLE_25, source.longest))


ALGORITHMS.alias("clover-2", "clover", "Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding",
                 "Xiao et al. 2024", "The newest token enters before the decoder layer, and the output reads the "
                 "drafted token.", family="speculative-tree")
