"""phi-Decoding: chooses steps by the continuations that follow them (foresight)."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.options import Count, Positive, Share, Whole
from decodax.common.registry import SEARCHES
from decodax.search.explorer import Explorer, Ranked
from decodax.search.forks import Forks

Vectors = Callable[[Sequence[str]], np.ndarray]
"""A function of `n` texts that returns a vector for each, `f64[n, d]`; texts of similar content have close vectors."""


def tf_idf(texts: Sequence[str]) -> np.ndarray:
    """Returns the TF-IDF vector of the words of each text, normalized to length 1: `f64[texts, words]`."""
    counts = [Counter(w for w in "".join(c.lower() if c.isalnum() else " " for c in t).split() if len(w) > 1)
              for t in texts]
    words = sorted(set().union(*counts))
    if not words:
        return np.zeros((len(texts), 1))
    idf = np.array([math.log((1 + len(texts)) / (1 + sum(w in c for c in counts))) + 1 for w in words])
    x = np.array([[c[w] for w in words] for c in counts], float) * idf
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def k_means(x: np.ndarray, k: int, rng: np.random.Generator, rounds: int = 100) -> np.ndarray:
    """Returns the cluster of each point, `i64[n]`, by Lloyd's algorithm started from k-means++ (Arthur and
    Vassilvitskii, 2007).

    Args:
        x: `f64[n, d]`, the points.
        k: maximum number of clusters.
        rng: random numbers.
        rounds: maximum number of iterations.
    """
    centres = [x[rng.integers(len(x))]]
    while len(centres) < min(k, len(x)):
        far = np.min([((x - c) ** 2).sum(1) for c in centres], 0)
        if far.sum() <= 0:
            break
        centres.append(x[rng.choice(len(x), p=far / far.sum())])
    middle, label = np.array(centres), np.zeros(len(x), int)
    for _ in range(rounds):
        new = ((x[:, None] - middle[None]) ** 2).sum(-1).argmin(1)
        if (new == label).all() and _:
            break
        label = new
        middle = np.array([x[label == j].mean(0) if (label == j).any() else middle[j] for j in range(len(middle))])
    return label


def _soft(x: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    with np.errstate(over="ignore"):
        far = np.maximum((x - x.max()) / temperature, -700.0)
    # Draws without replacement need as many probabilities above 0 as draws.
    e = np.where(x == -np.inf, 0.0, np.exp(far))
    return e / e.sum()


@SEARCHES.register("phi-decoding",
                   "phi-Decoding: Adaptive Foresight Sampling for Balanced Inference-Time Exploration and Exploitation",
                   "Xu et al. 2025", "steps judged by how the model goes on from them")
@dataclasses.dataclass(frozen=True)
class PhiDecoding(Explorer):
    """phi-Decoding (Xu et al., 2025): chooses steps by sampling how the text continues after them.

    A step is a piece of text that ends at one of the strings `until` or after `step_tokens` tokens. Each round

    1. samples `samples` next steps for each of `beams` texts;
    2. drops the steps whose mean log-probability per token is at most the mean of all of them minus `sigma` standard
       deviations, but keeps at least `beams` steps;
    3. samples the rest of the text after each remaining step, its *foresight*. The *advantage* of a step is the mean
       log-probability per token of its foresight, minus that of the foresight of the text that it extends;
    4. groups the foresights of the steps with a positive advantage into `clusters` clusters of similar texts;
    5. draws `beams` of these steps without replacement. Their probability is the average of two softmaxes: of
       `advantage / temperature`, and of the size of the step's cluster relative to all. If fewer than `beams` steps
       have a positive advantage, all steps take part and only the first softmax counts.

    The rounds end after `steps` rounds. After `first` rounds they also end if one cluster has held more than the share
    `agreement` of the foresights in some round, or if all drawn steps are the same text. Then each text is completed,
    and the result is drawn by `softmax(advantage / temperature)` from the larger of two clusters of the texts with a
    positive advantage. If there are none, the draw uses `-advantage`, as in the authors' code. Rules and defaults are
    those of that code, but steps keep their white space.

    Attributes:
        beams: number of texts.
        samples: number of sampled next steps of each text.
        steps: maximum number of rounds.
        first: number of rounds after which the rounds may end early.
        sigma: width of the filter, in standard deviations.
        agreement: share of the foresights in one cluster that ends the rounds early.
        clusters: maximum number of clusters.
        temperature: temperature of the draws.
        vectors: embeds foresights for the clusters; by default TF-IDF.
    """

    beams: Count = 4
    samples: Count = 4
    steps: Count = 8
    first: Whole = 4
    sigma: float = 1.0
    agreement: Share = 0.69
    clusters: Count = 3
    temperature: Positive = 0.1
    vectors: Vectors = tf_idf

    reads = "compares foresights as texts"

    @property
    def rows(self) -> int:
        return self.beams * self.samples

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        P, n = len(forks), self.rows
        value = np.zeros((P, self.beams))           # mean log-probability of each beam's foresight
        looks, agreed = np.ones(P, bool), np.zeros(P, bool)
        own = np.arange(n)
        for step in range(self.steps):
            looks &= forks.live[:, :self.beams].any(1)
            if not looks.any():
                break
            # The texts of the beams are in the first rows.
            spread = np.where(looks[:, None], np.repeat(np.arange(self.beams), self.samples), own)
            forks.fork(spread)
            start_p, start_n = forks.log_probs(), forks.lengths.copy()
            forks.extend(forks.live & looks[:, None])
            mean = (forks.log_probs() - start_p) / (forks.lengths - start_n + 1e-8)
            keep = np.zeros((P, n), bool)
            for p in np.flatnonzero(looks).tolist():
                keep[p] = mean[p] > mean[p].mean() - self.sigma * mean[p].std()
                if (lacks := self.beams - int(keep[p].sum())) > 0:
                    rest = np.flatnonzero(~keep[p])
                    keep[p, forks.rng(p).choice(rest, lacks, False, _soft(mean[p, rest], self.temperature))] = True
            before_p, before_n = forks.log_probs(), forks.lengths.copy()
            said = forks.since(start_n)
            seen = forks.ahead(keep & forks.live)
            ahead = seen.since(before_n)
            after = (seen.log_probs() - before_p) / (seen.lengths - before_n + 1e-8)
            parents = np.tile(own, (P, 1))
            for p in np.flatnonzero(looks).tolist():
                rows = np.flatnonzero(keep[p])
                gain = after[p, rows] - value[p, spread[p, rows]]
                chosen, agrees = self._choose(gain, [ahead[p][i] for i in rows], forks.rng(p))
                picked = rows[chosen]
                parents[p, :self.beams] = picked
                value[p] = after[p, picked]
                agreed[p] |= agrees
                same = len({said[p][i] for i in picked}) == 1
                looks[p] &= not (agreed[p] and step + 1 >= self.first) and not (same and step >= self.first)
            forks.fork(parents)
        return self._finish(forks, value)

    def _choose(self, gain: np.ndarray, told: Sequence[str], rng: np.random.Generator) -> tuple[np.ndarray, bool]:
        """Draws `beams` steps. Returns their indices, and True if one cluster holds more than the share `agreement`."""
        good = np.flatnonzero((gain > 0) & np.array([bool(t.strip()) for t in told]))
        if len(good) < self.beams:
            return rng.choice(len(gain), self.beams, False, _soft(gain, self.temperature)), False
        label = k_means(self.vectors([told[i] for i in good.tolist()]), self.clusters, rng)
        sizes = np.bincount(label)
        weight = (_soft((sizes / len(good))[label]) + _soft(gain[good], self.temperature)) / 2
        chosen = good[rng.choice(len(good), self.beams, False, weight)]
        return chosen, bool(sizes.max() / len(good) > self.agreement)

    def _finish(self, forks: Forks, value: np.ndarray) -> Ranked:
        P, n = len(forks), self.rows
        first = np.arange(n) < self.beams
        before_p, before_n = forks.log_probs(), forks.lengths.copy()
        forks.extend(forks.live & first, whole=True)
        mean = (forks.log_probs() - before_p) / (forks.lengths - before_n + 1e-8)
        score, index = np.full((P, n), -np.inf), np.zeros(P, int)
        ended, since = forks.texts(), forks.since(before_n)
        for p in range(P):
            gain = mean[p, :self.beams] - value[p]
            score[p, :self.beams] = gain
            rng = forks.rng(p)
            told = [since[p][i] or ended[p][i] for i in range(self.beams)]
            good = np.flatnonzero((gain > 0) & np.array([bool(t.strip()) for t in told]))
            if not len(good):
                index[p] = rng.choice(self.beams, p=_soft(-gain, self.temperature))
                continue
            label = k_means(self.vectors([told[i] for i in good]), 2, rng)
            rows = good[label == np.bincount(label).argmax()]
            index[p] = rng.choice(rows, p=_soft(gain[rows], self.temperature))
        return Ranked(score, index)
