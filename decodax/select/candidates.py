"""The candidate answers to a prompt, and the base classes of rules that choose among them."""

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
from decodax.common.options import Checked
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
    """`n` candidate answers to one prompt.

    Attributes:
        texts: the `n` texts.
        prompt: the prompt; None if it is not known.
        log_probs: `f64[n]`, the log-probability of each text under the model, summed over its tokens, in nats; None if
            it is not known.
        lengths: `i64[n]`, number of tokens of each text; None if it is not known.
        log_weights: `f64[n]`, log of the ratio of each text's probability under the model to its probability under the
            distribution from which it was sampled (`Result.log_weights`); None if it is not known.
        address: numbers that seed the random draws of a rule: the prompt's seed and request id. They make the draws
            independent of the other prompts of a call. None: the draws are seeded by the text of the prompt.
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
        """Returns the candidates at the indices `rows`, in that order."""
        part = lambda x: None if x is None else np.asarray(x)[np.asarray(rows, int)]
        return dataclasses.replace(self, texts=[self.texts[int(i)] for i in rows], log_probs=part(self.log_probs),
                                   lengths=part(self.lengths), log_weights=part(self.log_weights))

    def rng(self, seed: int) -> np.random.Generator:
        """Returns the random generator of this prompt, for a rule that draws at random."""
        said = hashlib.blake2b(repr(self.prompt).encode(errors="surrogatepass"), digest_size=8).digest()
        return np.random.default_rng(np.random.SeedSequence([seed, *(self.address or said)]))

    @property
    def probable(self) -> np.ndarray:
        """`log_probs` as an array, for rules that need them.

        Raises:
            ValueError: they are not known.
        """
        if self.log_probs is None:
            raise ValueError("log_probs: got None, but the rule weighs candidates by how probable they are")
        return np.asarray(self.log_probs, np.float64)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of a rule among the candidates of a prompt.

    Attributes:
        index: index of the chosen candidate.
        scores: `f64[n]`, the score of each candidate; larger is better. -inf: the candidate was excluded.
    """

    __repr__ = short

    index: int
    scores: np.ndarray


@dataclasses.dataclass(frozen=True)
class SelectionRule(Checked, Select):
    """Base class of rules that choose among candidates: a frozen dataclass whose fields are the options of the rule.

    A derived class defines `scores`.

    Attributes:
        greedy: True adds the answer at temperature 0 as the first candidate (hedged sampling).
    """

    greedy: bool = dataclasses.field(default=False, kw_only=True)

    def with_model(self, lm: LM) -> SelectionRule:
        """Returns the rule for candidates that `lm` generates. A rule that needs a model and has none uses `lm`."""
        return self

    @abc.abstractmethod
    def scores(self, candidates: Candidates) -> np.ndarray:
        """Returns the score of each candidate, `f64[n]`; larger is better."""

    def choose(self, candidates: Candidates) -> Choice:
        """Chooses the candidate with the largest score, the first one of equals.

        Raises:
            ValueError: a score is NaN, or the scores have the wrong shape.
        """
        scores = np.asarray(self.scores(candidates), np.float64)
        if scores.shape != (len(candidates),):
            raise ValueError(f"{type(self).__name__}: got scores of shape {scores.shape}, takes ({len(candidates)},)")
        if np.isnan(scores).any():
            raise ValueError(f"{type(self).__name__}: the score of candidate {int(np.isnan(scores).argmax())} is a NaN")
        return Choice(int(scores.argmax()), scores)

    def drawn(self, lm: LM, prompts: Any, n: int, sampling: Mapping[str, Any]) -> Chosen:
        """Samples `n` answers to each prompt and chooses one of them. `sampling` holds arguments of `decodax.generate`.
        """
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
    """Base class of rules that ask a model about the candidates.

    Attributes:
        lm: the model that is asked, a result of `decodax.load`. None: the model that generates the candidates.
    """

    lm: LM | None = None

    def with_model(self, lm: LM) -> SelectionRule:
        return dataclasses.replace(self, lm=lm) if self.lm is None else self

    @property
    def model(self) -> LM:
        """The model that is asked.

        Raises:
            ValueError: no model was given, and the rule is not used in a call of `generate` or `choose`.
        """
        if self.lm is None:
            raise ValueError(f"lm: {type(self).__name__} asks a model, and got none; takes lm=decodax.load(...), or a "
                             "call of generate(select=...)")
        return self.lm


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The answers that a rule has chosen, with all candidates.

    Attributes:
        text: the chosen answer to each prompt.
        candidates: the candidates of each prompt.
        choices: the choice for each prompt, with the scores of its candidates.
        result: the rows of the chosen answers as a result of `decodax.generate`.
    """

    __repr__ = short

    text: list[str]
    candidates: list[Candidates]
    choices: list[Choice]
    result: Result

    @property
    def index(self) -> list[int]:
        """Index of the chosen candidate of each prompt."""
        return [choice.index for choice in self.choices]

    def __len__(self) -> int:
        return len(self.text)

    def answers(self) -> Result:
        """Returns the chosen answers as a result of `decodax.generate`.

        Its `findings` are `index`, the index of the chosen candidate of each prompt, and `texts` and `scores` of all
        candidates, `[P, n]`.
        """
        texts = np.array([list(c.texts) for c in self.candidates], object)
        scores = np.stack([np.asarray(choice.scores, np.float64) for choice in self.choices])
        return dataclasses.replace(self.result, text=self.text, findings={
            "index": np.array(self.index), "texts": texts, "scores": scores})


def candidates_of(result: Result, prompts: Sequence[Any], samples: int, request: Request) -> list[Candidates]:
    """Returns the candidates of each prompt from a generation.

    Args:
        result: the generation.
        prompts: the prompts.
        samples: number of samples of each prompt.
        request: the request of the generation, or another one with the same prompts; it supplies seeds and request ids.

    Raises:
        ValueError: the model has no tokenizer, so that there are no texts.
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
    """Samples `num_samples` answers to each prompt and chooses one of them by a rule.

    >>> import decodax as dx
    >>> dx.select.choose("pycode", "def area(", "mbr", num_samples=8, temperature=0.8).text           # doctest: +SKIP

    Args:
        lm: the model, or a name for `load`.
        prompts: one or several, as for `generate`.
        by: a rule (`decodax.select.best_of_n(reward=judge)`), or the string of one (`"mbr:greedy=true"`).
        num_samples: number of samples of each prompt.
        sampling: arguments of `generate`: `temperature`, `min_p`, `algorithm`, `stop`, ...

    Raises:
        ValueError: an unknown rule or option, or one that is missing; a model without a tokenizer; or as in `generate`.
        TypeError: as in `generate`.
        TimeoutError: `max_time` was over before the constraints had been built.
    """
    lm, num_samples = text_model(lm, "rules choose among texts"), whole("num_samples", num_samples, 1)
    sampling = without("choose", merged(sampling.pop("sampling", None), sampling),
                       {"num_return_sequences": "give num_samples"})
    rule = SELECTS.object(by, lm)
    if not isinstance(rule, SelectionRule):
        raise TypeError(f"by: got {shown(by)}, takes a function of decodax.select or the name of one")
    return rule.with_model(lm).drawn(lm, prompts, num_samples, sampling)


def _asked(prompts: Any, ids: Any) -> list[Any]:
    """Returns a list of the prompts as the user gave them; token ids where the input is not a list with one entry for
    each prompt."""
    given = [prompts] if isinstance(prompts, str) else prompts
    return list(given) if isinstance(given, (list, tuple)) and len(given) == len(ids) else list(ids)


def _both(a: Candidates, b: Candidates) -> Candidates:
    join: Any = lambda x, y: None if x is None or y is None else np.concatenate([x, y])
    return Candidates([*a.texts, *b.texts], a.prompt, join(a.log_probs, b.log_probs), join(a.lengths, b.lengths),
                      join(a.log_weights, b.log_weights), a.address)
