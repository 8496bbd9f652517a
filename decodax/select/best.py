"""The best of several candidates by what somebody says of each: a reward model, a judge, the model itself."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.registry import FUNCTIONS, SELECTS
from decodax.select.candidates import Candidates, SelectionRule

Reward = Callable[[Any, Sequence[str]], Any]
"""Scores `[n]` of texts that answer a prompt; the larger the better."""


@SELECTS.register("best-of-n", "WebGPT", "Nakano et al. 2021", "the largest reward")
@dataclasses.dataclass(frozen=True)
class BestOfN(SelectionRule):
    """The candidate with the largest reward (Nakano et al., 2021; Stiennon et al., 2020).

    Attributes:
        reward: `reward(prompt, texts)` gives a number for each text, in Python or as an array of JAX.
    """

    reward: Reward

    def scores(self, candidates: Candidates) -> np.ndarray:
        return np.asarray(self.reward(candidates.prompt, candidates.texts), np.float64)


@SELECTS.register("likelihood", "", "", "the largest mean log-probability, or sum")
@dataclasses.dataclass(frozen=True)
class Likelihood(SelectionRule):
    """The candidate that the model finds most probable.

    Attributes:
        length_penalty: the sum of log-probabilities is divided by the number of tokens to this power: 0, the most
            probable text; 1, the largest mean.
    """

    length_penalty: float = 1.0

    def scores(self, candidates: Candidates) -> np.ndarray:
        if self.length_penalty == 0:
            return candidates.probable
        if candidates.lengths is None:
            raise ValueError("lengths: got None, but the rule goes by probability a token")
        return candidates.probable / np.maximum(candidates.lengths, 1) ** self.length_penalty


@SELECTS.register("quality-aware", "Quality-Aware Decoding for Neural Machine Translation", "Fernandes et al. 2022",
                  "the best by an estimate of quality, then another rule")
@dataclasses.dataclass(frozen=True)
class QualityAware(SelectionRule):
    """Two stages: the best by an estimate of quality, and among them the choice of another rule (Fernandes et al.,
    2022).

    Attributes:
        quality: `quality(prompt, texts)`, a number for each text. rule: for those that are left. keep: how many.
    """

    quality: Reward
    rule: SelectionRule
    keep: int = 8

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep: got {self.keep}, takes at least 1")

    def scores(self, candidates: Candidates) -> np.ndarray:
        first = np.asarray(self.quality(candidates.prompt, candidates.texts), np.float64)
        kept = np.sort(np.argsort(-first, kind="stable")[:self.keep])
        scores = np.full(len(candidates), -np.inf)
        scores[kept] = self.rule.scores(candidates.select(kept))
        return scores


@FUNCTIONS.register("select.allocate", "Learning How Hard to Think: Input-Adaptive Allocation of LM Computation",
                    "Damani et al. 2024", "how many samples each prompt gets, by given chances of success")
def allocate(chances: Sequence[float], budget: int, least: int = 1, most: int | None = None) -> list[int]:
    """How many samples each prompt gets (Damani et al., 2024, adaptive best-of-k for rewards of 0 or 1).

    The next sample goes where it gains most: with a chance `p` that one sample is right, the `b + 1`-th adds
    `(1 - p) ** b * p` to the chance that one of them is. That is greedy, and best, since gains fall.

    Args:
        chances: of a right sample, one a prompt, as a probe or a first few samples tell. budget: samples in all.
        least, most: samples of a prompt.

    Raises:
        ValueError: a chance outside [0, 1], or a budget that `least` does not fit in.

    >>> allocate([0.9, 0.2, 0.0], 8)
    [2, 5, 1]
    """
    if bad := [p for p in chances if not 0 <= p <= 1]:
        raise ValueError(f"chances: got {bad[0]}, takes numbers from 0 to 1")
    if budget < least * len(chances):
        raise ValueError(f"budget: got {budget}, but {len(chances)} prompts with {least} each take "
                         f"{least * len(chances)}")
    given = [least] * len(chances)
    gain = lambda i: (1 - chances[i]) ** given[i] * chances[i]
    heap = [(-gain(i), i) for i in range(len(chances))]
    heapq.heapify(heap)
    left = budget - sum(given)
    while left and heap:
        less, i = heapq.heappop(heap)
        if less == 0 or (most is not None and given[i] >= most):
            continue
        given[i] += 1
        left -= 1
        heapq.heappush(heap, (-gain(i), i))
    return given
