"""Speculative decoding with a draft model's chain: the original method, and a variant that gives the tokens of plain
sampling with the same seed ("Fast Inference from Transformers via Speculative Decoding", Leviathan, Kalman, Matias,
2023; "Accelerating Large Language Model Decoding with Speculative Sampling", Chen et al., 2023).

The parts have files of their own: `DraftModel`, `Rejection` and `SeedExact`.
"""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.verifier import SeedExact
from decodax.algorithms.speculative.verify.rejection import Rejection
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("speculative-decoding", "Fast Inference from Transformers via Speculative Decoding",
                     "Leviathan, Kalman, Matias 2023", family="speculative-linear", needs="a draft model",
                     guarantee="distribution-exact")
def speculative_decoding(draft: Any, length: Count = 4) -> Speculative:
    """Drafts a chain with a draft model and accepts it by rejection sampling.

    The output has the target's distribution. Its tokens differ from those of plain sampling with the same seed;
    `seed_exact` gives those.

    Args:
        draft: the draft model.
        length: number of drafts in a round.
    """
    return Speculative(DraftModel(draft), Rejection(), Chain(length))


ALGORITHMS.alias("speculative-sampling", "speculative-decoding",
                 "Accelerating Large Language Model Decoding with Speculative Sampling", "Chen et al. 2023",
                 "The same rule, found at the same time.", family="speculative-linear")


@ALGORITHMS.register("seed-exact", "Speculative sampling that keeps the seed's tokens", "",
                     family="speculative-linear", needs="a draft model", guarantee="seed-exact")
def seed_exact(draft: Any, length: Count = 4, shape: Shape | None = None) -> Speculative:
    """Drafts a chain with a draft model; the output has exactly the tokens of plain sampling with the same seed.

    Draft and target share the noise of their draws, so about as many drafts are accepted as with rejection sampling.

    Args:
        draft: the draft model.
        length: number of drafts in a round.
        shape: shape of the draft tree; None: a chain of `length`.
    """
    return Speculative(DraftModel(draft), SeedExact(), shape or Chain(length))


ALGORITHMS.alias("eqspec", "seed-exact", "Batch Speculative Decoding Done Right", "Zhang et al. 2025",
                 "Rows of a batch accept different numbers of drafts and stay equal to plain decoding, as with every "
                 "method of this library.", family="batching-scheduling")
