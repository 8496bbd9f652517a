"""Caches that store nothing: the tokens of a window attend only to each other. Functions that measure a model get its
keys, values and queries from the entries of these caches."""

from __future__ import annotations

import abc
from typing import Any, Self

from jax import Array

from decodax.cache.entry import KVEntry
from decodax.common.struct import struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.pallas_kernels.window_attention import Bias, window_attention


class Passing(Cache):
    """Base of caches that store nothing: each call of the model attends to its own window only. They take models whose
    layers all have keys and values. Implement `heard`."""

    @property
    def capacity(self) -> int:
        return 0

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if options.get("linear") is not None or options.get("walk") is not None:
            raise ValueError("lm: some of its layers have linear attention or a recurrent block; takes a model whose "
                             "layers all have keys and values")
        return self.heard(layer, q, k, v, window, **options)

    @abc.abstractmethod
    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None,
              sinks: Array | None = None) -> tuple[Array, PyTree]:
        """Computes attention of the queries to the keys of the window alone.

        Args:
            layer, q, k, v, window, scale, sliding, softcap, bias, sinks: see `Cache.attend`.

        Returns:
            The output `f[B, W, H, e]`, and the entry of the layer, a pytree of arrays that the model returns in
            `Out.entries`.
        """

    def commit(self, entries: Entries, slots: Array) -> Self:
        return self


@struct
class Listening(Passing):
    """A cache that stores nothing and shows the keys and values of each layer to its caller: the entries that the model
    returns are `KVEntry`.

    Attributes:
        added: arrays that are added to the keys and values of each layer, to compute gradients with respect to keys and
            values; `()`: none.
    """

    added: tuple[KVEntry, ...] = ()

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None,
              sinks: Array | None = None) -> tuple[Array, PyTree]:
        if self.added:
            k, v = k + self.added[layer].keys, v + self.added[layer].values
        return window_attention(q, k, v, window.visible(), window.positions, scale=scale, sliding=sliding,
                                softcap=softcap, bias=bias, sinks=sinks), KVEntry(k, v)
