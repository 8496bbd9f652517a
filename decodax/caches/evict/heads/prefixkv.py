"""PrefixKV: each layer keeps a measured share of the tokens that have received the most attention ("PrefixKV: Adaptive
Prefix KV Cache is What Vision Instruction-Following Models Need for Efficient Generation", Wang et al., 2024).

`decodax.train.fit_layers` measures the shares.

The search for the shares is the authors' (39b7265). They also evict while decoding; here all later tokens are kept.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.h2o import Accumulated
from decodax.caches.evict.selection import Budget, Top, kept
from decodax.common.options import Share, Whole
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class NearestTop(Top):
    """Keeps the tokens of each head with the highest scores. Unlike in `Top`, a share of a text is rounded to the
    nearest number of tokens."""

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        if isinstance(budget, int):
            return kept(budget, longest)
        tokens = np.arange(longest + 1)
        return (tokens - np.rint(tokens * (1 - float(budget)))).astype(np.int32)


@CACHES.register("prefixkv", "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for "
                 "Efficient Generation", "Wang et al. 2024", family="evict")
def prefixkv(layers: tuple[Share, ...] = (), start_size: Whole = 4) -> Eviction:
    """Keeps in each layer a measured share of the tokens, those that have received the most attention.

    Evicts once, after the prompt. First measure the layers of a model with `decodax.train.fit_layers`.

    Args:
        layers: the share of the text that each layer keeps; 1: all tokens.
        start_size: number of first tokens that are always kept.
    """
    if not layers:
        raise ValueError("layers: got none, takes the share of each layer, as decodax.train.fit_layers measures it")
    everything = 1 << 30        # tokens
    shares = tuple(x if x < 1 else everything for x in layers)
    return Eviction(NearestTop(Accumulated(1, sinks=start_size, over="heads")), shares, name="prefixkv")
