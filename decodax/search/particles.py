"""Particle methods: texts get weights while they are generated; texts with large weights are forked, others are
dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from decodax.common.options import Count, Share
from decodax.common.registry import SEARCHES
from decodax.search.explorer import Explorer, Ranked, Score, log_mean, normal, resample, scored
from decodax.search.forks import Forks

Resampling = Literal["multinomial", "systematic"]
EDGE = 1e-7
"""Rewards are clipped to this distance from 0 and 1."""


def _odds(scores: np.ndarray) -> np.ndarray:
    """Returns the log odds of rewards between 0 and 1; rewards within `EDGE` of 0 or 1 are clipped."""
    if (scores < 0).any() or (scores > 1).any():
        raise ValueError(f"reward: got {scores.min():g} to {scores.max():g}, takes probabilities from 0 to 1")
    p = np.clip(scores, EDGE, 1 - EDGE)
    return np.log(p) - np.log1p(-p)


def _written(forks: Forks, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lets rows generate a step.

    Returns:
        `bool[P, n]`, rows that have generated tokens, and `f64[P, n]`, the change of the log-weight from their
        algorithm.
    """
    before = forks.log_weights()
    wrote = forks.extend(which)
    return wrote, np.subtract(forks.log_weights(), before, where=wrote, out=np.zeros(wrote.shape))


def _potentials(potential: Score, forks: Forks, asked: Sequence[Any], which: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns `f64[P, n]`: new log potentials of the texts in `which`, and the `old` ones of the others.

    Raises:
        ValueError: a potential is NaN or inf, or their number differs from that of the texts.
    """
    value = scored(potential, forks, asked, which, old)
    if np.isposinf(value).any():
        raise ValueError("potential: got inf, takes the log of a potential, a finite number or -inf")
    return value


@SEARCHES.register("particle-filter", "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using "
                   "Particle-Based Monte Carlo Methods", "Puri et al. 2025",
                   "particles resampled by the odds of a process reward")
@dataclasses.dataclass(frozen=True)
class ParticleFilter(Explorer):
    """Particle filtering with a process reward model (Puri et al., 2025, "Rollout Roulette").

    In each round all `n` particles generate a step, which ends as in `Explorer`. Then they are resampled with weights
    equal to the odds `r / (1 - r)` of their rewards `r`; a finished particle keeps its last reward. The search ends
    when all particles have ended. The answer is the particle with the largest odds, or one drawn by the odds.

    By default, as in the authors' code, the weight of a step is the odds of the whole text so far. The texts are then
    distributed as the model's distribution times the product of the odds after all steps. `increment=True` weights a
    step by the ratio of the odds after it to those before it; the distribution is then the model's times the odds of
    the whole text, as in `SMC`.

    Attributes:
        reward: returns the probability that a text is correct so far, between 0 and 1; clipped to [1e-7, 1 - 1e-7].
        n: number of particles.
        choose: how the answer is chosen: "largest" or "sample".
        increment: True weights a step by the ratio of the odds after it to those before it.
        resampling: "multinomial", as in the paper, or "systematic".
    """

    reward: Score
    n: Count = 8
    choose: Literal["largest", "sample"] = "largest"
    increment: bool = False
    resampling: Resampling = "multinomial"

    def _odds(self, prompt: Any, texts: Sequence[Any]) -> np.ndarray:
        return _odds(np.asarray(self.reward(prompt, texts), np.float64))

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        zeros = np.zeros((len(forks), self.n))
        score, last = zeros, zeros
        while (running := forks.live.any(1)).any():
            wrote, gained = _written(forks, forks.live)
            score = scored(self._odds, forks, asked, wrote, score)
            weight = normal(score - last + gained if self.increment else score + gained)
            parents = np.tile(np.arange(self.n), (len(forks), 1))
            for p in np.flatnonzero(running).tolist():
                parents[p] = resample(weight[p], forks.rng(p), self.resampling)
            forks.fork(parents)
            score = np.take_along_axis(score, parents, 1)
            last = score if self.increment else zeros
        weights = np.full_like(zeros, 1 / self.n) if self.increment else normal(score)
        index = np.array([forks.rng(p).choice(self.n, p=weights[p]) for p in range(len(forks))]) \
            if self.choose == "sample" else score.argmax(1)
        return Ranked(score, index, weights if self.increment else None)


@SEARCHES.register("smc", "Sequential Monte Carlo Steering of Large Language Models", "Lew et al. 2023",
                   "weighted samples of the model times a potential, with an estimate of how much that is")
@dataclasses.dataclass(frozen=True)
class SMC(Explorer):
    """Sequential Monte Carlo (Lew et al., 2023; twisted: Zhao et al., 2024): samples from the model's distribution
    times a potential.

    The potential is a function of the whole text. Its mean under the model, the normalizing constant, is estimated as
    well. The model's distribution is that of the policy: temperature, truncations and constraints are part of it. If
    the algorithm returns weights of its own, they count, too: with
    `algorithm=decodax.algorithms.contrastive.awrs.AWRS(check)`, the distribution is that of the policy restricted to
    what the check allows, times the potential, and the normalizing constant includes the probability of the allowed
    texts. Rows of weight 0 are not continued.

    Attributes:
        potential: returns the log of the potential of a text, less than infinity; -inf excludes the text.
        n: number of particles.
        twist: used in place of `potential` for unfinished texts: an estimate of the log of the final potential. It
            changes the quality of the particles, but not their distribution. None: `potential` itself.
        least: the particles are resampled when their effective sample size is below `least * n`; 0: never.
        resampling: "systematic" or "multinomial".
        ended: True evaluates `potential` on finished texts only, if there is no twist; other steps do not change
            weights.
    """

    potential: Score
    n: Count = 8
    twist: Score | None = None
    least: Share = 0.5
    resampling: Resampling = "systematic"
    ended: bool = False

    def _value(self, forks: Forks, asked: Sequence[Any], wrote: np.ndarray, old: np.ndarray) -> np.ndarray:
        over, going = wrote & ~forks.live, wrote & forks.live
        value = _potentials(self.potential, forks, asked, over, old)
        if self.twist is None and self.ended:
            return value
        return _potentials(self.twist or self.potential, forks, asked, going, value)

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        shape = len(forks), self.n
        weight, value, evidence = np.zeros(shape), np.zeros(shape), np.zeros(len(forks))
        while (active := forks.live & np.isfinite(weight)).any():
            wrote, gained = _written(forks, active)
            new = self._value(forks, asked, wrote, value)
            with np.errstate(invalid="ignore"):
                change = gained + new - np.where(np.isneginf(value), 0, value)
                weight = np.where(np.isneginf(new), -np.inf, weight + change)
            value = new
            parents = np.tile(np.arange(self.n), (len(forks), 1))
            for p in range(len(forks)):
                share = normal(weight[p])
                if 1 / (share ** 2).sum() < self.least * self.n and np.isfinite(weight[p]).any():
                    parents[p] = resample(share, forks.rng(p), self.resampling)
                    evidence[p] += log_mean(weight[p])
                    weight[p] = 0
            forks.fork(parents)
            value = np.take_along_axis(value, parents, 1)
        return Ranked(value, weights=normal(weight), log_evidence=evidence + log_mean(weight),
                      index=np.where(np.isfinite(weight), value, -np.inf).argmax(1))


@SEARCHES.register("smc-steering", "Sequential Monte Carlo Steering of Large Language Models", "Lew et al. 2023",
                   "several copies of each particle try a step, and none is kept twice")
@dataclasses.dataclass(frozen=True)
class Steering(Explorer):
    """SMC steering (Lew et al., 2023): each of `n` particles is copied `factor` times, the copies generate the next
    step, and `n` distinct copies are kept.

    A copy with weight `w` is kept with its weight if `c w >= 1`, where `c` is chosen so that the sum of `min(1, c w)`
    over all copies is `n`. The others are drawn by stratified sampling, and those that are drawn get the weight `1 / c`
    (Fearnhead and Clifford, 2003). So the weighted particles are samples from the distribution of `SMC`.

    Attributes:
        potential: returns the log of the potential of a text, less than infinity; -inf excludes the text.
        n: number of particles.
        factor: number of copies of each particle.
    """

    potential: Score
    n: Count = 4
    factor: Count = 3

    @property
    def rows(self) -> int:
        return self.n * self.factor

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        shape = len(forks), self.rows
        # The first copies hold the particles; a finished particle has one copy, with all of its weight.
        weight, value = np.full(shape, -np.inf), np.zeros(shape)
        weight[:, :self.n] = -np.log(self.n)
        # Rows that have ended, or have weight 0, write no more.
        while (alive := (forks.live & np.isfinite(weight))[:, :self.n]).any():
            active = np.zeros(shape, bool)
            parents = np.tile(np.arange(self.rows), (len(forks), 1))
            new = np.full(shape, -np.inf)
            for p in range(len(forks)):
                free = iter(range(self.n, self.rows))
                for i in range(self.n):
                    several = bool(alive[p, i])
                    places = [i, *(next(free) for _ in range(self.factor - 1))] if several else [i]
                    parents[p, places] = i
                    new[p, places] = weight[p, i] - np.log(len(places))
                    active[p, places] = several
            forks.fork(parents)
            value = np.take_along_axis(value, parents, 1)
            wrote, gained = _written(forks, active)
            then = _potentials(self.potential, forks, asked, wrote, value)
            with np.errstate(invalid="ignore"):
                new = np.where(np.isneginf(then), -np.inf, new + gained + np.where(wrote, then - value, 0))
            keep, weight = np.tile(np.arange(self.rows), (len(forks), 1)), np.full(shape, -np.inf)
            for p in range(len(forks)):
                chosen, weight[p, :self.n] = kept(new[p], self.n, forks.rng(p))
                order = _first(chosen, self.n)
                weight[p, :self.n] = weight[p, :self.n][[int(np.flatnonzero(chosen == c)[0]) for c in order]]
                keep[p, :self.n] = order
            forks.fork(keep)
            value = np.take_along_axis(then, keep, 1)
        total = log_mean(weight) + np.log(self.rows)
        return Ranked(np.where(np.isfinite(weight), value, -np.inf), weights=normal(weight), log_evidence=total)


def _first(chosen: np.ndarray, n: int) -> np.ndarray:
    """Reorders `chosen` so that each entry below `n` is at its own index."""
    out: list[int] = [-1] * n
    rest = []
    for c in chosen.tolist():
        if c < n:
            out[c] = c
        else:
            rest.append(c)
    it = iter(rest)
    return np.array([next(it) if c < 0 else c for c in out])


def kept(log_weights: np.ndarray, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws `n` distinct rows by the rule of `Steering`.

    Args:
        log_weights: logarithms of the weights of all rows.
        n: number of rows to keep.
        rng: random numbers.

    Returns:
        The indices of the kept rows and their new log-weights.
    """
    if np.isfinite(log_weights).sum() <= n:
        order = np.argsort(~np.isfinite(log_weights), kind="stable")[:n]
        return np.sort(order), log_weights[np.sort(order)]
    order = np.argsort(-log_weights, kind="stable")[:np.isfinite(log_weights).sum()]
    logs = log_weights[order]
    # The log of c if the first k are kept surely and the others share the rest; in logarithms, for any range of
    # weights.
    tails = np.logaddexp.accumulate(logs[::-1])[::-1]
    log_c = np.log(n - np.arange(n)) - tails[:n]
    sure = int(np.argmax(log_c + logs[:n] <= 0))
    some, rest = n - sure, np.sort(order[sure:])
    ends = np.cumsum(np.exp(log_weights[rest] - tails[sure])) * some
    at = np.minimum(np.searchsorted(ends / ends[-1] * some, np.arange(some) + rng.random(), side="right"),
                    len(rest) - 1)
    chosen = np.concatenate([np.sort(order[:sure]), rest[at]])
    return chosen, np.concatenate([log_weights[chosen[:sure]], np.full(some, -log_c[sure])])
