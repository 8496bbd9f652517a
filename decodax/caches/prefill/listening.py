"""Caches that hold nothing: the tokens of a window attend to each other alone. What is measured on a model reads its
keys, values and queries through these."""

from __future__ import annotations

import abc
from typing import Any, Self

from jax import Array

from decodax.common.struct import struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.pallas_kernels.window_attention import Bias, window_attention


class Passing(Cache):
    """Base of caches that hold nothing, for models whose layers all have keys and values."""

    @property
    def capacity(self) -> int:
        return 0

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if options.pop("linear", None) is not None:
            raise ValueError("lm: some of its layers have linear attention; takes a model whose layers all have keys "
                             "and values")
        return self.heard(layer, q, k, v, window, **options)

    @abc.abstractmethod
    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None) -> tuple[Array, PyTree]:
        """As `Cache.attend`."""

    def commit(self, entries: Entries, slots: Array) -> Self:
        return self


@struct
class Listening(Passing):
    """A cache that holds nothing; its entries are pairs of a key `f[B, W, G, d]` and a value `f[B, W, G, e]`.

    Attributes:
        added: pairs that are added to keys and values of each layer, so that losses can be differentiated by them; or
            `()`.
    """

    added: tuple[tuple[Array, Array], ...] = ()

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None) -> tuple[Array, PyTree]:
        if self.added:
            k, v = k + self.added[layer][0], v + self.added[layer][1]
        return window_attention(q, k, v, window.visible(), window.positions, scale=scale, sliding=sliding,
                                softcap=softcap, bias=bias), (k, v)
