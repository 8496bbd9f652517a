"""Hidden transfer: the target's hidden state at a middle layer is mapped to pseudo hidden states of the next tokens,
which run through the layers above it in the forward pass that verifies ("Parallel Decoding via Hidden Transfer for
Lossless Large Language Model Acceleration", Wu et al., 2024).

Every node of the draft tree has pseudo states of its own; those of the last accepted node give the next round's
guesses. Here they pass the layers below as tokens that nothing sees, which the paper saves. Training: distance to the
target's own distribution, at places of a text (`decodax.train.drafting.prompt_tokens`)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.prompted.source import PromptTokens
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("hidden-transfer", "Parallel Decoding via Hidden Transfer for Lossless Large Language Model "
                     "Acceleration", "Wu et al. 2024", family="speculative-tree", needs="a trained drafter",
                     guarantee="seed-exact")
def hidden_transfer(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None
                    ) -> Speculative:
    """Drafts with the target's upper layers, on hidden states that a middle layer predicts for the next tokens.

    A matrix for each draft is all that is trained. Forward passes are wide: each draft takes its pseudo states along.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree; None: a chain with a draft for each pseudo state.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = PromptTokens.trained(lm, draft, "hidden-transfer")
    return Speculative(source, verify or SeedExact(), shape or Chain(source.longest))
