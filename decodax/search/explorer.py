"""The base classes of searches, their result, and helpers for weights and scores."""

from __future__ import annotations

import abc
import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from decodax.common.arguments import shown
from decodax.common.options import Checked, Count
from decodax.common.registry import SEARCHES
from decodax.common.struct import short
from decodax.core.checks import instance
from decodax.engine.answers import Search
from decodax.engine.methods import model, text_model
from decodax.engine.names import without
from decodax.engine.result import Result
from decodax.front.options import merged
from decodax.io.load import LM
from decodax.search.canvases import Canvases
from decodax.search.forks import Forks

Score = Callable[[Any, Sequence[Any]], Any]
"""`score(prompt, texts)` returns a list or array with a number for each text, which may be unfinished: the result of a
process reward model, a verifier or a constraint, for example."""


@dataclasses.dataclass(frozen=True)
class Explored:
    """The result of a search. `P` is the number of prompts, `n` the number of rows of a prompt.

    Attributes:
        text: the chosen text of each prompt; token ids if the model has no tokenizer.
        index: the row of each chosen text.
        texts: the texts of all rows, `[P][n]`.
        scores: `f64[P, n]`, the scores by which texts were chosen.
        weights: `f64[P, n]`, weights of the rows that sum to 1, if the rows are weighted samples; else None.
        log_evidence: `f64[P]`, the log of the estimated normalizing constant, if the search estimates it; else None.
        tokens: number of tokens generated, including rows that were dropped.
        fed: number of tokens that were appended from outside, such as tool results.
        result: the rows as a result of `decodax.generate`.
        details: further findings for each prompt, such as the threads of `apar`; None for most searches.
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

    def answers(self) -> Result:
        """Returns the chosen text of each prompt as a result of `decodax.generate`.

        Its `findings` are `texts`, `scores` and `weights` (each `[P, n]`), `index` (`[P]`, the chosen row),
        `log_evidence` and `details` (`[P]`).
        """
        rows = np.arange(len(self)) * (len(self.result) // max(len(self), 1))
        whole = len(self.texts[0]) * len(self) == len(self.result)
        found = self.result.select(rows + (self.index if whole else 0))
        text = self.text if found.text is not None else None
        kept = {"texts": _objects(self.texts), "index": self.index, "scores": self.scores, "weights": self.weights,
                "log_evidence": self.log_evidence, "details": None if self.details is None else _objects(self.details)}
        return dataclasses.replace(found, text=text, findings={k: x for k, x in kept.items() if x is not None})


@dataclasses.dataclass(frozen=True)
class Explorer(Checked, Search):
    """Base class of searches over texts that grow step by step: a frozen dataclass whose fields are the search's
    options.

    A derived class defines `search`, and `rows` or a field `n`. `search` gets a `Forks`, extends and forks its rows,
    and returns scores of the rows.

    Attributes:
        until: strings that end a step.
        step_tokens: maximum number of tokens of a step. If neither is given, a step is the whole text.
        reads: empty if the search works on token ids. Otherwise a verb phrase that says what it does with texts, for
            the error that a model without a tokenizer raises.
    """

    until: str | tuple[str, ...] | None = dataclasses.field(default=None, kw_only=True)
    step_tokens: Count | None = dataclasses.field(default=None, kw_only=True)

    reads: ClassVar[str] = ""

    @property
    def rows(self) -> int:
        """Number of rows of a prompt; by default the field `n`."""
        return int(self.n)     # type: ignore[attr-defined]

    def begin(self, lm: Any, prompts: Any, **options: Any) -> Forks:
        """Prefills the prompts and returns the initial rows. The options are those of `Forks.begin`.

        Raises:
            ValueError: a model without a tokenizer, if the search works on texts; or as in `Forks.begin`.
        """
        lm = text_model(lm, f"{type(self).__name__} {self.reads}") if self.reads else lm
        return Forks.begin(lm, prompts, self.rows, **options)

    @abc.abstractmethod
    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        """Runs the search on the initial rows and returns their scores. `asked` holds the prompts as the user gave
        them."""

    def run(self, lm: Any, prompts: Any, options: Mapping[str, Any]) -> Result:
        return explore(lm, prompts, self, **options).answers()


@dataclasses.dataclass(frozen=True)
class CanvasExplorer(Checked, Search):
    """Base class of searches over canvases that are denoised step by step. It is used as `Explorer` is, with `Canvases`
    in place of `Forks`."""

    @property
    def rows(self) -> int:
        """Number of rows of a prompt; by default the field `n`."""
        return int(self.n)     # type: ignore[attr-defined]

    @abc.abstractmethod
    def search(self, canvases: Canvases, asked: Sequence[Any]) -> Ranked:
        """Runs the search and returns the scores of the rows, which hold the resulting canvases afterwards."""

    def run(self, lm: Any, prompts: Any, options: Mapping[str, Any]) -> Result:
        return explore(lm, prompts, self, **options).answers()


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Scores of the rows of a search, returned by `Explorer.search`, for `P` prompts with `n` rows each.

    Attributes:
        scores: `f64[P, n]`, or `f64[P, m]` with `texts`.
        index: `i64[P]`, the chosen row of each prompt, from 0 to `n - 1`. None: the row with the largest score.
        weights: `f64[P, n]`, weights that sum to 1 for each prompt if the rows are weighted samples; else None.
        log_evidence: `f64[P]`, the log of the estimated normalizing constant (see `SMC`), or None.
        texts: `m` texts for each prompt, `[P][m]`, for searches whose texts are not single rows; `scores` and `index`
            then refer to them. None: the texts of the rows.
        details: a further finding of any type for each prompt, `[P]`, or None.
    """

    __repr__ = short

    scores: np.ndarray
    index: np.ndarray | None = None
    weights: np.ndarray | None = None
    log_evidence: np.ndarray | None = None
    texts: list[list[Any]] | None = None
    details: list[Any] | None = None


def scored(score: Score, forks: Forks, asked: Sequence[Any], which: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns `f64[P, n]`: new scores of the rows in `which`, and the `old` scores of the other rows.

    Args:
        score: the user's function; takes a prompt and a list of its texts, and returns a score for each text.
        forks: the rows.
        asked: the prompts as the user gave them.
        which: `bool[P, n]`.
        old: `f64[P, n]`.

    Raises:
        ValueError: a score is NaN, or their number differs from that of the texts.
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
    """Normalizes weights, given as logarithms, to the sum 1 along the last axis; equal weights if all are 0."""
    top = log_weights.max(-1, keepdims=True)
    w = np.where(np.isfinite(top), np.exp(log_weights - np.where(np.isfinite(top), top, 0)), 1.0)
    return w / w.sum(-1, keepdims=True)


def log_mean(log_weights: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the mean of weights, given as logarithms, along the last axis; -inf if all weights are
    0."""
    top = log_weights.max(-1)
    safe = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        return safe + np.log(np.exp(log_weights - safe[..., None]).mean(-1))


def resample(weights: np.ndarray, rng: np.random.Generator, how: str = "multinomial") -> np.ndarray:
    """Draws, for each of `n` new rows, the weighted row that it continues: `i64[n]`. A row that is drawn keeps its own
    place for its first copy.

    Args:
        weights: `f64[n]`, summing to 1.
        rng: random numbers.
        how: "multinomial": independent draws; "systematic": one random offset for `n` equally spaced points.
    """
    n = len(weights)
    u = rng.random(n) if how == "multinomial" else (np.arange(n) + rng.random()) / n
    ends = np.cumsum(weights)
    chosen = np.searchsorted(ends / ends[-1], u, side="right")
    return settled(np.minimum(chosen, np.flatnonzero(weights)[-1]))     # u may have been rounded to 1


def settled(chosen: np.ndarray) -> np.ndarray:
    """Reorders drawn rows so that as many as possible stay in their own place: returns a permutation of `chosen`
    (`i64[n]`, row indices) in which entry `i` is `i` for each row `i` that was drawn."""
    n = len(chosen)
    left = np.bincount(chosen, minlength=n)
    out = np.full(n, -1)
    stays = left > 0
    out[stays] = np.flatnonzero(stays)
    left[stays] -= 1
    out[out < 0] = np.repeat(np.arange(n), left)
    return out


def _objects(values: Sequence[Any]) -> np.ndarray:
    """Returns an object array with one entry for each value; two-dimensional if all values are lists of one length."""
    rows = [list(v) if isinstance(v, list) else v for v in values]
    even = all(isinstance(v, list) for v in rows) and len({len(v) for v in rows}) == 1
    out = np.empty((len(rows), len(rows[0])) if even else len(rows), object)
    for i, row in enumerate(rows):
        if even:
            for j, x in enumerate(row):
                out[i, j] = x
        else:
            out[i] = row
    return out


NOT_HERE = {**dict.fromkeys(("num_samples", "num_return_sequences"), "the search determines the number of rows"),
            "max_time": "max_new_tokens bounds the texts of a search, and its options their number",
            "batch_size": "all prompts are searched together; pass fewer prompts"}


def explore(lm: LM | str | os.PathLike[str], prompts: Any, by: str | Explorer | CanvasExplorer, *,
            until: str | Sequence[str] | None = None, step_tokens: int | None = None, **sampling: Any) -> Explored:
    """Answers each prompt by a search over steps.

    >>> import decodax as dx
    >>> dx.search.explore("pycode", "def area(", dx.search.particle_filter(reward=judge),
    ...                   until="\\n", temperature=0.8).text                                # doctest: +SKIP

    Args:
        lm: the model, or a name for `load`.
        prompts: one or several, as for `generate`.
        by: a search (`decodax.search.particle_filter(n=16, reward=judge)`), or the string of one (`"treepo:n=8"`).
        until: strings that end a step.
        step_tokens: maximum number of tokens of a step. If neither is given, a step is the whole text. Searches over
            canvases take neither: their steps are the denoising steps of the sampler.
        sampling: arguments of `generate`: `temperature`, `max_new_tokens`, `algorithm`, `cache`, `stop`, ... The
            algorithm of a search over texts is any left-to-right one; that of a search over canvases is any masked
            diffusion sampler.

    Raises:
        ValueError: an unknown search or option, or one that is missing; or as in `generate`.
        TypeError: as in `generate`.
    """
    lm = model(lm)
    chosen = SEARCHES.object(by, lm)
    if not isinstance(chosen, (Explorer, CanvasExplorer)):
        raise TypeError(f"by: got {shown(by)}, takes a function of decodax.search or the name of one")
    sampling = without("explore", merged(sampling.pop("sampling", None), sampling), NOT_HERE)
    if (limit := (lm.generation_config or {}).get("max_time")) is not None:
        warnings.warn(f"generation config of {lm.name!r}: max_time: got {limit}, which ends no search", stacklevel=2)
    forks: Forks | Canvases
    if isinstance(chosen, CanvasExplorer):
        if until is not None or step_tokens is not None:
            raise ValueError("until, step_tokens: take None for a search over canvases, whose steps are the sampler's")
        forks = Canvases.begin(lm, prompts, chosen.rows, **sampling)
        found = chosen.search(forks, asked(prompts, forks.prompts))
    else:
        until, step_tokens = until or chosen.until, step_tokens or chosen.step_tokens
        forks = chosen.begin(lm, prompts, until=until, step_tokens=step_tokens, **sampling)
        found = chosen.search(forks, asked(prompts, forks.prompts))
    instance(f"{type(chosen).__name__}.search", found, Ranked, "a Ranked")
    texts = forks.texts() if found.texts is None else found.texts
    index = found.scores.argmax(1) if found.index is None else np.asarray(found.index)
    return Explored(text=[row[int(i)] for row, i in zip(texts, index, strict=True)], index=index, texts=texts,
                    scores=found.scores, weights=found.weights, log_evidence=found.log_evidence, tokens=forks.spent,
                    fed=forks.fed, result=forks.result(), details=found.details)


def asked(prompts: Any, ids: Sequence[list[int]]) -> list[Any]:
    """Returns a list of the prompts as the user gave them; token ids where the input is not a list with one entry for
    each prompt."""
    given = [prompts] if isinstance(prompts, str) else prompts
    same = isinstance(given, (list, tuple)) and len(given) == len(ids) and not all(isinstance(x, int) for x in given)
    return list(given) if same else list(ids)
