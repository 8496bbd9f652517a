"""Set Block Decoding is a Language Model Inference Accelerator (Gat et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.unmasking import EntropyBound
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("sbd", "Set Block Decoding is a Language Model Inference Accelerator", "Gat et al. 2025",
                     "blocks of masks after a causal prefix, as many positions as an entropy budget allows, exact "
                     "cache; for models trained so, such as by `python scripts/train.py diffusion --attention "
                     "causal-prefix`", family=MASKED, needs=FILLING, guarantee="approximate")
def sbd(lm: Any, bound: float = 0.35, block: int | None = None) -> MaskedDiffusion:
    """`bound`: the paper's gamma, in nats; the paper has 0.1 and 0.35 for reasoning, 0.35 and 0.6 for chat. `block`:
    its k; the paper's models are trained with all block sizes from 2 to 16; default the model's. A block's entries are
    written by the first forward of the next one (the paper's algorithm 3). For models made from autoregressive ones
    whose masks attend to one another and predict their own positions. No shipped model is one. This trains one from
    `pycode` and writes it to `runs/pycode-sbd/model`:

        python scripts/train.py diffusion --preset pycode-diffusion --attention causal-prefix --block 16 \\
            --output runs/pycode-sbd
    """
    a = Adapter.of(lm)
    if not a.attention.causal or a.shift:
        raise ValueError(f"lm: got {a.attention}{' with shift' * a.shift}, takes causal-prefix attention without "
                         "shift, as scripts/train.py diffusion --attention causal-prefix trains it")
    windows, _ = blocks(a, block, lm.diffusion.block or 16)
    return MaskedDiffusion(a, windows, NegEntropy(), EntropyBound(bound), caching=FusedCache())
