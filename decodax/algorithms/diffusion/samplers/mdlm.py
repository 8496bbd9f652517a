"""MDLM, and ReMDM, which remasks what it has decided.

Simple and Effective Masked Diffusion Language Models (Sahoo et al. 2024); Remasking Discrete Diffusion Models with
Inference-Time Scaling (Wang et al. 2025).
"""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED
from decodax.algorithms.diffusion.rules.remasking import ReMDM
from decodax.algorithms.diffusion.rules.scores import Random
from decodax.algorithms.diffusion.rules.unmasking import Ancestral, Coins
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("mdlm", "Simple and Effective Masked Diffusion Language Models", "Sahoo et al. 2024",
                     "ancestral sampling of the absorbing process: each position at a time of its own", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def mdlm(lm: Any, steps: int = 64, size: int | None = None) -> MaskedDiffusion:
    """Steps in which no position's time comes take no forward, as in the authors' cached sampler."""
    return MaskedDiffusion(Adapter.of(lm), Whole(size), Random(), Ancestral(steps))


@ALGORITHMS.register("remdm", "Remasking Discrete Diffusion Models with Inference-Time Scaling", "Wang et al. 2025",
                     "ancestral sampling that takes tokens back", family=MASKED, needs=FILLING, guarantee="approximate")
def remdm(lm: Any, steps: int = 64, eta: float = 0.02, kind: Literal["cap", "rescale", "conf", "loop"] = "cap",
          on: float = 0.55, off: float = 0.05, held: float = 0.9, size: int | None = None) -> MaskedDiffusion:
    """`on`, `off`, `held`: the times of the loop, and the share of decided positions in it. Each step takes a forward;
    the authors' code does not score an unchanged canvas again."""
    remask = ReMDM(steps, eta, kind, on, off, held)
    return MaskedDiffusion(Adapter.of(lm), Whole(size), Random(), Coins(steps, remask), remask, stops=())
