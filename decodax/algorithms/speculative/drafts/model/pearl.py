"""PEARL: the draft model makes the next chain while the target verifies the last one ("PEARL: Parallel Speculative
Decoding with Adaptive Draft Length", Liu et al., 2024).

In a round both models process the same text: the verified tokens and the pending drafts after them. The target verifies
the pending drafts (post-verify) and, by its prediction after them, the first token that the draft model makes in the
same round; without pending drafts it verifies that token alone (pre-verify). If all of them are accepted, the rest of
the new chain is pending in the next round. If one is rejected, the new chain is dropped, and nothing is pending. So the
number of consecutive accepted drafts has no limit and adapts to the draft model.

This is `SpecBranch` with one branch and no confidence threshold.
"""

from __future__ import annotations

from typing import Annotated, Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.model.specbranch import SpecBranch
from decodax.common.options import Range
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("pearl", "PEARL: Parallel Speculative Decoding with Adaptive Draft Length", "Liu et al. 2024",
                     family="speculative-linear", needs="a draft model", guarantee="seed-exact")
def pearl(draft: Any, gamma: Annotated[int, Range(2)] = 4) -> Speculative:
    """Makes the next chain with the draft model while the target verifies the last one.

    It pays if each model has devices of its own; see `decodax.algorithms.speculative.apart`.

    Args:
        draft: the draft model.
        gamma: number of tokens that the draft model makes in a round.
    """
    return Speculative(SpecBranch(DraftModel(draft), gamma, branches=1, threshold=0.0))
