"""Minimum Bayes risk (MBR): chooses the candidate with the largest expected utility under the model (Eikema and Aziz,
2020, 2022).

The candidates also serve as references, since they are samples of the model. The expected utility of a candidate is its
mean utility, such as a similarity, against all references; the estimators below need fewer comparisons.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np

from decodax.common.options import Count, NonNegative, Range, Whole
from decodax.common.registry import SELECTS
from decodax.select.candidates import Candidates, SelectionRule
from decodax.select.utilities import chrf, f_score, ngrams

Utility = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""A function of `n` hypotheses and `m` references. It returns `f64[n, m]`, the quality of each hypothesis if a
reference is the correct answer; larger is better."""


@SELECTS.register("mbr", "Is MAP Decoding All You Need?", "Eikema and Aziz 2020",
                  "the largest mean utility against all samples")
@dataclasses.dataclass(frozen=True)
class MBR(SelectionRule):
    """Chooses the candidate with the largest mean utility against all candidates.

    Attributes:
        utility: compares hypotheses with references; see `Utility`.
        itself: True compares a candidate with itself, too, as the published estimators do.
        weighted: True weights the references by their probability under the model, and counts equal texts once
            (model-based MBR: Jinnai et al., 2023). False: all samples have the same weight.
    """

    utility: Utility = chrf
    itself: bool = True
    weighted: bool = False

    def scores(self, candidates: Candidates) -> np.ndarray:
        return self._expected(pair_utilities(self.utility, candidates.texts, candidates.texts), candidates)

    def _expected(self, utilities: np.ndarray, candidates: Candidates) -> np.ndarray:
        n = len(candidates)
        weights = np.broadcast_to(self._weights(candidates), (n, n)).copy()
        if not self.itself and n > 1:
            np.fill_diagonal(weights, 0.0)
        total = weights.sum(1)
        # a candidate that alone has all the weight is like nothing else
        return np.where(total > 0, (utilities * weights).sum(1) / np.where(total > 0, total, 1), 0.0)

    def _weights(self, candidates: Candidates) -> np.ndarray:
        """Returns the weight of each reference, `f64[n]`, summing to 1."""
        if not self.weighted:
            return np.full(len(candidates), 1 / len(candidates))
        log_p = candidates.probable
        seen: set[str] = set()
        first = [text not in seen and not seen.add(text) for text in candidates.texts]      # type: ignore[func-returns-value]
        p = np.where(first, np.exp(log_p - log_p.max()), 0.0)
        return p / p.sum()


@SELECTS.register("aggregate-mbr", "Linear-time Minimum Bayes Risk Decoding with Reference Aggregation",
                  "Vamvas and Sennrich 2024", "chrF against one reference made of all samples")
@dataclasses.dataclass(frozen=True)
class AggregateMBR(SelectionRule):
    """MBR with chrF against a single reference, the mean of the n-gram counts of all candidates (DeNero et al., 2009;
    Vamvas and Sennrich, 2024).

    It takes `n` comparisons for `n` candidates.

    Attributes:
        weighted: True weights the n-grams of each candidate by its probability under the model; equal texts count each
            time.
    """

    weighted: bool = False

    def scores(self, candidates: Candidates) -> np.ndarray:
        n = len(candidates)
        log_p = candidates.probable if self.weighted else np.zeros(n)
        weights = np.exp(log_p - log_p.max())
        weights /= weights.sum()
        each = [ngrams(text) for text in candidates.texts]
        mean: list[Counter[str]] = [Counter() for _ in each[0]]
        for weight, grams in zip(weights, each, strict=True):
            for total, counts in zip(mean, grams, strict=True):
                for gram, count in counts.items():
                    total[gram] += weight * count
        return np.array([f_score(grams, mean) for grams in each])


@SELECTS.register("pruning-mbr", "Faster Minimum Bayes Risk Decoding with Confidence-based Pruning",
                  "Cheng and Vlachos 2023", "candidates are dropped as references are added")
@dataclasses.dataclass(frozen=True)
class PruningMBR(MBR):
    """MBR that drops candidates early (Cheng and Vlachos, 2023).

    References are added in stages. After each stage, a candidate is kept if its mean utility is at least that of the
    best candidate in more than `1 - alpha` of the bootstrap samples of the references. Dropped candidates get the score
    -inf.

    Attributes:
        alpha: confidence.
        schedule: number of references of each stage, ascending.
        samples: number of bootstrap samples.
        seed: seed of the bootstrap samples.
    """

    alpha: Annotated[float, Range(0, 1, above=True)] = 0.99
    schedule: tuple[Count, ...] = (8, 16, 32, 64, 128, 256)
    samples: Count = 500
    seed: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.itself or self.weighted:
            raise ValueError("itself, weighted: the published rule compares with all references alike")

    def scores(self, candidates: Candidates) -> np.ndarray:
        random, texts, n = candidates.rng(self.seed), candidates.texts, len(candidates)
        left, seen = np.arange(n), 0
        utilities = np.zeros((n, 0))
        scores = np.full(n, -np.inf)
        for count in self.schedule:
            count = min(count, n)
            if count <= seen:
                break
            new = pair_utilities(self.utility, [texts[i] for i in left.tolist()], texts[seen:count])
            utilities, seen = np.concatenate([utilities, new], 1), count
            best = int(utilities.mean(1).argmax())
            drawn = random.integers(0, count, (self.samples, count))
            means = utilities[:, drawn].mean(2)
            keep = (means >= means[best]).mean(1) > 1 - self.alpha
            keep[best] = True
            left, utilities = left[keep], utilities[keep]
        scores[left] = utilities.mean(1)
        return scores


@SELECTS.register("low-rank-mbr", "Efficient Minimum Bayes Risk Decoding using Low-Rank Matrix Completion",
                  "Trabelsi et al. 2024", "a part of the utilities, and the rest by a matrix of low rank")
@dataclasses.dataclass(frozen=True)
class LowRankMBR(MBR):
    """MBR that computes a part of the utilities and estimates the others by a matrix of low rank (probabilistic MBR:
    Trabelsi et al., 2024).

    The matrix is fitted to the computed utilities by alternating least squares.

    Attributes:
        reduction: one of this many pairs is compared.
        rank: rank of the matrix.
        ridge: penalty of the squared entries of the factors.
        rounds: maximum number of iterations.
        seed: seed of the compared pairs and of the initial factors.
    """

    reduction: Annotated[float, Range(1)] = 8.0
    rank: Count = 8
    ridge: NonNegative = 0.1
    rounds: Count = 10
    seed: Whole = 0

    def scores(self, candidates: Candidates) -> np.ndarray:
        texts, n = candidates.texts, len(candidates)
        random = candidates.rng(self.seed)
        chosen = random.permutation(n * n)[:math.ceil(n * n / self.reduction)]
        known = np.zeros((n, n), bool)
        known.reshape(-1)[chosen] = True
        utilities = np.zeros((n, n))
        for i in range(n):
            if (seen := np.flatnonzero(known[i]).tolist()):
                utilities[i, seen] = pair_utilities(self.utility, [texts[i]], [texts[j] for j in seen])[0]
        left, right = self.factors(utilities, known, random)
        return self._expected(left @ right.T, candidates)

    def factors(self, matrix: np.ndarray, known: np.ndarray, random: np.random.Generator
                ) -> tuple[np.ndarray, np.ndarray]:
        """Returns `f64[n, rank]` and `f64[m, rank]`, whose product approximates the known entries of a matrix.

        Args:
            matrix: `f64[n, m]`.
            known: `bool[n, m]`.
            random: source of the initial factors.
        """
        n, m = matrix.shape
        matrix = np.where(known, matrix, 0.0)
        left = random.random((n, self.rank)) * (n * self.rank) ** -0.5
        right = random.random((m, self.rank)) * (m * self.rank) ** -0.5
        ridge, before = self.ridge * np.eye(self.rank), math.inf

        def solved(other: np.ndarray, rows: np.ndarray, seen: np.ndarray) -> np.ndarray:
            gram = np.einsum("jr,ij,js->irs", other, seen.astype(np.float64), other) + ridge
            return np.linalg.solve(gram, (rows @ other)[..., None])[..., 0]

        for _ in range(self.rounds):
            left = solved(right, matrix, known)
            right = solved(left, matrix.T, known.T)
            loss = np.square((matrix - left @ right.T)[known]).sum() + self.ridge * (
                np.square(left).sum() + np.square(right).sum())
            if before - loss <= 1e-4:
                break
            before = loss
        return left, right


def pair_utilities(utility: Utility, hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Returns `f64[n, m]`, the utility of each hypothesis against each reference.

    Raises:
        ValueError: `utility` returns an array of another shape.
    """
    found = np.asarray(utility(hypotheses, references), np.float64)
    if found.shape != (len(hypotheses), len(references)):
        raise ValueError(f"utility: got shape {found.shape} for {len(hypotheses)} hypotheses and {len(references)} "
                         f"references, takes ({len(hypotheses)}, {len(references)})")
    return found
