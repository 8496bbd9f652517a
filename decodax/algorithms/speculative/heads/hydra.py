"""Hydra: Medusa's heads, each of which also reads the tokens drafted before its own ("Hydra: Sequentially-Dependent
Draft Heads for Medusa Decoding", Ankner et al., 2024), and Hydra++ of the same paper, with a decoder layer before the
heads, deeper heads, and the target's distribution as the only teacher."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.published import MEDUSA_63, within
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("hydra", "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", "Ankner et al. 2024",
                     family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def hydra(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a tree with one head for each of the next tokens, which reads the tokens drafted before.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree; None: Medusa's 63 nodes in 4 levels, or a chain for a drafter with fewer heads.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = trained(lm, draft, "hydra")
    return Speculative(source, verify or SeedExact(), shape or within(MEDUSA_63, source.longest))


@ALGORITHMS.register("hydra-plus-plus", "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (Hydra++)",
                     "Ankner et al. 2024", family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def hydra_plus_plus(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None
                    ) -> Speculative:
    """Drafts a tree as `hydra` does, with heads that read all hidden states of the text through a decoder layer.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree; None: Medusa's 63 nodes in 4 levels, or a chain for a drafter with fewer heads.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = trained(lm, draft, "hydra-plus-plus")
    return Speculative(source, verify or SeedExact(), shape or within(MEDUSA_63, source.longest))
