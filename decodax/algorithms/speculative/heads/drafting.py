"""Chooses the source of drafts for a trained drafter, by its network, or for a draft model."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.heads.block import block_draft
from decodax.algorithms.speculative.heads.cross_kv import cross_kv
from decodax.algorithms.speculative.heads.mixture_of_attentions import mixture
from decodax.algorithms.speculative.heads.ppd import prompt_tokens
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Source
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.mixture import MixtureHead
from decodax.models.drafters.prompt_tokens import PromptTokensHead


def drafting_source(lm: Any, drafter: Any) -> Source:
    """Returns the source that drafts for a target with a trained drafter or a draft model.

    Args:
        lm: the target, a result of `decodax.load`.
        drafter: a `TrainedDrafter`, or a draft model, another result of `decodax.load`.

    Raises:
        ValueError: the drafter does not fit the target.
    """
    if not isinstance(drafter, TrainedDrafter):
        return DraftModel(drafter)
    own = {BlockHead: block_draft, PromptTokensHead: prompt_tokens, CrossKVHead: cross_kv, MixtureHead: mixture}
    make: Any = own.get(type(drafter.head), trained)
    return make(lm, drafter, drafter.system)
