"""TreePO: a search that builds a tree of text segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from decodax.common.options import Count
from decodax.common.registry import SEARCHES
from decodax.search.explorer import Explorer, Ranked, Score, scored
from decodax.search.forks import Forks

Branching = Literal["even", "likely", "unlikely"]


def shares(weights: np.ndarray, budget: int) -> np.ndarray:
    """Divides `budget` into `n` whole numbers, `i64[n]`: 1 each, and the rest in proportion to `weights`, by the
    largest remainder."""
    n = len(weights)
    left = budget - n
    exact = weights / weights.sum() * left
    out = np.floor(exact).astype(int)
    order = np.argsort(-(exact - out), kind="stable")
    out[order[:left - out.sum()]] += 1
    return out + 1


def repeats(text: str, length: int = 32, times: int = 8) -> bool:
    """True if the last `length` characters of a text occur at least `times` times in it."""
    return len(text) >= length and text.count(text[-length:]) >= times


@SEARCHES.register("treepo", "TreePO: Bridging the Gap of Policy Optimization and Efficacy and Inference Efficiency "
                   "with Heuristic Tree-based Modeling", "Li et al. 2025",
                   "a tree of segments that share their beginnings")
@dataclasses.dataclass(frozen=True)
class TreePO(Explorer):
    """TreePO (Li et al., 2025): samples several texts of a prompt that share their beginnings, as a tree of segments.

    A segment is a step (`step_tokens`, `until`). In each round all unfinished texts are extended by a segment and then
    branch into free rows: each text keeps its row, and the free rows are divided among the texts by weight, so that
    each continues in at most `divergence` rows. At the root, the maximum is a random number within `first`. A text
    whose last characters repeat many times is ended, if the model has a tokenizer. When all texts have ended and rows
    are free, each free row restarts at the beginning of a random segment of a random text ("fallback").

    Rules, defaults and weights are those of the authors' code. The weights are equal ("even"), or `exp(m)` ("likely")
    or `exp(-m)` ("unlikely") with the mean log-probability `m` of a token in the last segment.

    Attributes:
        n: number of texts.
        divergence: maximum number of rows in which a text continues.
        first: minimum and maximum number of rows in which the prompt continues.
        depth: maximum number of segments of a text.
        weights: "even", "likely" or "unlikely".
        reward: scores whole texts to choose the answer; None: the mean log-probability of a token.
    """

    n: Count = 16
    divergence: Count = 2
    first: tuple[Count, Count] = (2, 8)
    depth: Count = 14
    weights: Branching = "even"
    reward: Score | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.first) != 2 or self.first[0] > self.first[1]:
            raise ValueError(f"first: got {self.first}, takes two increasing bounds")

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        P, own = len(forks), np.arange(self.n)
        held = np.zeros((P, self.n), bool)          # rows that hold a text of the tree
        held[:, 0] = True
        segments = np.zeros((P, self.n), int)
        ends = np.zeros((P, self.n, self.depth + 1), int)           # new tokens of a text after each of its segments
        parents = np.tile(own, (P, 1))
        for p in range(P):
            self._branch(p, held, parents, forks, np.ones(self.n), int(forks.rng(p).integers(self.first[0],
                                                                                            self.first[1] + 1)))
        forks.fork(parents)
        while (active := held & forks.live).any():
            before_p, before_n = forks.log_probs(), forks.lengths.copy()
            forks.extend(active)
            segments[active] += 1
            for p, i in zip(*np.nonzero(active), strict=True):
                ends[p, i, segments[p, i]] = forks.lengths[p, i] - len(forks.prompts[p])
            mean = (forks.log_probs() - before_p) / np.maximum(forks.lengths - before_n, 1)
            texts = forks.texts(active)
            parents = np.tile(own, (P, 1))
            for p in range(P):
                for i in np.flatnonzero(active[p] & forks.live[p]):
                    looped = isinstance(texts[p][i], str) and repeats(texts[p][i])
                    if looped or segments[p, i] >= self.depth:
                        forks.cut(p, int(i))
                sign = {"even": 0.0, "likely": 1.0, "unlikely": -1.0}[self.weights]
                self._branch(p, held, parents, forks, np.exp(sign * mean[p]), self.divergence)
            forks.fork(parents)
            segments = np.take_along_axis(segments, parents, 1)
            ends = np.take_along_axis(ends, parents[..., None], 1)
            if not (held & forks.live).any() and not held.all():
                ends = self._fall_back(forks, held, segments, ends)
        tokens = np.maximum(forks.lengths - np.array([[len(x)] for x in forks.prompts]), 1)
        score = forks.log_probs() / tokens if self.reward is None else scored(
            self.reward, forks, asked, held, np.full((P, self.n), -np.inf))
        return Ranked(np.where(held, score, -np.inf))

    def _branch(self, p: int, held: np.ndarray, parents: np.ndarray, forks: Forks, weight: np.ndarray,
                most: int) -> None:
        """Assigns free rows of prompt `p` to its live texts: writes to `parents` and `held`, at most `most` rows for a
        text."""
        live, free = np.flatnonzero(held[p] & forks.live[p]), np.flatnonzero(~held[p])
        if not len(live) or not len(free):
            return
        gets = np.minimum(shares(weight[live], len(live) + len(free)), most)
        places = iter(free)
        for i, count in zip(live, gets, strict=True):
            for _ in range(count - 1):
                j = next(places)
                parents[p, j], held[p, j] = i, True

    def _fall_back(self, forks: Forks, held: np.ndarray, segments: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Restarts free rows at the beginning of a random segment of a finished text. Returns the new `ends`."""
        parents = np.tile(np.arange(self.n), (len(held), 1))
        lengths = np.where(held, -1, 0)
        for p in range(len(forks)):
            rng, done, free = forks.rng(p), np.flatnonzero(held[p]), np.flatnonzero(~held[p])
            for j in free:
                i = int(rng.choice(done))
                at = int(rng.integers(0, max(segments[p, i], 1)))
                parents[p, j], lengths[p, j], held[p, j], segments[p, j] = i, ends[p, i, at], True, at
        forks.fork(parents)
        forks.rewind(lengths)
        return np.take_along_axis(ends, parents[..., None], 1)
