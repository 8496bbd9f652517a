"""GliDe: a one-layer drafter that attends to the keys and values of the target's last layer ("GliDe with a CaPE: A
Low-Hassle Method to Accelerate Speculative Decoding", Du et al., 2024).

After its self-attention, without a norm between, the drafter reads the target's cache. In training, a query sees the
target's keys of earlier blocks of five tokens alone, as the keys of the newest tokens are missing when it drafts. Here
it shares the target's embeddings and vocabulary matrix, of which the authors' code trains its own."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.cross_kv import CrossKVDraft
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("glide", "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding",
                     "Du et al. 2024", family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def glide(lm: Any, draft: Any = None, length: Count = 5, shape: Shape | None = None,
          verify: Verifier | None = None) -> Speculative:
    """Drafts with one decoder layer that attends to the target's cache.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of drafts in a chain.
        shape: another shape of the draft tree, such as the paper's `decodax.trees.CaPE`.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    return Speculative(CrossKVDraft.trained(lm, draft, "glide"), verify or SeedExact(), shape or Chain(length))
