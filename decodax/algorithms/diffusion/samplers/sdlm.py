"""Sequential Diffusion Language Models (Liu et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache, NoCache
from decodax.algorithms.diffusion.defaults import FILLING
from decodax.algorithms.diffusion.rules.scores import Position
from decodax.algorithms.diffusion.rules.unmasking import ConfidentPrefix
from decodax.algorithms.diffusion.rules.windows import Sliding
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("sdlm", "Sequential Diffusion Language Models", "Liu et al. 2025",
                     "a few masks behind a causal prefix, the longest sure run of them", family="blockwise-parallel",
                     needs=FILLING, guarantee="approximate")
def sdlm(lm: Any, size: int | None = None, threshold: float = 0.9,
         measure: Literal["confidence", "entropy"] = "confidence") -> MaskedDiffusion:
    """`size`: positions predicted at once, from the last token and `size - 1` masks; default the model's block.
    `threshold`: tokens above this probability, or below this entropy in nats, where the authors' code takes `1 -
    entropy / log(vocabulary)`. The self-speculative mode is not included: each of its drafts has masks of its own
    behind it, beyond the region that drafts share."""
    a = Adapter.of(lm)
    size = size or lm.diffusion.block or 4
    return MaskedDiffusion(a, Sliding(size), Position(), ConfidentPrefix(threshold, measure, strict=True),
                           caching=FusedCache() if a.attention.causal else NoCache())
