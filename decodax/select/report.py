"""Reports: the correlation of likelihood and quality, which shows what kind of decoding suits a task, and the
dependence of answers on their rationales."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.registry import FUNCTIONS
from decodax.common.struct import short
from decodax.front.score import score
from decodax.io.load import LM
from decodax.select.candidates import Candidates


@dataclasses.dataclass(frozen=True)
class Alignment:
    """The agreement of likelihood and quality; see `alignment`.

    Attributes:
        pearson: correlation of log-probability and utility, averaged over the prompts whose candidates differ in both;
            NaN if there are none.
        spearman: rank correlation, likewise.
        prompts: number of these prompts.
        best: utility of the best candidate, averaged over all prompts.
        likeliest: utility of the most probable candidate, averaged over all prompts.
        mean: mean utility of the candidates, averaged over all prompts.
    """

    pearson: float
    spearman: float
    prompts: int
    best: float
    likeliest: float
    mean: float

    def __str__(self) -> str:
        return (f"likelihood and utility: Pearson {self.pearson:.2f}, Spearman {self.spearman:.2f} ({self.prompts} "
                f"prompts); utility of the likeliest {self.likeliest:.3f}, of the best {self.best:.3f}, on average "
                f"{self.mean:.3f}")


@FUNCTIONS.register("select.alignment", "Language Model Decoding as Likelihood-Utility Alignment",
                    "Josifoski et al. 2023", "whether what the model finds likely is good")
def alignment(candidates: Sequence[Candidates], utility: Callable[[Any, Sequence[str]], Any],
              per_token: bool = False) -> Alignment:
    """Measures whether texts that the model finds likely are good (likelihood-utility alignment: Josifoski et al.,
    2023).

    Where likelihood and utility agree, greedy decoding and beam search work. Where they do not, sampling with a reward
    model or minimum Bayes risk is worth its cost.

    Args:
        candidates: the candidates of each prompt, with log-probabilities: `dx.select.choose(...).candidates`.
        utility: takes a prompt and its candidates, and returns a number for each; larger is better.
        per_token: True divides log-probabilities by the number of tokens.

    Raises:
        ValueError: log-probabilities, or lengths with `per_token`, are not known.
    """
    if not candidates:
        raise ValueError("candidates: got none, takes those of one prompt or more")
    pairs, best, likeliest, mean = [], [], [], []
    for each in candidates:
        worth = np.asarray(utility(each.prompt, each.texts), np.float64)
        log_p = each.probable
        if per_token:
            if each.lengths is None:
                raise ValueError("lengths: got None, but log-probabilities are asked for by token")
            log_p = log_p / np.maximum(each.lengths, 1)
        best.append(worth.max())
        likeliest.append(worth[int(log_p.argmax())])
        mean.append(worth.mean())
        if np.ptp(worth) > 0 and np.ptp(log_p) > 0:
            pairs.append((np.corrcoef(log_p, worth)[0, 1], np.corrcoef(_ranks(log_p), _ranks(worth))[0, 1]))
    found = np.array(pairs).mean(0) if pairs else np.full(2, np.nan)
    return Alignment(float(found[0]), float(found[1]), len(pairs), float(np.mean(best)), float(np.mean(likeliest)),
                     float(np.mean(mean)))


def _ranks(x: np.ndarray) -> np.ndarray:
    """Returns the rank of each entry, from 1 on; equal entries get their mean rank."""
    _, group, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[group]


@dataclasses.dataclass(frozen=True)
class Faithfulness:
    """The dependence of answers on their rationales; see `faithfulness`.

    Attributes:
        shares: `f64[k]`, the shares of the rationale that were kept before the answer, from 0 to 1.
        log_probs: `f64[k]`, mean log-probability of the first answer after each share.
        same: `f64[k]`, share of the problems whose most probable answer is the same as after the whole rationale; NaN
            if no problem has several answers.
        right: `f64[k]`, share of the problems whose most probable answer is the first one; NaN likewise.
        area: area above the curve `same`, 0 to 1: 0 if the answers never depend on the rationale, 1 if they need all of
            it.
        each: `f64[n, k]`, log-probability of the first answer to each problem.
    """

    __repr__ = short

    shares: np.ndarray
    log_probs: np.ndarray
    same: np.ndarray
    right: np.ndarray
    area: float
    each: np.ndarray

    def __str__(self) -> str:
        rows = "; ".join(f"{s:.0%}: {p:.2f}" + ("" if np.isnan(a) else f", same answer {a:.0%}")
                         for s, p, a in zip(self.shares, self.log_probs, self.same, strict=True))
        return (f"log-probability of the answer after each share of the rationale: {rows}; area over the curve "
                f"{self.area:.2f}")


@FUNCTIONS.register("select.faithfulness", "Measuring Faithfulness in Chain-of-Thought Reasoning", "Lanham et al. 2023",
                    "whether answers rest on their rationales")
def faithfulness(lm: LM, problems: Sequence[tuple[str, str, Sequence[str]]],
                 shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0), *, join: str = "") -> Faithfulness:
    """Measures whether answers depend on their rationales (early answering: Lanham et al., 2023).

    The rationale is cut short at a space, and the log-probabilities of the answers are computed after it. If the
    answers do not change without the rationale, they do not come from it, and it can be cut early (FastCoT, TrimR).

    Args:
        lm: a result of `load`.
        problems: prompt, rationale and answers of each problem; the first answer is the correct one, or the only one.
        shares: shares of the rationale that are kept, ascending; the last is 1.
        join: text between the rationale and the answer, such as "\\nAnswer: ".

    Raises:
        ValueError: no problem, a problem without an answer, or `shares` that are not ascending or do not end with 1.
    """
    if not problems or any(not len(answers) for _, _, answers in problems):
        raise ValueError("problems: takes one or more, each with an answer")
    part = np.asarray(shares, np.float64)
    if not len(part) or part[-1] != 1 or (np.diff(part) <= 0).any() or part[0] < 0:
        raise ValueError(f"shares: got {list(shares)}, takes ascending numbers from 0 on, the last of them 1")
    pairs = [(prompt + shortened(rationale, s) + join, answer)
             for prompt, rationale, answers in problems for s in part for answer in answers]
    flat = iter(score(lm, pairs).sum.tolist())
    found = [np.array([[next(flat) for _ in answers] for _ in part]) for _, _, answers in problems]
    each = np.array([x[:, 0] for x in found])
    same, right = np.full(len(part), np.nan), np.full(len(part), np.nan)
    if several := [x for x in found if x.shape[1] > 1]:
        best = np.array([x.argmax(1) for x in several])
        same, right = (best == best[:, -1:]).mean(0), (best == 0).mean(0)
    area = float(1 - np.trapezoid(same, part) / (part[-1] - part[0])) if len(part) > 1 else float("nan")
    return Faithfulness(part, each.mean(0), same, right, area, each)


def shortened(text: str, share: float) -> str:
    """Returns the first words of a text: the share `share` of them, rounded."""
    words = re.findall(r"\s*\S+", text)
    return text if share >= 1 else "".join(words[:round(share * len(words))])
