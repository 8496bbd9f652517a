"""Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (Chen et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.coherence import Agreeing
from decodax.algorithms.diffusion.rules.scores import Confidence, NegEntropy
from decodax.algorithms.diffusion.rules.shapers import Average
from decodax.algorithms.diffusion.rules.unmasking import Quota, Threshold
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("ccd", "Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models",
                     "Chen et al. 2025",
                     "what two steps in a row agree on, or candidates by the mean of the last steps' distributions",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def ccd(lm: Any, rule: Literal["agreement", "mean"] = "agreement", steps: int | None = None, adaptive: bool = True,
        grow: float = 4.0, order: Literal["confidence", "entropy"] = "entropy", size: int | None = None,
        past: int = 3, kept: int = 8, bound: float | None = None, block: int | None = None) -> MaskedDiffusion:
    """`rule` "agreement" is what the authors released, over the whole text: see `Agreeing` for `steps`, `adaptive` and
    `grow`. "mean" is the paper's estimate of a token's distribution over contexts, which the released code does not
    compute: candidates and their order come from the mean of this step's distributions and the `past` ones before it,
    in blocks of `block`. Each step unmasks the quota of `steps`, or with `bound` all positions whose mean has at most
    this entropy, in nats. Past distributions count with their `kept` likeliest tokens."""
    a = Adapter.of(lm)
    score: Score = NegEntropy() if order == "entropy" else Confidence()
    if rule == "agreement":
        return MaskedDiffusion(a, Whole(size), score, Agreeing(steps, adaptive, grow, score=score))
    windows, caching = blocks(a, block)
    unmask: Unmask = Quota(steps) if bound is None else Threshold(bound, "entropy")
    return MaskedDiffusion(a, windows, score, unmask, caching=caching, shaper=Average(past, kept))
