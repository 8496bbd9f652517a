"""Votes among the answers that the candidates give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Literal

import numpy as np

from decodax.common.registry import SELECTS
from decodax.select.candidates import Candidates, SelectionRule

Weight = Literal["count", "probability", "normalized"]


def stripped(text: str) -> str | None:
    """Returns the text without white space around it; None if nothing is left."""
    return text.strip() or None


@SELECTS.register("self-consistency", "Self-Consistency Improves Chain of Thought Reasoning", "Wang et al. 2022",
                  "the answer that most samples give")
@dataclasses.dataclass(frozen=True)
class SelfConsistency(SelectionRule):
    """Chooses the answer that most candidates give, and of its candidates the most probable one (Wang et al., 2022).

    Ties go to the answer whose candidates have the larger total probability, if probabilities are known, then to the
    answer that occurs first.

    Attributes:
        answer: extracts the answer from a text; None: the text has no answer and no vote. By default, the whole text
            without white space around it.
        weight: weight of a candidate's vote: 1 ("count", the paper's choice), its probability ("probability"), or its
            probability to the power of 1 / number of tokens ("normalized").
    """

    answer: Callable[[str], Hashable | None] = stripped
    weight: Weight = "count"

    def scores(self, candidates: Candidates) -> np.ndarray:
        answers = [self.answer(text) for text in candidates.texts]
        each = self._weights(candidates)
        known = candidates.log_probs is not None
        # of one prompt's candidates alone, so that nothing underflows
        p = np.exp(candidates.probable - candidates.probable.max()) if known else np.zeros(len(candidates))
        place = {answer: i for i, answer in reversed(list(enumerate(answers)))}
        votes: dict[Hashable, float] = {}
        weighs: dict[Hashable, float] = {}
        for answer, vote, own in zip(answers, each, p, strict=True):
            votes[answer] = votes.get(answer, 0.0) + float(vote)
            weighs[answer] = weighs.get(answer, 0.0) + float(own)
        rank = {answer: i for i, answer in enumerate(sorted(
            (a for a in votes if a is not None), key=lambda a: (votes[a], weighs[a], -place[a])))}
        # within an answer by probability; the whole part is the rank of the answer
        best = np.argsort(np.argsort(-p, kind="stable"), kind="stable") / (len(p) + 1)
        return np.array([-np.inf if a is None else rank[a] + 1 - best[i] for i, a in enumerate(answers)]) \
            if rank else -best

    def _weights(self, candidates: Candidates) -> np.ndarray:
        if self.weight == "count":
            return np.ones(len(candidates))
        log_p = candidates.probable
        if self.weight == "normalized":
            if candidates.lengths is None:
                raise ValueError("lengths: got None, but the rule goes by probability a token")
            log_p = log_p / np.maximum(candidates.lengths, 1)
        return np.exp(log_p - log_p.max())

    def share(self, candidates: Candidates) -> float:
        """Returns the share of all votes that the chosen answer has."""
        answers = [self.answer(text) for text in candidates.texts]
        chosen, each = answers[self.choose(candidates).index], self._weights(candidates)
        cast = [float(w) for a, w in zip(answers, each, strict=True) if a is not None]
        return sum(float(w) for a, w in zip(answers, each, strict=True) if a == chosen and a is not None) / max(
            sum(cast), 1e-300)
