"""A search: a judge scores the sentences of all rows, the best `keep` rows are continued, and a prompt whose rows are
all below a bar begins again."""

import dataclasses
from collections.abc import Callable

import numpy as np

import decodax as dx
from decodax.search import Explorer, Ranked


def variety(text):
    """The share of different items in a text, be it of characters or of ids."""
    return len(set(text)) / max(len(text), 1)


@dx.search.register("judged-beam", "An experiment", "decodax")
@dataclasses.dataclass(frozen=True)
class JudgedBeam(Explorer):
    """Continues the rows of which a judge thinks best, and begins again where it likes none."""

    rows: int = 4
    keep: int = 2
    bar: float = 0.0
    restarts: int = 1
    judge: Callable[[str], float] = variety

    def search(self, forks, asked):
        left = np.full(len(asked), self.restarts)
        while forks.live.any():
            forks.extend()
            scores = self.scores(forks)
            order = np.argsort(-scores, axis=1, kind="stable")
            again = (scores.max(1) < self.bar) & (left > 0)
            left -= again
            forks.fork(np.where(again[:, None], np.arange(self.rows), order[:, np.arange(self.rows) % self.keep]))
            forks.rewind(np.where(again, 0, -1)[:, None].repeat(self.rows, 1))
        return Ranked(self.scores(forks))

    def scores(self, forks):
        return np.array([[self.judge(text) for text in row] for row in forks.texts()])
