"""Keys without the channels that a model can do without ("LeanK: Learnable K Cache Channel Pruning for Efficient
Decoding", Zhang et al., 2025).

Which channels of a head's rotated keys stay is the same for all texts; `decodax.train.channels` learns it. The
first tokens and the latest ones keep all channels. Of a head that keeps none, no other tokens are read, and their
values are not kept either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant
from decodax.caches.quantize.codecs import Codec, Span
from decodax.caches.quantize.rotated import Sinks
from decodax.caches.quantize.turning import apart, together
from decodax.core.cache import PyTree, ReadPrompt


def sparsified(factors: np.ndarray, ratio: float, align: int) -> np.ndarray:
    """`bool[L, G, d]`: which channels stay by factors `f[L, G, d]`: in each head its largest ones, as many as are above
    the `ratio`-quantile of all factors together, rounded to a multiple of `align`.

    >>> sparsified(np.arange(8.0).reshape(1, 2, 4), 0.5, 2).astype(int).tolist()
    [[[0, 0, 0, 0], [1, 1, 1, 1]]]
    """
    above = (factors >= np.quantile(factors, ratio)).sum(-1)
    number = np.minimum((above + align // 2) // align * align, factors.shape[-1])
    rank = np.argsort(np.argsort(-factors, axis=-1, kind="stable"), axis=-1)
    return rank < number[..., None]


@dataclasses.dataclass(frozen=True)
class FewChannels(Codec):
    """Some channels of keys.

    Attributes:
        channels: `bool[L, G, d]`. sinks: the first tokens of a prompt, which stay whole.
    """

    channels: Constant
    sinks: int = 128

    places = True

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks: got {self.sinks}, takes 0 or more")

    @property
    def unit(self) -> int:
        return 1

    def check(self, shape: KVLayer) -> None:
        if self.channels.value.ndim != 3 or self.channels.value.shape[1:] != (shape.heads, shape.width):
            raise ValueError(f"channels: got {self.channels}, takes bool[L, {shape.heads}, {shape.width}]")

    def _kept(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Which channels of all heads together, and which heads."""
        own = self.channels.value[layer].astype(bool)
        return np.flatnonzero(own), np.flatnonzero(own.any(-1))

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Array, Array]:
        assert span is not None
        channels, heads = self._kept(span.layer)
        return together(kv[..., :shape.width])[None, :, channels], kv[heads][..., shape.width:]

    def decode(self, shape: KVLayer, codes: tuple[Array, Array], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        (channels, heads), (k, v) = self._kept(span.layer), codes
        n, d = k.shape[1], shape.width
        keys = apart(jnp.zeros((n, shape.heads * d), dtype).at[:, channels].set(k[0].astype(dtype)), shape.heads)
        values = jnp.zeros((shape.heads, n, shape.both - d), dtype).at[heads].set(v.astype(dtype))
        at = span.study.at - span.start
        return jnp.concatenate([keys, values], -1).at[:, jnp.where((at >= 0) & (span.study.at >= 0), at, n)].set(
            span.study.kv.astype(dtype), mode="drop")

    def reads(self, layer: int, coded: Array, study: Sinks) -> Array | None:
        own = self.channels.value[layer].any(-1)
        if own.all():
            return None
        whole = jnp.minimum((study.at >= 0).sum(1, dtype=jnp.int32), coded)
        return jnp.where(jnp.asarray(own), coded[:, None], whole[:, None])

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[Sinks]:
        """The first tokens."""
        at = jnp.arange(self.sinks, dtype=jnp.int32)
        at = jnp.where(at < length[:, None], at, -1)
        return [Sinks(at=at, kv=jnp.pad(own[:, :, :self.sinks], (
            (0, 0), (0, 0), (0, max(self.sinks - own.shape[2], 0)), (0, 0)))) for own in kv]
