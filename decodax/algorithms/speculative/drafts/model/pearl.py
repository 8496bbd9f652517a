"""PEARL: the draft model writes the next chain while the target verifies the last one ("PEARL: Parallel Speculative
Decoding with Adaptive Draft Length", Liu et al., 2024).

In a round both models read the same text: the verified tokens and the pending drafts after them. The target verifies
the pending drafts (post-verify), and, by its prediction after them, the first token that the draft model writes
meanwhile; without pending drafts it verifies that token alone (pre-verify). If all of them hold, the rest of what was
written is pending in the next round. If one does not, what was written is dropped, and nothing is pending. So the
number of drafts accepted in a row has no bound and adapts to the draft model.

This is `SpecBranch` with one branch that never stops.
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
    """Has the draft model write the next chain while the target verifies the last one.

    It pays with devices of their own for both models, `decodax.apart`.

    Args:
        draft: the draft model. gamma: tokens that it writes in a round.
    """
    return Speculative(SpecBranch(DraftModel(draft), gamma, branches=1, threshold=0.0))
