"""Attention Is All You Need for KV Cache in Diffusion LLMs (Nguyen-Tri, Ranjan, Shen 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.drift import Drift, Leading
from decodax.algorithms.diffusion.defaults import CACHE, FILLING
from decodax.algorithms.diffusion.rules.stops import FirstEnd
from decodax.algorithms.diffusion.rules.unmasking import Threshold
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("elastic-cache", "Attention Is All You Need for KV Cache in Diffusion LLMs",
                     "Nguyen-Tri, Ranjan, Shen 2025",
                     "all sure ones of the first masks; entries are recomputed where attention moved", family=CACHE,
                     needs=FILLING, guarantee="approximate")
def elastic_cache(lm: Any, window: int = 16, threshold: float = 0.9, gamma: float = 0.9,
                  size: int | None = None) -> MaskedDiffusion:
    """`window`: masked positions of a forward. `gamma`: the least similarity of attention to that of the forward
    before."""
    a = Adapter.of(lm)
    if a.mask is None or a.shift:
        raise ValueError(f"lm: got {a}, takes a model with a mask token whose logits speak of their own position")
    return MaskedDiffusion(a, Leading(size, window), unmask=Threshold(threshold), caching=Drift(a.mask, window, gamma),
                           stops=(FirstEnd(once=True),))
