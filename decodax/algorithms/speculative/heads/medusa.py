"""Medusa: several heads on the target's last hidden state, one for each of the next tokens, and a fixed tree of their
guesses ("Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", Cai et al., 2024).

Head `i` predicts the token `i + 1` places after the newest one from the hidden state of the token before that, whatever
is drafted in between; so the tree's levels are products of guesses. Training: cross-entropy of each head, with the
target frozen (Medusa-1) or trained, too (Medusa-2). `TypicalAcceptance` is the paper's approximate rule."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.published import MEDUSA_63, within
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("medusa", "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
                     "Cai et al. 2024", family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def medusa(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a tree of the guesses of several heads, each of which predicts one of the next tokens.

    One forward pass of the heads drafts a whole tree, so drafting costs least of all methods with a trained drafter;
    later guesses do not know the earlier ones.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, else the heads
            in the target's own directory (Medusa-2).
        shape: shape of the draft tree; None: the authors' 63 nodes in 4 levels, or a chain for a drafter with fewer
            heads.
        verify: the rule that accepts drafts; None: seed-exact. The paper's is `dx.verify.TypicalAcceptance()`.
    """
    source = trained(lm, draft, "medusa")
    return Speculative(source, verify or SeedExact(), shape or within(MEDUSA_63, source.longest))
