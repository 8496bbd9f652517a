"""LeanK: static pruning of channels of keys ("LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", Zhang
et al., 2025).

The same channels of a head's rotated keys are kept for all texts; `decodax.train.fit_channels` learns them. The first
tokens and the latest ones keep all channels. A head that keeps no channel attends to no other tokens, and their values
are dropped, too.

Loss, stages and rounding are those of the authors' code (fb56c91).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant, measured
from decodax.caches.quantize.codecs import Codec, Span, WholeTokens, join_heads, split_heads
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.core.cache import PyTree
from decodax.core.capabilities import ReadPrompt


def sparsified(factors: np.ndarray, ratio: float, align: int) -> np.ndarray:
    """Returns a mask of the channels to keep, `bool[L, G, d]`. Each head keeps its channels with the largest factors;
    their number is the number of factors above the `ratio`-quantile of all factors, rounded to a multiple of `align`.

    Args:
        factors: `f[L, G, d]`, importance of each channel.
        ratio: share of all channels to drop.
        align: the number of kept channels of a head is a multiple of this, or all.

    >>> sparsified(np.arange(8.0).reshape(1, 2, 4), 0.5, 2).astype(int).tolist()
    [[[0, 0, 0, 0], [1, 1, 1, 1]]]
    """
    above = (factors >= np.quantile(factors, ratio)).sum(-1)
    number = np.minimum((above + align // 2) // align * align, factors.shape[-1])
    rank = np.argsort(np.argsort(-factors, axis=-1, kind="stable"), axis=-1)
    return rank < number[..., None]


@dataclasses.dataclass(frozen=True)
class LeanKCodec(Codec):
    """Stores only some channels of each key (the others are decoded as 0), and values unchanged. Of a head that keeps
    no channel nothing is stored except the first tokens; it attends to these and to the latest ones.

    Attributes:
        channels: `bool[L, G, d]`, True for kept channels.
        sinks: number of first tokens that keep all channels.
    """

    channels: Constant
    sinks: int = 128

    needs_positions = True

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks: got {self.sinks}, takes 0 or more")

    def check(self, shape: KVLayer) -> None:
        if self.channels.value.ndim != 3 or self.channels.value.shape[1:] != (shape.heads, shape.width):
            raise ValueError(f"channels: got {self.channels}, takes bool[L, {shape.heads}, {shape.width}]")

    def _kept(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the kept channels over all heads together, and the heads that keep at least one."""
        own = self.channels.value[layer].astype(bool)
        return np.flatnonzero(own), np.flatnonzero(own.any(-1))

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Array, Array]:
        assert span is not None
        channels, heads = self._kept(span.layer)
        return join_heads(kv[..., :shape.width])[None, :, channels], kv[heads][..., shape.width:]

    def decode(self, shape: KVLayer, codes: tuple[Array, Array], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        (channels, heads), (k, v) = self._kept(span.layer), codes
        n, d = k.shape[1], shape.width
        keys = split_heads(jnp.zeros((n, shape.heads * d), dtype).at[:, channels].set(k[0].astype(dtype)), shape.heads)
        values = jnp.zeros((shape.heads, n, shape.both - d), dtype).at[heads].set(v.astype(dtype))
        return span.study.put(jnp.concatenate([keys, values], -1), span.start)

    def reads(self, layer: int, coded: Array, study: WholeTokens) -> Array | None:
        own = self.channels.value[layer].any(-1)
        if own.all():
            return None
        whole = jnp.minimum((study.at >= 0).sum(1, dtype=jnp.int32), coded)
        return jnp.where(jnp.asarray(own), coded[:, None], whole[:, None])

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[WholeTokens]:
        return [WholeTokens.first(own, length, self.sinks) for own in kv]


@CACHES.register("leank", "LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", "Zhang et al. 2025",
                 family="quantize")
def leank(channels: Constant | None = None, sinks: Whole = 128, recent: Whole = 768,
          every: Count = 128) -> QuantizedConfig:
    """Keeps the channels of keys that a model needs, learned beforehand; the first and the latest tokens keep all
    channels.

    First learn the channels of a model with `decodax.train.fit_channels`. Values are not changed.

    Args:
        channels: `bool[L, G, d]`, True for kept channels. Required.
        sinks: number of first tokens that keep all channels.
        recent: minimum number of latest tokens that keep all channels.
        every: number of tokens that are pruned together, when the latest tokens exceed `recent` by that number.
    """
    return QuantizedConfig(LeanKCodec(measured("channels", channels, Constant, "fit_channels"), sinks), every, "leank",
                           recent)
