"""Searches that continue the most promising unfinished texts: step beams, A*."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.options import Count
from decodax.common.registry import SEARCHES
from decodax.search.explorer import Explorer, Ranked, Score, scored, settled
from decodax.search.forks import Forks


@SEARCHES.register("step-beams",
                   "Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling Model Parameters",
                   "Snell et al. 2024", "beam search over steps by a process reward")
@dataclasses.dataclass(frozen=True)
class StepBeams(Explorer):
    """Beam search over steps, ranked by a reward of the text so far (Snell et al., 2024).

    In each round all `n` texts are extended by a step. The `n / width` texts with the largest rewards are kept, and
    each of them continues in `width` rows. The search ends when all texts of a prompt have ended.

    Attributes:
        reward: scores texts, finished and unfinished ones; larger is better.
        n: number of rows of a prompt.
        width: number of continuations of each kept text, a divisor of `n`.
    """

    reward: Score
    n: Count = 8
    width: Count = 4


    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n % self.width:
            raise ValueError(f"width: got {self.width} for {self.n} rows, takes a divisor of n")

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        score = np.zeros((len(forks), self.n))
        while (running := forks.live.any(1)).any():
            score = scored(self.reward, forks, asked, forks.extend(), score)
            parents = np.tile(np.arange(self.n), (len(forks), 1))
            best = np.argsort(-score, axis=1, kind="stable")[:, :self.n // self.width]
            for p in np.flatnonzero(running):
                parents[p] = settled(np.repeat(best[p], self.width))
            forks.fork(parents)
            score = np.take_along_axis(score, parents, 1)
        return Ranked(score)


def no_cost(scores: Sequence[float]) -> float:
    return 0.0


@SEARCHES.register("a-star", "A*-Decoding: Token-Efficient Inference Scaling", "Chatziveroglou 2025",
                   "best-first search over steps by a process reward")
@dataclasses.dataclass(frozen=True)
class AStar(Explorer):
    """A*-decoding (Chatziveroglou, 2025): best-first search over texts.

    The unfinished text with the smallest `f = g + 1 - reward` is extended by `branch` sampled steps. The search ends
    when `answers` finished texts have an `f` that is not larger than that of any unfinished text, or after `expansions`
    extensions.

    The cost `g` of the path so far is not published in full. Here it is the option `cost`, a function of the rewards
    along the path; it is 0 by default, so that only the current reward counts. `decodax.search.mean_shortfall` is
    another choice: the mean of `1 - reward`.

    Attributes:
        reward: scores texts, between 0 and 1.
        n: maximum number of texts that are stored; new texts replace the worst ones.
        branch: number of steps that are sampled after a text.
        expansions: maximum number of texts that are extended.
        answers: number of finished texts that are wanted.
        cost: computes `g` from the rewards after each step of a text.
    """

    reward: Score
    n: Count = 16
    branch: Count = 4
    expansions: Count = 64
    answers: Count = 1
    cost: Callable[[Sequence[float]], float] = no_cost


    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branch >= self.n:
            raise ValueError(f"branch: got {self.branch} for {self.n} rows, takes from 1 to {self.n - 1}")

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        shape = len(forks), self.n
        score, held = np.zeros(shape), np.zeros(shape, bool)        # held: this row contains a text
        held[:, 0] = True
        paths: list[list[tuple[float, ...]]] = [[() for _ in range(self.n)] for _ in range(len(forks))]
        f = np.where(held, 1.0, np.inf)
        left, done = np.full(len(forks), self.expansions), np.zeros(len(forks), bool)
        while not done.all():
            parents = np.tile(np.arange(self.n), (len(forks), 1))
            active = np.zeros(shape, bool)
            for p in range(len(forks)):
                ended = held[p] & ~forks.live[p]
                going = np.flatnonzero(held[p] & forks.live[p])
                best = going[np.argmin(f[p, going])] if len(going) else -1
                # A finished text that is better than all others is an answer.
                found = int((f[p, ended] <= (f[p, best] if best >= 0 else np.inf)).sum())
                done[p] |= best < 0 or left[p] <= 0 or found >= self.answers
                if done[p]:
                    continue
                left[p] -= 1
                others = [i for i in range(self.n) if i != best]
                room = sorted(others, key=lambda i: (held[p, i], -f[p, i] if held[p, i] else 0, i))
                # Empty rows are used first, then the worst ones.
                places = [best, *room[:self.branch - 1]]
                for i in places:
                    parents[p, i], paths[p][i], held[p, i], active[p, i] = best, paths[p][best], True, True
            if not active.any():
                break
            forks.fork(parents)
            score = scored(self.reward, forks, asked, forks.extend(active), np.take_along_axis(score, parents, 1))
            for p, i in np.argwhere(active).tolist():
                paths[p][i] = (*paths[p][i], float(score[p, i]))
                f[p, i] = self.cost(paths[p][i]) + 1 - score[p, i]
        # The best finished text; if none has finished, the best of the others.
        order = np.where(held & ~forks.live, -f, np.where(held, -f - 1e6, -np.inf))
        return Ranked(score, order.argmax(1))


def mean_shortfall(rewards: Sequence[float]) -> float:
    """Returns the mean of `1 - reward` over the steps of a text, a `cost` for `AStar`; 0 without steps."""
    return float(np.mean([1 - r for r in rewards])) if len(rewards) else 0.0
