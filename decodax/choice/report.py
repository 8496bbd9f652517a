"""How well likelihood and quality go together, which says what kind of decoding a task wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.choice.candidates import Candidates


@dataclasses.dataclass(frozen=True)
class Alignment:
    """Attributes: pearson, spearman: correlations of log-probability and utility, on average over prompts whose
    candidates differ in both; NaN if there is none. prompts: how many there are. best, likeliest, mean: the utility of
    the best candidate, of the likeliest one, and of all, on average over all prompts."""

    pearson: float
    spearman: float
    prompts: int
    best: float
    likeliest: float
    mean: float

    def __str__(self) -> str:
        return (f"likelihood and utility: Pearson {self.pearson:.2f}, Spearman {self.spearman:.2f} ({self.prompts} "
                f"prompts); utility of the likeliest {self.likeliest:.3f}, of the best {self.best:.3f}, on average "
                f"{self.mean:.3f}")


def alignment(candidates: Sequence[Candidates], utility: Callable[[Any, Sequence[str]], Any],
              per_token: bool = False) -> Alignment:
    """Whether what the model finds likely is good (Josifoski et al., 2023, likelihood-utility alignment).

    Where the two go together greedy decoding and beams do; where they do not, samples and a reward, or minimum Bayes
    risk, are worth their tokens.

    Args:
        candidates: of each prompt, with log-probabilities: `dx.choose(...).candidates`. utility: from a prompt and its
            candidates a number for each; the larger the better. per_token: log-probabilities are divided by lengths.

    Raises:
        ValueError: log-probabilities, or lengths that are asked for, are not known.
    """
    if not candidates:
        raise ValueError("candidates: got none, takes those of one prompt or more")
    pairs, best, likeliest, mean = [], [], [], []
    for each in candidates:
        worth = np.asarray(utility(each.prompt, each.texts), np.float64)
        log_p = each.probable
        if per_token:
            if each.lengths is None:
                raise ValueError("lengths: got None, but log-probabilities are asked for by token")
            log_p = log_p / np.maximum(each.lengths, 1)
        best.append(worth.max())
        likeliest.append(worth[int(log_p.argmax())])
        mean.append(worth.mean())
        if np.ptp(worth) > 0 and np.ptp(log_p) > 0:
            pairs.append((np.corrcoef(log_p, worth)[0, 1], np.corrcoef(_ranks(log_p), _ranks(worth))[0, 1]))
    found = np.array(pairs).mean(0) if pairs else np.full(2, np.nan)
    return Alignment(float(found[0]), float(found[1]), len(pairs), float(np.mean(best)), float(np.mean(likeliest)),
                     float(np.mean(mean)))


def _ranks(x: np.ndarray) -> np.ndarray:
    """The rank of each entry; the mean rank of equal ones."""
    _, group, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[group]
