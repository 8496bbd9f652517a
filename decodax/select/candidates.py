"""Several answers to one prompt, and what it means to choose among them."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.common.arguments import shown, whole
from decodax.common.registry import SELECTS
from decodax.common.struct import short
from decodax.core.checks import instance
from decodax.engine.answers import Select
from decodax.engine.methods import text_model
from decodax.engine.names import without
from decodax.engine.request import Request
from decodax.engine.result import Result
from decodax.front.generate import generate, merge
from decodax.front.options import merged
from decodax.io.load import LM


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


@dataclasses.dataclass(frozen=True)
class SelectionRule(Select):
    """A rule that chooses among candidates: derive a frozen dataclass from this, whose fields are its options.

    Attributes:
        greedy: whether the answer at temperature 0 is one of the candidates, the first (hedged sampling).
    """

    greedy: bool = dataclasses.field(default=False, kw_only=True)

    def with_model(self, lm: LM) -> SelectionRule:
        """Returns the rule for candidates that `lm` writes; a rule that asks a model of its own asks `lm` if it was
        given none."""
        return self

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

    def drawn(self, lm: LM, prompts: Any, n: int, sampling: Mapping[str, Any]) -> Chosen:
        """Samples `n` answers to each prompt and chooses one of them; `sampling` as of `decodax.generate`."""
        clock, read = time.monotonic(), Request.read(lm, prompts, **sampling)
        # both calls share the time
        left = lambda: {} if read.max_time is None else {
            "max_time": max(clock + read.max_time - time.monotonic(), 1e-6)}
        asked, parts, counts = _asked(prompts, read.prompts), [], []
        if self.greedy:
            surest = {"logprobs": 0, **sampling, **left(), "temperature": 0.0}
            parts.append(generate(lm, prompts, num_samples=1, **surest))
            counts.append(1)
        if n > self.greedy:
            parts.append(generate(lm, prompts, num_samples=n - self.greedy, **{"logprobs": 0, **sampling, **left()}))
            counts.append(n - self.greedy)
        each = [candidates_of(part, asked, count, read) for part, count in zip(parts, counts, strict=True)]
        candidates = each[0] if len(each) == 1 else [_both(a, b) for a, b in zip(*each, strict=True)]
        who = f"{type(self).__name__}.choose"
        choices = [instance(who, self.choose(one), Choice, "a Choice") for one in candidates]
        rows = [parts[0 if c.index < counts[0] else 1].select([
            p * (counts[0] if c.index < counts[0] else counts[1]) + (c.index if c.index < counts[0]
                                                                     else c.index - counts[0])])
            for p, c in enumerate(choices)]
        return Chosen([one.texts[c.index] for one, c in zip(candidates, choices, strict=True)], candidates, choices,
                      merge(rows, list(range(len(rows))), 1, lm.pad))

    def run(self, lm: Any, prompts: Any, num_samples: int, options: Mapping[str, Any]) -> Result:
        return choose(lm, prompts, self, num_samples=num_samples, **options).answers()


@dataclasses.dataclass(frozen=True)
class ModelRule(SelectionRule):
    """A rule that asks a model about the candidates.

    Attributes:
        lm: the model that is asked, from `decodax.load`; default the one that writes the candidates.
    """

    lm: LM | None = None

    def with_model(self, lm: LM) -> SelectionRule:
        return dataclasses.replace(self, lm=lm) if self.lm is None else self

    @property
    def model(self) -> LM:
        """The model that is asked.

        Raises:
            ValueError: there is none yet.
        """
        if self.lm is None:
            raise ValueError(f"lm: {type(self).__name__} asks a model, and got none; takes lm=decodax.load(...), or a "
                             "call of generate(select=...)")
        return self.lm


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Answers that a rule has chosen, one a prompt.

    Attributes:
        text: of each. candidates, choices: what there was to choose from, and the scores. result: the chosen rows as
            `decodax.generate` gives them.
    """

    __repr__ = short

    text: list[str]
    candidates: list[Candidates]
    choices: list[Choice]
    result: Result

    @property
    def index(self) -> list[int]:
        """Which of its candidates was chosen, of each prompt."""
        return [choice.index for choice in self.choices]

    def __len__(self) -> int:
        return len(self.text)

    def answers(self) -> Result:
        """Returns the chosen answers as `decodax.generate` gives them. `findings` has `index`, the chosen candidate of
        each prompt, and `texts` and `scores` of all candidates, `[P, n]`."""
        texts = np.array([list(c.texts) for c in self.candidates], object)
        scores = np.stack([np.asarray(choice.scores, np.float64) for choice in self.choices])
        return dataclasses.replace(self.result, text=self.text, findings={
            "index": np.array(self.index), "texts": texts, "scores": scores})


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


def choose(lm: LM | str | os.PathLike[str], prompts: Any, by: str | SelectionRule = "self-consistency", *,
           num_samples: int = 8, **sampling: Any) -> Chosen:
    """Answers each prompt `num_samples` times and takes one answer by a rule.

    >>> import decodax as dx
    >>> dx.select.choose("pycode", "def area(", "mbr", num_samples=8, temperature=0.8).text           # doctest: +SKIP

    Args:
        lm, prompts: as of `generate`.
        by: a rule (`decodax.select.best_of_n(reward=judge)`), or the string of one (`"mbr:greedy=true"`).
        num_samples: samples of each prompt.
        sampling: arguments of `generate`: `temperature`, `min_p`, `algorithm`, `stop`, ... With `algorithm` any
            system draws the samples.

    Raises:
        ValueError: an unknown rule or option, or one that is missing; a model without a tokenizer; or as `generate`.
        TypeError: as `generate`.
        TimeoutError: `max_time` was out before the constraints had been built.
    """
    lm, num_samples = text_model(lm, "rules choose among texts"), whole("num_samples", num_samples, 1)
    sampling = without("choose", merged(sampling.pop("sampling", None), sampling),
                       {"num_return_sequences": "give num_samples"})
    rule = SELECTS.object(by, lm)
    if not isinstance(rule, SelectionRule):
        raise TypeError(f"by: got {shown(by)}, takes a function of decodax.select or the name of one")
    return rule.with_model(lm).drawn(lm, prompts, num_samples, sampling)


def _asked(prompts: Any, ids: Any) -> list[Any]:
    """The prompts as they were given, one by one; as ids where that is not plain."""
    given = [prompts] if isinstance(prompts, str) else prompts
    return list(given) if isinstance(given, (list, tuple)) and len(given) == len(ids) else list(ids)


def _both(a: Candidates, b: Candidates) -> Candidates:
    join: Any = lambda x, y: None if x is None or y is None else np.concatenate([x, y])
    return Candidates([*a.texts, *b.texts], a.prompt, join(a.log_probs, b.log_probs), join(a.lengths, b.lengths),
                      join(a.log_weights, b.log_weights), a.address)
