"""Chimera: the target's hidden states of the text, and trigrams for the tokens that it has not processed ("Chimera: A
Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all Tokens", Zeng et al., 2024).

The trigram encoder takes the place of the target's lower layers, and one decoder layer over all hidden states that of
its upper ones. Training: the distance of its output to the target's hidden state, and cross-entropy of each draft."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.published import EAGLE_25, within
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("chimera", "Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference "
                     "by Fusing all Tokens", "Zeng et al. 2024", family="speculative-tree", needs="a trained drafter",
                     guarantee="seed-exact")
def chimera(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a tree with a layer that reads trigrams of tokens and all of the target's hidden states.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree; None: EAGLE's 25 nodes in 5 levels, as in the authors' code, or a chain for a
            drafter of fewer tokens.
        verify: the rule that accepts drafts; None: seed-exact. The paper's other one is
            `dx.verify.TypicalAcceptance()`.
    """
    source = trained(lm, draft, "chimera")
    return Speculative(source, verify or SeedExact(), shape or within(EAGLE_25, source.longest))
