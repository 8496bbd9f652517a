"""The MLP speculator: a small recurrent network on the target's last hidden state and the drafted tokens ("Accelerating
Production LLMs with Combined Token/Embedding Speculators", Wertheimer et al., 2024)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("mlp-speculator", "Accelerating Production LLMs with Combined Token/Embedding Speculators",
                     "Wertheimer et al. 2024", family="speculative-linear", needs="a trained drafter",
                     guarantee="seed-exact")
def mlp_speculator(lm: Any, draft: Any = None, shape: Shape | None = None,
                   verify: Verifier | None = None) -> Speculative:
    """Drafts with a recurrent network without attention, from the target's last hidden state and the drafted tokens.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree; None: a chain of as many tokens as the drafter predicts.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = trained(lm, draft, "mlp-speculator")
    return Speculative(source, verify or SeedExact(), shape or Chain(source.longest or 3))
