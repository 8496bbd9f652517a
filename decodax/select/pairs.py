"""A rule that compares two candidates at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from decodax.common.registry import SELECTS
from decodax.select.candidates import Candidates, SelectionRule

Compare = Callable[[Any, str, str], float]
"""A function of a prompt and two answers. It returns a number above 0 if the first answer is better, else below 0."""


@SELECTS.register("pair-reranker", "LLM-Blender", "Jiang et al. 2023", "the winner of comparisons of two")
@dataclasses.dataclass(frozen=True)
class PairRanker(SelectionRule):
    """Chooses the candidate that wins against the others (PairReranker: Jiang et al., 2023).

    Attributes:
        compare: `compare(prompt, a, b)` returns by how much answer `a` is better than `b`. It is called in both orders
            and the results are combined, since comparers depend on the order.
        way: "all" compares all pairs, and the score of a candidate is the sum of its results ("MaxLogits" in the
            paper). "wins" counts the pairs that it wins. "bubble" goes through the candidates once and keeps the better
            of two.
    """

    compare: Compare
    way: Literal["all", "wins", "bubble"] = "all"

    def scores(self, candidates: Candidates) -> np.ndarray:
        texts, n = candidates.texts, len(candidates)
        beats = lambda i, j: (float(self.compare(candidates.prompt, texts[i], texts[j]))
                              - float(self.compare(candidates.prompt, texts[j], texts[i])))
        if self.way == "bubble":
            best, order = 0, np.full(n, -np.inf)
            for i in range(1, n):
                best = i if beats(i, best) > 0 else best
            order[best] = 0.0
            return order
        table = np.zeros((n, n))
        for i in range(n):
            for j in range(i):
                table[i, j] = beats(i, j)
                table[j, i] = -table[i, j]
        return (table > 0).sum(1).astype(np.float64) if self.way == "wins" else table.sum(1)
