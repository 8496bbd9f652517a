"""Chooses the source of drafts for a trained drafter, by its network, or for a draft model."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.model.pard import MaskedDrafts, config_of
from decodax.algorithms.speculative.drafts.model.pard2 import aligned
from decodax.algorithms.speculative.heads.assistant import next_tokens
from decodax.algorithms.speculative.heads.block import block_draft
from decodax.algorithms.speculative.heads.cross_kv import cross_kv
from decodax.algorithms.speculative.heads.falcon import semi_autoregressive
from decodax.algorithms.speculative.heads.mixture_of_attentions import mixture
from decodax.algorithms.speculative.heads.p_eagle import parallel
from decodax.algorithms.speculative.heads.prompted.pass_ import look_ahead
from decodax.algorithms.speculative.heads.prompted.source import prompt_tokens
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Source
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.assistant import AssistantHead
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.falcon import FalconHead
from decodax.models.drafters.hamburger import HamburgerHead
from decodax.models.drafters.mixture import MixtureHead
from decodax.models.drafters.parallel import ParallelHead
from decodax.models.drafters.prompt_tokens import LookAheadHead, ProbesHead
from decodax.models.drafters.units import UnitHead


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
    special = ((BlockHead, block_draft), (LookAheadHead, look_ahead), (ProbesHead, prompt_tokens),
               (FalconHead, semi_autoregressive), (MixtureHead, mixture), (CrossKVHead, cross_kv),
               (ParallelHead, parallel), (AssistantHead, next_tokens))
    make: Any = next((make for kind, make in special if isinstance(drafter.head, kind)), trained)
    return make(lm, drafter, drafter.system)
