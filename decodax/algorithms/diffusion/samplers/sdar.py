"""SDAR: small blocks with an exact cache, and one of several rules inside a block ("SDAR: A Synergistic
Diffusion-AutoRegression Paradigm for Scalable Sequence Generation", Cheng et al., 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, NegEntropy, Position, Random
from decodax.algorithms.diffusion.rules.unmasking import AtLeast, Quota, Threshold
from decodax.algorithms.diffusion.samplers.entropy_bounded import EntropyBound
from decodax.common.options import Count, NonNegative, Share
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("sdar", "SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation",
                     "Cheng et al. 2025", family="masked-diffusion", needs="a diffusion model")
def sdar(lm: Any, rule: Literal["dynamic", "static", "sequential", "entropy", "random"] = "dynamic",
         threshold: Share = 0.9, steps: Count | None = None, eb_threshold: NonNegative = 0.1) -> MaskedDiffusion:
    """Fills small blocks with an exact cache, by static, dynamic, sequential or entropy-bounded quotas.

    For block-causal models. If fewer positions are open than the quota, the authors' static and dynamic rules also
    overwrite decided ones, including the prompt's; here such a step unmasks only the open ones.

    Args:
        rule: "dynamic" unmasks all confident positions, or the quota if these are fewer; "static" the quota, by
            confidence; "sequential" from left to right; "random" in random order; "entropy" by an entropy budget.
        threshold: probability above which "dynamic" unmasks a candidate.
        steps: number of steps of a block, for the quota. None: one position per step.
        eb_threshold: entropy budget of "entropy", in nats, inclusive.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, None, 4)
    scores: dict[str, Score] = {"sequential": Position(), "random": Random(), "entropy": NegEntropy()}
    quota = Quota(steps, "width")
    rules: dict[str, Unmask] = {"dynamic": AtLeast(Threshold(threshold, strict=True), quota),
                                "entropy": EntropyBound(eb_threshold, inclusive=True)}
    return MaskedDiffusion(adapter, windows, scores.get(rule, Confidence()), rules.get(rule, quota), caching=caching)
