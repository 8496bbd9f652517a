"""What searches over forks have in common, and what they find."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.struct import short
from decodax.engine.methods import text_model
from decodax.engine.result import Result
from decodax.search.canvases import Canvases
from decodax.search.forks import Forks

Score = Callable[[Any, Sequence[Any]], Any]
"""`score(prompt, texts)`: a number for each text that begins to answer a prompt (of a process reward model, a verifier,
a constraint). The text may be cut after any step. In Python or an array of JAX."""


@dataclasses.dataclass(frozen=True)
class Explored:
    """What a search has found.

    Attributes:
        text: the chosen text of each prompt; ids without a tokenizer. index: its row.
        texts: all rows, `[P][n]`. scores: `f64[P, n]`, what the choice went by.
        weights: `f64[P, n]`, of rows that are weighted samples, summing to 1; None elsewhere.
        log_evidence: `f64[P]`, the log of the mean weight, of searches that estimate it; None elsewhere.
        tokens: made in all, also of rows that were given up. fed: put in.
        result: the rows as `decodax.generate` gives them.
        details: what else a search tells of each prompt (the threads of `apar`); None of most.
    """

    __repr__ = short

    text: list[Any]
    index: np.ndarray
    texts: list[list[Any]]
    scores: np.ndarray
    weights: np.ndarray | None
    log_evidence: np.ndarray | None
    tokens: int
    fed: int
    result: Result
    details: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.text)


class Explorer(abc.ABC):
    """A search over texts that grow step by step: derive a frozen dataclass from this, whose fields are its options.

    `search` sees a `Forks`, extends and forks its rows, and says how good each is in the end.
    """

    needs_reward = False
    reads: str = ""
    """What the search does with texts, for which it takes a model with a tokenizer; empty where ids will do."""

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Rows that a prompt takes."""

    def begin(self, lm: Any, prompts: Any, **options: Any) -> Forks:
        """The rows as the search begins; `options` of `Forks.begin`.

        Raises:
            ValueError: a model without a tokenizer, where the search reads texts; or as `Forks.begin`.
        """
        lm = text_model(lm, f"{type(self).__name__} {self.reads}") if self.reads else lm
        return Forks.begin(lm, prompts, self.rows, **options)

    @abc.abstractmethod
    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        """Runs to the end. `asked` has the prompts as they were given."""


class CanvasExplorer(abc.ABC):
    """A search over canvases that are denoised step by step: as `Explorer`, but `search` sees `Canvases`."""

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Rows that a prompt takes."""

    @abc.abstractmethod
    def search(self, canvases: Canvases, asked: Sequence[Any]) -> Ranked:
        """Runs to the end. The rows hold what is given back."""


@dataclasses.dataclass(frozen=True)
class Ranked:
    """How good rows are. Attributes: scores `f64[P, n]`; index `i64[P]` of the chosen ones, default the largest score;
    weights, log_evidence, details: as in `Explored`. texts: of searches whose texts are no single rows; `scores` and
    `index` are about them."""

    __repr__ = short

    scores: np.ndarray
    index: np.ndarray | None = None
    weights: np.ndarray | None = None
    log_evidence: np.ndarray | None = None
    texts: list[list[Any]] | None = None
    details: list[Any] | None = None


def scored(score: Score, forks: Forks, asked: Sequence[Any], which: np.ndarray, old: np.ndarray) -> np.ndarray:
    """`f64[P, n]`: scores of the texts in `which`; of the others those of `old`.

    Raises:
        ValueError: a score is a NaN, or there are not as many as texts.
    """
    texts, out = forks.texts(which), old.copy()
    for p, prompt in enumerate(asked):
        at = np.flatnonzero(which[p])
        if not len(at):
            continue
        got = np.asarray(score(prompt, [texts[p][i] for i in at]), np.float64)
        if got.shape != at.shape or np.isnan(got).any():
            raise ValueError(f"score: got {got!r} for {len(at)} texts, takes a number for each")
        out[p, at] = got
    return out


def normal(log_weights: np.ndarray) -> np.ndarray:
    """Weights that sum to 1, from their logarithms, along the last axis; all equal where all are 0."""
    top = log_weights.max(-1, keepdims=True)
    w = np.where(np.isfinite(top), np.exp(log_weights - np.where(np.isfinite(top), top, 0)), 1.0)
    return w / w.sum(-1, keepdims=True)


def log_mean(log_weights: np.ndarray) -> np.ndarray:
    """The logarithm of the mean of weights, along the last axis."""
    top = log_weights.max(-1)
    safe = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        return safe + np.log(np.exp(log_weights - safe[..., None]).mean(-1))


def resample(weights: np.ndarray, rng: np.random.Generator, how: str = "multinomial") -> np.ndarray:
    """Which of `n` weighted rows each of `n` new ones goes on from, `i64[n]`; of copies the first stays in its place.

    Args:
        weights: `f64[n]`, summing to 1. how: "multinomial": independent draws; "systematic": one draw for all.
    """
    n = len(weights)
    u = rng.random(n) if how == "multinomial" else (np.arange(n) + rng.random()) / n
    ends = np.cumsum(weights)
    chosen = np.searchsorted(ends / ends[-1], u, side="right")
    return settled(np.minimum(chosen, np.flatnonzero(weights)[-1]))     # u may be rounded up to 1


def settled(chosen: np.ndarray) -> np.ndarray:
    """The same rows in an order in which as many as can stay where they are."""
    n = len(chosen)
    left = np.bincount(chosen, minlength=n)
    out = np.full(n, -1)
    stays = left > 0
    out[stays] = np.flatnonzero(stays)
    left[stays] -= 1
    out[out < 0] = np.repeat(np.arange(n), left)
    return out
