"""Hydra: Medusa's heads, each of which also reads the tokens drafted before its own ("Hydra: Sequentially-Dependent
Draft Heads for Medusa Decoding", Ankner et al., 2024). Without the prefix layer of Hydra++."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.published import MEDUSA_63
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("hydra", "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", "Ankner et al. 2024",
                     family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def hydra(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a tree with one head for each of the next tokens, which reads the tokens drafted before.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the shipped one.
        shape: shape of the draft tree; None: Medusa's 63 nodes in 4 levels, or a chain for a drafter with fewer heads.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = trained(lm, draft, "hydra")
    heads = source.longest or 4
    return Speculative(source, verify or SeedExact(), shape or (MEDUSA_63 if heads >= 4 else Chain(heads)))
