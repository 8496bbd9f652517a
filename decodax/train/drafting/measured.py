"""The tokens of a forward pass of the target with a trained drafter, measured on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.heads import drafting_source
from decodax.algorithms.speculative.source import Shape, Source
from decodax.algorithms.speculative.trees import Chain, ConfidenceTree
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.prompt_tokens import LookAheadHead
from decodax.models.drafters.units import UnitHead
from decodax.train.drafting.blocks import block_acceptances
from decodax.train.drafting.texts import Text
from decodax.train.drafting.unrolled import Unrolled, acceptances, table_of

NODES, NEW = 24, 96
"""Drafts of the tree that a drafter is measured with, the most likely ones, and tokens that are decoded."""


def figures(lm: Any, drafter: TrainedDrafter | Source, text: Text, longest: int | None) -> dict[str, float]:
    """Returns the mean number of tokens of a forward pass after held-out prompts: "greedy" and "sampled" in a chain of
    4 drafts, or `longest`, the largest number that the drafter drafts, and "tree", of `NODES` drafts."""
    chain = Chain(min(4, longest or 4))
    measured = {"greedy": (chain, 0.0), "sampled": (chain, 1.0),
                "tree": (ConfidenceTree(NODES, longest or 6, 6), 0.0)}
    return {name: round(tokens_a_forward(lm, drafter, text, *how), 3) for name, how in measured.items()}


def tokens_a_forward(lm: Any, drafter: TrainedDrafter | Source, text: Text, shape: Shape, temperature: float) -> float:
    """Returns the mean number of tokens of a forward pass of the target after held-out prompts, with drafts of a
    shape; units have their own. A pass that drafts counts by its share of the layers."""
    head = drafter.head if isinstance(drafter, TrainedDrafter) else None
    if isinstance(head, UnitHead):
        algorithm = dx.algorithms.make("mumo", lm, drafter)
    else:
        source = drafting_source(lm, drafter) if isinstance(drafter, TrainedDrafter) else drafter
        algorithm = Speculative(source, shape=shape)
    more: dict[str, Any] = {} if text.stops else {"eos_token_id": []}
    out = dx.generate(lm, text.prompts, max_new_tokens=NEW, temperature=temperature, algorithm=algorithm, **more)
    passes = 2 - len(head.skip) / lm.model.depth if isinstance(head, LookAheadHead) else 1
    return out.stats.tokens_per_forward / passes


def accepted(objective: Any, weights: Any, params: Any, parts: Sequence[Any]) -> np.ndarray:
    """Returns the mean probability that each draft of a round is accepted at temperature 1, `f32[K]`, on texts `i32[B,
    T]` in several parts, if all drafts before it are the text's tokens. `objective` is the drafter's loss, `weights`
    are the target's, `params` the drafter's."""
    if not isinstance(objective, Unrolled):
        return np.mean([block_acceptances(objective, weights, params, part) for part in parts], 0)
    return np.mean([acceptances(objective.target, objective.head, weights, params, part, objective.steps,
                                table_of(objective.ids)) for part in parts], 0)


__all__ = ["NEW", "NODES", "accepted", "figures", "tokens_a_forward"]
