"""`choose`: samples answers, and takes one by a rule."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import numpy as np

from decodax.common.arguments import flag, options_of, whole
from decodax.common.registry import SELECTS
from decodax.common.struct import short
from decodax.core.checks import instance
from decodax.engine.methods import text_model
from decodax.engine.request import Request, without
from decodax.front.generate import generate
from decodax.io.load import LM
from decodax.select.candidates import Candidates, Choice, Rule, candidates_of
from decodax.select.finish import first_finish

FIRST = "first-finish"


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Answers that a rule has chosen, one a prompt.

    Attributes:
        text: of each. candidates, choices: what there was to choose from, and the scores.
    """

    __repr__ = short

    text: list[str]
    candidates: list[Candidates]
    choices: list[Choice]

    @property
    def index(self) -> list[int]:
        """Which of its candidates was chosen, of each prompt."""
        return [choice.index for choice in self.choices]

    def __len__(self) -> int:
        return len(self.text)


def choose(lm: LM | str | os.PathLike[str], prompts: Any, by: str | Rule = "self-consistency", *, n: int = 8,
           greedy: bool = False, options: dict[str, Any] | None = None, **sampling: Any) -> Chosen:
    """Answers each prompt `n` times and takes one answer by a rule.

    >>> import decodax as dx
    >>> dx.choose("pycode", "def area(", "mbr", n=8, temperature=0.8).text           # doctest: +SKIP

    Args:
        lm, prompts: as of `generate`.
        by: a rule, or the name of one (`decodax.select.names()`); or "first-finish", which stops as soon as one of the
            samples has ended.
        n: samples of each prompt.
        greedy: whether the answer at temperature 0 stands among the candidates, as the first of `n` (hedged sampling).
        options: of the rule, where it is given by name: `options={"reward": judge}`.
        sampling: arguments of `generate`: `temperature`, `min_p`, `algorithm`, `stop`, ... With `algorithm` any
            system draws the samples.

    Raises:
        ValueError: an unknown rule or option, or one that is missing; a model without a tokenizer; or as `generate`.
        TypeError: as `generate`.
        TimeoutError: `max_time` was out before the constraints had been built.
    """
    lm, clock = text_model(lm, "rules choose among texts"), time.monotonic()
    n, greedy, options = whole("n", n, 1), flag("greedy", greedy), options_of(options)
    sampling = without("choose", sampling, dict.fromkeys(("num_samples", "num_return_sequences"), "give n"))
    if by == FIRST:
        if greedy or options:
            raise ValueError("by: 'first-finish' takes neither greedy nor options")
        candidates, choices = first_finish(lm, prompts, n, **sampling)
        return _chosen(candidates, choices)
    chooser = SELECTS.make(by, **options) if isinstance(by, str) else by
    if not isinstance(chooser, Rule):
        raise TypeError(f"by: got {type(chooser).__name__}, takes a rule or the name of one")
    if not isinstance(by, str) and options:
        raise ValueError("options: got some beside a rule that is made already")
    read = Request.read(lm, prompts, **sampling)
    # both calls share the time
    left = lambda: {} if read.max_time is None else {"max_time": max(clock + read.max_time - time.monotonic(), 1e-6)}
    candidates = _drawn(lm, prompts, read, n - greedy, {**sampling, **left()}) if n > greedy else []
    if greedy:
        best = _drawn(lm, prompts, read, 1, {**sampling, **left(), "temperature": 0.0})
        candidates = [_both(a, b) for a, b in zip(best, candidates, strict=True)] if candidates else best
    choices = [instance(f"{type(chooser).__name__}.choose", chooser.choose(each), Choice, "a Choice")
               for each in candidates]
    return _chosen(candidates, choices)


def _chosen(candidates: list[Candidates], choices: list[Choice]) -> Chosen:
    text = [each.texts[choice.index] for each, choice in zip(candidates, choices, strict=True)]
    return Chosen(text, candidates, choices)


def _drawn(lm: LM, prompts: Any, read: Request, n: int, sampling: dict[str, Any]) -> list[Candidates]:
    noted = {"logprobs": 0, **sampling}
    return candidates_of(generate(lm, prompts, num_samples=n, **noted), _asked(prompts, read.prompts), n, read)


def _asked(prompts: Any, ids: Any) -> list[Any]:
    """The prompts as they were given, one by one; as ids where that is not plain."""
    given = [prompts] if isinstance(prompts, str) else prompts
    return list(given) if isinstance(given, (list, tuple)) and len(given) == len(ids) else list(ids)


def _both(a: Candidates, b: Candidates) -> Candidates:
    join: Any = lambda x, y: None if x is None or y is None else np.concatenate([x, y])
    return Candidates([*a.texts, *b.texts], a.prompt, join(a.log_probs, b.log_probs), join(a.lengths, b.lengths),
                      join(a.log_weights, b.log_weights), a.address)
