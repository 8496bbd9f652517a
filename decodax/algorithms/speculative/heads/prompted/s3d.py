"""S3D: the target drafts several tokens at once, at mask tokens after its newest token and without its middle layers
("S3D: A Simple and Cost-Effective Self-Speculative Decoding Scheme for Low-Memory GPUs", Zhong and Bharadwaj, 2024).

A round runs the target twice: over the newest token and `K` masks without the middle layers, which gives `1 + K`
drafts, and over the drafts, which verifies them. There are no other weights, and no other cache. Training, either of
the masks' embeddings beside a target that does not change (`decodax.train.drafting.prompt_tokens`), or of the whole
target, as in the paper (`decodax.train.tuning.SkippyLoss`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.self_draft import layered
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.prompted.pass_ import LookAheadEmbeddings
from decodax.algorithms.speculative.heads.source import HeadWeights
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS
from decodax.core.types import embeddings
from decodax.models.drafters.prompt_tokens import LookAheadHead, middle


@ALGORITHMS.register("s3d", "S3D: A Simple and Cost-Effective Self-Speculative Decoding Scheme for Low-Memory GPUs",
                     "Zhong & Bharadwaj 2024", family="speculative-self", needs="a model", guarantee="seed-exact")
def s3d(lm: Any, draft: Any = None, length: Count = 5, mask: Whole | None = None, skip: tuple[Whole, ...] | None = None,
        shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts with the target itself without its middle layers, several tokens in one pass at mask tokens.

    For models that were tuned for it (`scripts/train.py tune --objective s3d`), or with embeddings of masks that were
    trained for the model as it is (`scripts/train.py drafter --system s3d`); others draft badly.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`, which says the number of masks and the layers; None: a mask token
            of the target.
        length: without a drafter, the number of drafts on a path, one more than masks.
        mask: without a drafter, the id of the mask token; None: `s3d_mask_token` in the model's `config.json`, or its
            padding token.
        skip: without a drafter, the layers that are left out, counted from 0; None: `s3d_skip` there, or the middle
            half.
        shape: shape of the draft tree; None: a chain.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    if draft is not None:
        source = LookAheadEmbeddings.trained(lm, draft, "s3d")
        return Speculative(source, verify or SeedExact(), shape or Chain(source.longest))
    entries = lm.config_entries
    mask = entries.get("s3d_mask_token", lm.pad) if mask is None else mask
    skip = entries.get("s3d_skip") if skip is None else skip
    if mask >= lm.vocab_size:
        raise ValueError(f"mask: got {mask}, takes an id below {lm.vocab_size}")
    vectors = embeddings(lm.model, lm.params, jnp.full((1, length - 1), mask, jnp.int32))[0]
    head = LookAheadHead((), lm.vocab_size, width=vectors.shape[-1], heads=length - 1,
                         skip=middle(layered(lm).depth) if skip is None else tuple(sorted(set(skip))))
    source = LookAheadEmbeddings(head, HeadWeights({"prompts": vectors})).for_target(lm)    # which checks the layers
    return Speculative(source, verify or SeedExact(), shape or Chain(length))


__all__ = ["s3d"]
