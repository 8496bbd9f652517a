"""Measures how often the k-th child of a draft tree's node is accepted, the acceptance vector of Sequoia (Chen et al.,
2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.algorithms.speculative.adaptive.fit_trees import Counted, continued
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.source import Source
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.verifier import Verifier
from decodax.algorithms.speculative.verify.mcsd import MultiRound


def fit_acceptance(lm: Any, source: Source, samples: Sequence[Sequence[int]], ranks: int = 8, *,
                   verify: Verifier | None = None, max_new_tokens: int = 64, seed: int = 0,
                   **sampling: Any) -> tuple[float, ...]:
    """Measures the acceptance vector: for each `k` the share of rounds in which the k-th child of the newest token is
    accepted, where each round drafts `ranks` children of it and nothing else.

    Args:
        lm: the result of `decodax.load`.
        source: what drafts, such as `dx.drafts.DraftModel(small)`.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch.
        ranks: number of children.
        verify: the verifier that you will use; None: Sequoia's, `MultiRound()`.
        max_new_tokens: number of tokens to decode for each sample.
        seed: random seed of the decoding.
        sampling: sampling options of `decodax.generate`. Acceptance depends on the temperature.

    Raises:
        ValueError: `ranks` is below 1, no samples or an empty one.
    """
    at_least(ranks=ranks)
    star = Speculative(source, verify or MultiRound(), Fixed.balanced(ranks))
    s = continued(lm, Counted(star), samples, max_new_tokens, seed, **sampling)
    return tuple((np.asarray(s.algo[1]).sum(0) / np.asarray(s.stats.rounds).sum()).tolist())
