"""SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation (Cheng et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, NegEntropy, Position, Random
from decodax.algorithms.diffusion.rules.unmasking import AtLeast, EntropyBound, Quota, Threshold
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("sdar", "SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation",
                     "Cheng et al. 2025",
                     "small blocks with an exact cache; static, dynamic, sequential or entropy-bounded quotas",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def sdar(lm: Any, rule: Literal["dynamic", "static", "sequential", "entropy", "random"] = "dynamic",
         threshold: float = 0.9, steps: int | None = None, bound: float = 0.1) -> MaskedDiffusion:
    """`steps`: of a block. `threshold`: of the dynamic rule, which falls back on the quota. `bound`: inclusive.

    Where fewer positions are open than the quota, the authors' static and dynamic rules also overwrite decided ones,
    including the prompt's; here such a step takes only the open ones.
    """
    a = Adapter.of(lm)
    windows, caching = blocks(a, None, 4)
    scores: dict[str, Score] = {"sequential": Position(), "random": Random(), "entropy": NegEntropy()}
    quota = Quota(steps, "width")
    rules: dict[str, Unmask] = {"dynamic": AtLeast(Threshold(threshold, strict=True), quota),
                                "entropy": EntropyBound(bound, inclusive=True)}
    return MaskedDiffusion(a, windows, scores.get(rule, Confidence()), rules.get(rule, quota), caching=caching)
