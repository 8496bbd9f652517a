"""Chooses the source of drafts for a trained drafter, by its network, or for a draft model."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.model.pard import MaskedDrafts, config_of
from decodax.algorithms.speculative.drafts.model.pard2 import aligned
from decodax.algorithms.speculative.heads.assistant import AssistantDraft
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.heads.cross_kv import CrossKVDraft
from decodax.algorithms.speculative.heads.falcon import SemiAutoregressive
from decodax.algorithms.speculative.heads.mixture_of_attentions import MixtureDraft
from decodax.algorithms.speculative.heads.p_eagle import ParallelDraft
from decodax.algorithms.speculative.heads.prompted.pass_ import LookAheadEmbeddings
from decodax.algorithms.speculative.heads.prompted.source import PromptTokens
from decodax.algorithms.speculative.heads.source import HeadSource, TrainedHead
from decodax.algorithms.speculative.source import Source
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.hamburger import HamburgerHead
from decodax.models.drafters.units import UnitHead

SOURCES: tuple[type[HeadSource], ...] = (
    BlockDraft, LookAheadEmbeddings, PromptTokens, SemiAutoregressive, MixtureDraft, CrossKVDraft, ParallelDraft,
    AssistantDraft)
"""Sources with a head of their own, the special ones first; all other heads are those of a `TrainedHead`."""


def drafting_source(lm: Any, drafter: Any) -> Source:
    """Returns the source that drafts for a target with a trained drafter or a draft model.

    Args:
        lm: the target, a result of `decodax.load`.
        drafter: a `TrainedDrafter`, or a draft model, another result of `decodax.load`. One that was tuned for PARD
            or PARD-2 drafts at masks.

    Raises:
        ValueError: the drafter does not fit the target, or is none for speculation.
    """
    if not isinstance(drafter, TrainedDrafter):
        config = config_of(drafter)
        if "pard2_target_layers" in config:
            return aligned(drafter)
        return MaskedDrafts(drafter, mask=config["pard_token"]) if "pard_token" in config else DraftModel(drafter)
    only = {UnitHead: "predicts units of several tokens; only 'mumo'", HamburgerHead: (
        "writes the groups of tokens that its model reads; only 'hamburger'")}.get(type(drafter.head))
    if only is not None:
        raise ValueError(f"draft: got {drafter.name!r}, which {only} takes it")
    kind: type[HeadSource] = next((kind for kind in SOURCES if isinstance(drafter.head, kind.takes[0])), TrainedHead)
    return kind.trained(lm, drafter, drafter.system)
