"""Rules that compare candidates with texts from elsewhere: evidence in other words, references that calibrate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.registry import SELECTS
from decodax.engine.methods import text_model
from decodax.front.generate import generate
from decodax.io.load import LM
from decodax.select.bayes_risk import Utility, pair_utilities
from decodax.select.best import Reward
from decodax.select.candidates import Candidates, SelectionRule
from decodax.select.utilities import chrf

Texts = Callable[[Any], Sequence[str]]
"""From a prompt further texts about it."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Samples of a model, as evidence or as references.

    Attributes:
        lm: what `load` gave or takes; default the model that writes the candidates. num_samples: samples of each
            prompt. ask: from the prompt those that are answered, such as the same
            question in other languages; None: the prompt itself. sampling: arguments of `generate`.
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
    """The texts, sampled from `lm` where no other model was given."""
    return dataclasses.replace(texts, lm=lm) if isinstance(texts, Sampled) and texts.lm is None else texts


@SELECTS.register("x-mbr",
                  "When Life Gives You Samples: The Benefits of Scaling up Inference Compute for Multilingual LLMs",
                  "Khairi et al. 2025", "minimum Bayes risk with evidence from other languages")
@dataclasses.dataclass(frozen=True)
class XMBR(SelectionRule):
    """Minimum Bayes risk with evidence from other languages (X-MBR: Khairi et al., 2025): candidates are compared with
    one another and with texts that cannot be chosen, samples of the model in a language that it knows better.

    Attributes:
        evidence: see `Texts`; `Sampled` makes some. utility: of pairs, across languages.
    """

    evidence: Texts
    utility: Utility = chrf

    def with_model(self, lm: LM) -> SelectionRule:
        return dataclasses.replace(self, evidence=_with_model(self.evidence, lm))

    def scores(self, candidates: Candidates) -> np.ndarray:
        more = list(self.evidence(candidates.prompt))
        return pair_utilities(self.utility, candidates.texts, [*candidates.texts, *more]).mean(1)


def calibrated(reward: Reward, references: Texts) -> Reward:
    """A reward as its quantile among references, from 0 to 1 (Balashankar et al., 2024, InfAlign-CTRL): the share of
    reference samples whose reward is at most as large. So rewards of different prompts can be compared.

    Args:
        references: samples of the policy that is the reference, the same ones each time for a prompt.
    """
    def quantile(prompt: Any, texts: Sequence[str]) -> np.ndarray:
        others = list(references(prompt))
        if not others:
            raise ValueError("references: got none, takes one or more")
        theirs = np.sort(np.asarray(reward(prompt, others), np.float64))
        return np.searchsorted(theirs, np.asarray(reward(prompt, texts), np.float64), side="right") / len(theirs)

    return quantile


@SELECTS.register("infalign-ctrl", "InfAlign: Inference-aware language model alignment", "Balashankar et al. 2024",
                  "best of n by the reward's quantile among reference samples; the training of a policy on it is not "
                  "included")
@dataclasses.dataclass(frozen=True)
class CalibratedBestOfN(SelectionRule):
    """Best of N by a reward that is calibrated and made for it (Balashankar et al., 2024, InfAlign-CTRL): with the
    quantile `C` of a candidate, `(exp(t C) - 1) / t`. In training the same numbers are the reward.

    Which candidate is chosen depends on `t` no more than on the scale of a reward; candidates that all references are
    below count alike, and the first is taken.

    Attributes:
        reward: of texts. references: samples of the reference policy, see `Sampled`. t: above 0 for best of N, below 0
            for a policy that is robust against the worst of N; 0: the quantile itself.
    """

    reward: Reward
    references: Texts
    t: float = 0.0

    def with_model(self, lm: LM) -> SelectionRule:
        return dataclasses.replace(self, references=_with_model(self.references, lm))

    def scores(self, candidates: Candidates) -> np.ndarray:
        c = np.asarray(calibrated(self.reward, self.references)(candidates.prompt, candidates.texts), np.float64)
        return c if self.t == 0 else np.expm1(self.t * c) / self.t
