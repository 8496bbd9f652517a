"""EMS-SD: rows of a batch with different numbers of drafts, concatenated without padding ("EMS-SD: Efficient
Multi-sample Speculative Decoding for Accelerating Large Language Models", Ni et al., 2024). `Speculative(packed=True)`
does this for any draft; the packing is in `decodax.core.packing`."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.text.prompt_lookup import PromptLookup
from decodax.algorithms.speculative.trees.confidence_threshold import ConfidenceChain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("ems-sd",
                     "EMS-SD: Efficient Multi-sample Speculative Decoding for Accelerating Large Language Models",
                     "Ni et al. 2024", family="batching-scheduling", guarantee="seed-exact")
def ems_sd(draft: Any = None, length: Count = 8, verify: Verifier = SeedExact()) -> Speculative:
    """In dense layers, concatenates the tokens of all rows without padding, for rows with different numbers of drafts.

    For batches in which many rows draft little: the cost of the forward pass depends on the number of drafts, not on
    the longest row.

    Args:
        draft: a draft model, whose chains end at an uncertain token; None: prompt lookup.
        length: largest number of drafts of a row.
        verify: the rule that accepts drafts.
    """
    if draft is None:
        return Speculative(PromptLookup(length), verify, packed=True)
    return Speculative(DraftModel(draft), verify, ConfidenceChain(length), packed=True)
