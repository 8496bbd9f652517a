"""Rules that choose the best candidate by a reward model, a judge, or its likelihood."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.options import Count
from decodax.common.registry import FUNCTIONS, SELECTS
from decodax.select.candidates import Candidates, SelectionRule

Reward = Callable[[Any, Sequence[str]], Any]
"""A function of a prompt and `n` texts that answer it. It returns `n` scores; larger is better."""


@SELECTS.register("best-of-n", "WebGPT", "Nakano et al. 2021", "the largest reward")
@dataclasses.dataclass(frozen=True)
class BestOfN(SelectionRule):
    """Chooses the candidate with the largest reward (Nakano et al., 2021; Stiennon et al., 2020).

    Attributes:
        reward: `reward(prompt, texts)` returns a number for each text, as a sequence or an array.
    """

    reward: Reward

    def scores(self, candidates: Candidates) -> np.ndarray:
        return np.asarray(self.reward(candidates.prompt, candidates.texts), np.float64)


@SELECTS.register("likelihood", "", "", "the largest mean log-probability, or sum")
@dataclasses.dataclass(frozen=True)
class Likelihood(SelectionRule):
    """Chooses the candidate that is most probable under the model.

    Attributes:
        length_penalty: the sum of log-probabilities is divided by the number of tokens to this power. 0: the most
            probable text; 1: the largest mean per token.
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
    """Chooses in two stages: an estimate of quality keeps the best candidates, and another rule chooses among them
    (Fernandes et al., 2022).

    Attributes:
        quality: `quality(prompt, texts)` returns a number for each text; larger is better.
        rule: the rule of the second stage.
        keep: number of candidates that reach the second stage.
    """

    quality: Reward
    rule: SelectionRule
    keep: Count = 8

    def with_model(self, lm: Any) -> QualityAware:
        return dataclasses.replace(self, rule=self.rule.with_model(lm))

    def scores(self, candidates: Candidates) -> np.ndarray:
        first = np.asarray(self.quality(candidates.prompt, candidates.texts), np.float64)
        kept = np.sort(np.argsort(-first, kind="stable")[:self.keep])
        scores = np.full(len(candidates), -np.inf)
        scores[kept] = self.rule.scores(candidates.select(kept))
        return scores


@FUNCTIONS.register("select.allocate", "Learning How Hard to Think: Input-Adaptive Allocation of LM Computation",
                    "Damani et al. 2024", "how many samples each prompt gets, by given chances of success")
def allocate(chances: Sequence[float], budget: int, least: int = 1, most: int | None = None) -> list[int]:
    """Divides a budget of samples among prompts (adaptive best-of-k for rewards of 0 or 1; Damani et al., 2024).

    A further sample goes to the prompt where it helps most. If one sample is correct with probability `p`, sample `b +
    1` raises the probability of at least one correct sample by `(1 - p) ** b * p`. This greedy allocation is optimal.

    Args:
        chances: probability that one sample is correct, for each prompt, estimated by a probe or from a few samples.
        budget: total number of samples.
        least: minimum number of samples of a prompt.
        most: maximum number of samples of a prompt; None: no limit.

    Returns:
        The number of samples of each prompt. The sum is less than `budget` if further samples are not allowed or do not
        help.

    Raises:
        ValueError: a probability outside [0, 1], or a budget less than `least` for each prompt.

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
