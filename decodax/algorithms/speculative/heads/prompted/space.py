"""SPACE: parallel decoding by mask tokens of a model that was tuned for them ("Generation Meets Verification:
Accelerating Large Language Model Inference with Smart Parallel Auto-Correct Decoding", Yi et al., 2024).

A forward pass has the newest token, the drafts, and after each of them a group of mask tokens. It verifies the drafts,
and what the model predicts at the group after the last accepted one are the drafts of the next round: from one to all
drafts and one more are decided in a pass. The groups are those of parallel prompt decoding (`PromptTokens`) with the
embedding of a mask token in place of trained ones. Training: `decodax.train.tuning.SemiAutoregressiveLoss`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.prompted.source import PromptTokens
from decodax.algorithms.speculative.heads.source import HeadWeights
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS
from decodax.core.types import embeddings
from decodax.models.drafters.prompt_tokens import PromptTokensHead


@ALGORITHMS.register("space", "Generation Meets Verification: Accelerating Large Language Model Inference with Smart "
                     "Parallel Auto-Correct Decoding", "Yi et al. 2024", family="speculative-self", needs="a model",
                     guarantee="seed-exact")
def space(lm: Any, length: Count = 5, mask: Whole | None = None, shape: Shape | None = None,
          verify: Verifier | None = None) -> Speculative:
    """Drafts with the target itself, by mask tokens after each draft.

    For models that were tuned for it (`scripts/train.py tune --objective space`); others draft badly.

    Args:
        lm: the target.
        length: number of masks in a group, and of drafts on a path.
        mask: id of the mask token; None: `space_mask_token` in the model's `config.json`, or its padding token.
        shape: shape of the draft tree; None: a chain.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    mask = lm.config_entries.get("space_mask_token", lm.pad) if mask is None else mask
    if mask >= lm.vocab_size:
        raise ValueError(f"mask: got {mask}, takes an id below {lm.vocab_size}")
    vectors = embeddings(lm.model, lm.params, jnp.full((1, length), mask, jnp.int32))[0]
    head = PromptTokensHead((), lm.vocab_size, width=vectors.shape[-1], heads=length)
    return Speculative(PromptTokens(head, HeadWeights({"prompts": vectors})), verify or SeedExact(),
                       shape or Chain(length))


__all__ = ["space"]
