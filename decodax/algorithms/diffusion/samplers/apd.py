"""Accelerating Diffusion LLMs via Adaptive Parallel Decoding (Israel, Van den Broeck, Grover 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter, BlockCausal
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache
from decodax.algorithms.diffusion.defaults import DIFFUSION, MASKED
from decodax.algorithms.diffusion.parallel.product import Agreed, LimitedLookahead, Product, Trailing
from decodax.algorithms.diffusion.rules.scores import Position
from decodax.algorithms.diffusion.rules.stops import EndOfText
from decodax.algorithms.diffusion.rules.windows import Sliding
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("apd", "Accelerating Diffusion LLMs via Adaptive Parallel Decoding",
                     "Israel, Van den Broeck, Grover 2025",
                     "left to right, as many tokens as a small autoregressive model goes along with", family=MASKED,
                     needs=DIFFUSION, guarantee="approximate")
def apd(lm: Any, draft: Any, weight: float = 0.7, lookahead: int = 32, window: int | None = 16) -> MaskedDiffusion:
    """`weight`: of the diffusion model in the product, the authors' R. `lookahead`: masked positions that are scored, M
    (theirs: 100 and more). `window`: positions recomputed before them, W (None: all). The two models share a
    vocabulary. No shipped model sees the whole text and has such a draft; this makes one of `pycode` and
    writes it to `runs/pycode-full/model`:

        python scripts/train.py diffusion --preset pycode-diffusion --block 0 --output runs/pycode-full
    """
    a = Adapter.of(lm)
    if a.attention.causal or isinstance(a.attention, BlockCausal):
        raise ValueError(f"lm: got {a.attention}, takes a model that sees the whole text")
    return MaskedDiffusion(dataclasses.replace(a, attention=LimitedLookahead()), Sliding(lookahead), Position(),
                           Agreed(), caching=NoCache() if window is None else Trailing(window),
                           verify=Product(draft, weight), stops=(EndOfText(),))
