"""Several answers to one prompt, and what it means to choose among them."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.common.struct import short
from decodax.engine.request import Request
from decodax.engine.result import Result


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Answers to one prompt, `n` of them.

    Attributes:
        texts: `n`. prompt: what they answer; None if nobody said.
        log_probs: `f64[n]`, the natural log-probability of each under the model, summed over its tokens; None if it is
            not known. lengths: `i64[n]`, tokens of each; None if they are not known. log_weights: `f64[n]`, how much
            likelier each is under the model than under what it was drawn from (`Result.log_weights`), or None.
        address: whole numbers, the prompt's seed and request id, which address the random numbers that a rule draws for
            it, so that they do not depend on the other prompts of a call. None: the prompt's text is the address.
    """

    __repr__ = short

    texts: Sequence[str]
    prompt: Any = None
    log_probs: np.ndarray | None = None
    lengths: np.ndarray | None = None
    log_weights: np.ndarray | None = None
    address: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not len(self.texts):
            raise ValueError("texts: got none, takes one or more")
        for name in ("log_probs", "lengths", "log_weights"):
            if (given := getattr(self, name)) is not None and np.shape(given) != (len(self.texts),):
                raise ValueError(f"{name}: got shape {np.shape(given)}, takes ({len(self.texts)},)")

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: Sequence[int] | np.ndarray) -> Candidates:
        """Those at `rows`, in that order."""
        part = lambda x: None if x is None else np.asarray(x)[np.asarray(rows, int)]
        return dataclasses.replace(self, texts=[self.texts[int(i)] for i in rows], log_probs=part(self.log_probs),
                                   lengths=part(self.lengths), log_weights=part(self.log_weights))

    def rng(self, seed: int) -> np.random.Generator:
        """Random numbers of this prompt, for a rule that draws."""
        said = hashlib.blake2b(repr(self.prompt).encode(errors="surrogatepass"), digest_size=8).digest()
        return np.random.default_rng(np.random.SeedSequence([seed, *(self.address or said)]))

    @property
    def probable(self) -> np.ndarray:
        """`log_probs`.

        Raises:
            ValueError: they are not known.
        """
        if self.log_probs is None:
            raise ValueError("log_probs: got None, but the rule weighs candidates by how probable they are")
        return np.asarray(self.log_probs, np.float64)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a rule chose among candidates.

    Attributes:
        index: of the chosen one. scores: `f64[n]`, of each; the larger the better. -inf: left out.
    """

    __repr__ = short

    index: int
    scores: np.ndarray


class Rule(abc.ABC):
    """A rule that chooses among candidates: derive a frozen dataclass from this, whose fields are its options."""

    @abc.abstractmethod
    def scores(self, candidates: Candidates) -> np.ndarray:
        """`f64[n]`: how good each candidate is; the larger the better."""

    def choose(self, candidates: Candidates) -> Choice:
        """The candidate with the largest score; of several such the first.

        Raises:
            ValueError: a score is a NaN.
        """
        scores = np.asarray(self.scores(candidates), np.float64)
        if scores.shape != (len(candidates),):
            raise ValueError(f"{type(self).__name__}: got scores of shape {scores.shape}, takes ({len(candidates)},)")
        if np.isnan(scores).any():
            raise ValueError(f"{type(self).__name__}: the score of candidate {int(np.isnan(scores).argmax())} is a NaN")
        return Choice(int(scores.argmax()), scores)


def candidates_of(result: Result, prompts: Sequence[Any], samples: int, request: Request) -> list[Candidates]:
    """The candidates of each prompt, from a generation with so many samples of each.

    Args:
        request: that these are answers to, or one of the same prompts.

    Raises:
        ValueError: the model has no tokenizer, so there are no texts.
    """
    if result.text is None:
        raise ValueError("lm: has no tokenizer, and rules choose among texts")
    sums = None if result.logprobs is None else result.logprobs.raw.astype(np.float64).sum(1)
    weights = None if result.logprobs is None else result.log_weights
    out = []
    for i, prompt in enumerate(prompts):
        rows = slice(i * samples, (i + 1) * samples)
        out.append(Candidates(result.text[rows], prompt, None if sums is None else sums[rows],
                              result.lengths[rows].astype(np.int64), None if weights is None else weights[rows],
                              (*request.seeds[i].tolist(), int(request.request_ids[i]))))
    return out
