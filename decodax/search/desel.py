"""DeSel: lists whose items come from several texts, chosen by their likelihood."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from decodax.common.registry import FUNCTIONS
from decodax.engine.methods import text_model
from decodax.engine.result import Result
from decodax.front.generate import generate
from decodax.io.load import LM
from decodax.io.prompts import read_prompts

Spans = Callable[[str], Sequence[tuple[int, int]]]
"""A function of a text that returns the begin and the end of each item in it."""

Threshold = Literal["mean", "least"] | float


def separated(by: str = ";") -> Spans:
    """Returns a function that finds the items of a text, for the argument `items` of `desel`.

    Args:
        by: the separator between two items. White space around an item does not belong to it.

    >>> text = "a b; c ;; d"
    >>> [text[i:j] for i, j in separated()(text)]
    ['a b', 'c', 'd']
    """
    inner = re.compile(rf"[^{re.escape(by)}]+")

    def spans(text: str) -> list[tuple[int, int]]:
        found = []
        for match in inner.finditer(text):
            item = match.group()
            if item.strip():
                begin = match.start() + len(item) - len(item.lstrip())
                found.append((begin, begin + len(item.strip())))
        return found

    return spans


@dataclasses.dataclass(frozen=True)
class Selected:
    """The result of `desel`.

    Attributes:
        items: the items of each prompt: those of the greedy text, then the added items, the most likely first.
        scores: the mean log-probability of the tokens of each item.
        greedy: number of items of each greedy text.
        thresholds: the score that an added item had to reach, for each prompt.
        texts: the greedy text of each prompt, followed by the samples.
    """

    items: list[list[str]]
    scores: list[list[float]]
    greedy: list[int]
    thresholds: list[float]
    texts: list[list[str]]


@FUNCTIONS.register("search.desel", "Rethinking Model Selection and Decoding for Keyphrase Generation with "
                    "Pre-trained Sequence-to-Sequence Models", "Wu, Ahmad and Chang 2023",
                    "a list as greedy decoding writes it, and likely items of samples")
def desel(lm: LM | Any, prompts: Any, num_samples: int = 10, *, items: Spans | None = None,
          threshold: Threshold = "mean",
          same: Callable[[str], Any] = str.lower, temperature: float = 1.0, **sampling: Any) -> Selected:
    """DeSel (Wu, Ahmad and Chang, 2023): extends the list of greedy decoding by likely items of samples.

    The score of an item is the mean log-probability of its tokens under the model; if it occurs in several texts, the
    largest score counts. All items of the greedy text are kept. Items of the samples are added if their score reaches a
    threshold that is computed from the scores of the greedy items. The paper's threshold is not public as code; here it
    is an option, by default the mean.

    Args:
        lm: the model.
        prompts: one or several.
        num_samples: number of samples of each prompt.
        items: returns the begin and end of each item in a text. None: `separated(";")`.
        threshold: "mean" or "least" of the scores of the greedy items, or a number. Without greedy items, "mean" and
            "least" add all items.
        same: returns a key of an item; items with equal keys count as one.
        temperature: temperature of the samples.
        sampling: further arguments of `generate`; `top_k` and similar options apply to the samples only.

    Raises:
        ValueError: a model without a tokenizer, an unknown threshold, or as in `generate`.

    >>> import decodax as dx
    >>> out = dx.search.desel(dx.load("pycode"), "import ", 4, items=separated(chr(10)), max_new_tokens=12)
    >>> len(out.texts[0]), out.greedy[0] <= len(out.items[0])
    (5, True)
    """
    lm = text_model(lm, "desel looks for items in texts")
    if threshold not in ("mean", "least") and (isinstance(threshold, bool) or not isinstance(threshold, (int, float))):
        raise ValueError(f"threshold: got {threshold!r}, takes 'mean', 'least' or a log-probability")
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    spans = separated() if items is None else items
    warm = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
    ids = read_prompts(lm, given)
    first = generate(lm, given, **{k: v for k, v in sampling.items() if k not in warm}, temperature=0.0, logprobs=0)
    more = generate(lm, given, num_samples=num_samples, temperature=temperature, logprobs=0, **sampling)
    out = Selected([], [], [], [], [])
    for p in range(len(given)):
        rows = [(first, p), *((more, p * num_samples + i) for i in range(num_samples))]
        texts: list[str] = []
        best: dict[Any, float] = {}
        shown: dict[Any, str] = {}
        own: list[Any] = []
        for j, (result, row) in enumerate(rows):
            text, begins = _places(lm, ids[p], result, row)
            assert result.logprobs is not None
            log_p = result.logprobs.raw[row].astype(np.float64)
            for begin, end in spans(text):
                inside = [t for t in range(len(begins) - 1) if begins[t] < end and begins[t + 1] > begin]
                if not inside:
                    continue
                key = same(text[begin:end])
                score = float(log_p[inside].mean())
                if key not in best:
                    shown[key] = text[begin:end]
                    own += [key] if j == 0 else []
                best[key] = max(best.get(key, -np.inf), score)
            texts.append(text)
        mine = [best[key] for key in own]
        cut = float(threshold) if not isinstance(threshold, str) else -np.inf if not mine else float(
            np.mean(mine) if threshold == "mean" else min(mine))
        others = sorted((key for key in best if key not in own and best[key] >= cut), key=lambda key: -best[key])
        chosen = [*own, *others]
        out.items.append([shown[key] for key in chosen])
        out.scores.append([best[key] for key in chosen])
        out.greedy.append(len(own))
        out.thresholds.append(cut)
        out.texts.append(texts)
    return out


def _places(lm: LM, prompt: list[int], result: Result, row: int) -> tuple[str, list[int]]:
    """Returns the text of a row, and the index in it at which each of its tokens begins; a last entry is the end of the
    text."""
    assert lm.tokenizer is not None and result.text is not None
    text, ids = result.text[row], result.row(row).tolist()
    pieces = lm.tokenizer.detokenizer(prompt)
    begins, held = [0], 0
    for token in ids:
        held += len(pieces.feed([token]))
        begins.append(min(held, len(text)))
    return text, begins
