"""Similarities of texts, for rules that compare candidates with one another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

ORDERS, BETA = 6, 2
"""Options of chrF: the largest order of n-grams, and the weight of recall relative to precision."""

Ngrams = Sequence[Mapping[str, float]]
"""For each order, 1 to `ORDERS`, the count of each n-gram."""


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Returns the sentence-level chrF (Popović, 2015) of each pair, from 0 to 100: `f64[n, m]`.

    The options are the defaults of sacreBLEU 2: character n-grams up to order 6 without white space, beta 2, and no
    orders that are longer than one of the texts.

    >>> chrf(["the cat"], ["the cat", "a dog"]).round(2).tolist()
    [[100.0, 5.68]]
    """
    ours, theirs = [ngrams(text) for text in hypotheses], [ngrams(text) for text in references]
    return np.array([[f_score(h, r) for r in theirs] for h in ours]).reshape(len(ours), len(theirs))


def ngrams(text: str) -> Ngrams:
    """Counts the character n-grams of a text, without its white space."""
    text = "".join(text.split())
    return [Counter(text[i:i + n] for i in range(len(text) - n + 1)) for n in range(1, ORDERS + 1)]


def f_score(hypothesis: Ngrams, reference: Ngrams) -> float:
    """Returns the chrF of two texts from their n-gram counts, which may be fractions."""
    precision = recall = 0.0
    orders = 0
    for h, r in zip(hypothesis, reference, strict=True):
        ours, theirs = sum(h.values()), sum(r.values())
        if ours and theirs:     # orders that one of them is too short for say nothing
            match = sum(min(count, r[gram]) for gram, count in h.items() if gram in r)
            precision, recall, orders = precision + match / ours, recall + match / theirs, orders + 1
    if not orders or precision + recall == 0:
        return 0.0
    precision, recall = precision / orders, recall / orders
    return 100 * (1 + BETA ** 2) * precision * recall / (BETA ** 2 * precision + recall)


def token_f1(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Returns the F1 score of the words of each pair of texts, from 0 to 1: `f64[n, m]`. Words are compared in lower
    case and without their order.

    >>> token_f1(["a big cat"], ["the big cat", "dog"]).round(3).tolist()
    [[0.667, 0.0]]
    """
    bags = lambda texts: [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    out = np.zeros((len(hypotheses), len(references)))
    for i, h in enumerate(bags(hypotheses)):
        for j, r in enumerate(bags(references)):
            same = (h & r).total()
            out[i, j] = 2 * same / (h.total() + r.total()) if same else float(not h and not r)
    return out


def exact(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Returns `f64[n, m]`: 1 where two texts are equal apart from white space around them, else 0. With this utility,
    minimum Bayes risk is a majority vote."""
    strip = lambda texts: np.array([text.strip() for text in texts], object)
    return (strip(hypotheses)[:, None] == strip(references)[None]).astype(np.float64)
