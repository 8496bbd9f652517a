"""AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size (Lu et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache, PrefixCache
from decodax.algorithms.diffusion.caching.refreshes import OwnBlock
from decodax.algorithms.diffusion.defaults import FILLING, MASKED
from decodax.algorithms.diffusion.policies import Caching, Unmask
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Threshold
from decodax.algorithms.diffusion.rules.windows import Delimited
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("adablock", "AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size",
                     "Lu et al. 2025", "blocks that end with a line, all sure positions at once", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def adablock(lm: Any, delimiters: tuple[int, ...] | None = None, delimiter_threshold: float = 0.3, block: int = 32,
             threshold: float = 0.9, cache: Literal["none", "prefix", "dual"] = "none", suffix: int = 256,
             size: int | None = None) -> MaskedDiffusion:
    """`delimiters`: token ids; None: the newline. `block`: the length where no delimiter is found. `suffix`: see
    `PrefixCache`. With a cache, a model whose logits point to the next position decides as in the authors' code for
    Dream: see `Anchored`."""
    if delimiters is None:
        delimiters = tuple(lm.tokenizer.encode_after(None, "\n")) if lm.tokenizer else ()
        if len(delimiters) != 1:
            raise ValueError(f"delimiters: got None, and the newline is {len(delimiters)} tokens; takes token ids")
    a = Adapter.of(lm)
    windows, anchored = Delimited(tuple(delimiters), delimiter_threshold, block, size=size), a.shift and cache != "none"
    caching: Caching = {"dual": OwnBlock(anchored=anchored, windows=windows), "none": NoCache(),
                        "prefix": PrefixCache(anchored=anchored, suffix=suffix)}[cache]
    unmask: Unmask = Threshold(threshold)
    return MaskedDiffusion(a, windows, unmask=Anchored(unmask) if anchored else unmask, caching=caching)
