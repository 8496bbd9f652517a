"""Rules that compare candidates with other texts: evidence in other languages, or references that calibrate a reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.quantiles import quantiles, transformed
from decodax.common.registry import SELECTS
from decodax.engine.methods import text_model
from decodax.front.generate import generate
from decodax.io.load import LM
from decodax.select.bayes_risk import Utility, pair_utilities
from decodax.select.best import Reward
from decodax.select.candidates import Candidates, SelectionRule
from decodax.select.utilities import chrf

Texts = Callable[[Any], Sequence[str]]
"""A function of a prompt that returns further texts about it."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Samples texts for a prompt from a model, as evidence or as references.

    Attributes:
        lm: the model, or a name for `load`. None: the model that generates the candidates.
        num_samples: number of samples of each prompt.
        ask: returns the prompts that are answered in place of a prompt, such as the same question in other languages.
            None: the prompt itself.
        sampling: arguments of `generate`.
    """

    lm: Any = None
    num_samples: int = 8
    ask: Callable[[Any], Sequence[Any]] | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, prompt: Any) -> list[str]:
        asked = [prompt] if self.ask is None else list(self.ask(prompt))
        if self.lm is None:
            raise ValueError("lm: Sampled asks a model, and got none; takes lm=decodax.load(...), or a call of "
                             "generate(select=...)")
        lm = text_model(self.lm, "samples are compared as texts")
        out = generate(lm, asked, num_samples=self.num_samples, **self.sampling)
        assert out.text is not None
        return out.text


def _with_model(texts: Texts, lm: LM) -> Texts:
    """Returns `texts`, with `lm` as its model if it is a `Sampled` without a model."""
    return dataclasses.replace(texts, lm=lm) if isinstance(texts, Sampled) and texts.lm is None else texts


@SELECTS.register("x-mbr",
                  "When Life Gives You Samples: The Benefits of Scaling up Inference Compute for Multilingual LLMs",
                  "Khairi et al. 2025", "minimum Bayes risk with evidence from other languages")
@dataclasses.dataclass(frozen=True)
class XMBR(SelectionRule):
    """Minimum Bayes risk with evidence from other languages (X-MBR: Khairi et al., 2025).

    Candidates are compared with one another and with further texts that cannot be chosen, such as samples in a language
    that the model knows better.

    Attributes:
        evidence: returns the further texts for a prompt; `Sampled` samples them.
        utility: compares texts, also of different languages; see `Utility`.
    """

    evidence: Texts
    utility: Utility = chrf

    def with_model(self, lm: LM) -> SelectionRule:
        return dataclasses.replace(self, evidence=_with_model(self.evidence, lm))

    def scores(self, candidates: Candidates) -> np.ndarray:
        more = list(self.evidence(candidates.prompt))
        return pair_utilities(self.utility, candidates.texts, [*candidates.texts, *more]).mean(1)


def calibrated(reward: Reward, references: Texts) -> Reward:
    """Returns a reward function with values from 0 to 1: the share of reference samples whose reward is at most that of
    a text (InfAlign-CTRL: Balashankar et al., 2024).

    Such rewards can be compared between prompts.

    Args:
        reward: the original reward.
        references: returns samples of the reference policy for a prompt; it has to return the same ones in each call.
    """
    def quantile(prompt: Any, texts: Sequence[str]) -> np.ndarray:
        others = list(references(prompt))
        if not others:
            raise ValueError("references: got none, takes one or more")
        return quantiles(np.asarray(reward(prompt, texts), np.float64), np.asarray(reward(prompt, others), np.float64))

    return quantile


@SELECTS.register("infalign-ctrl", "InfAlign: Inference-aware language model alignment", "Balashankar et al. 2024",
                  "best of n by the reward's quantile among reference samples; `scripts/train.py grpo --transform` "
                  "trains a model for it")
@dataclasses.dataclass(frozen=True)
class CalibratedBestOfN(SelectionRule):
    """Best-of-N by a calibrated and transformed reward (InfAlign-CTRL: Balashankar et al., 2024).

    With the quantile `C` of a candidate's reward among the references (`calibrated`), its score is `(exp(t C) - 1) /
    t`. The same numbers are the reward in training (`decodax.train.grpo.align`, `scripts/train.py grpo --transform`).
    The choice itself depends neither on `t` nor on the scale of the reward; of candidates that are better than all
    references, the first is chosen.

    Attributes:
        reward: scores texts.
        references: returns samples of the reference policy for a prompt, such as a `Sampled`.
        t: above 0 for best-of-N, below 0 for a policy that is robust against the worst of N; 0: the score is `C`.
    """

    reward: Reward
    references: Texts
    t: float = 0.0

    def with_model(self, lm: LM) -> SelectionRule:
        return dataclasses.replace(self, references=_with_model(self.references, lm))

    def scores(self, candidates: Candidates) -> np.ndarray:
        c = np.asarray(calibrated(self.reward, self.references)(candidates.prompt, candidates.texts), np.float64)
        return transformed(c, self.t)
