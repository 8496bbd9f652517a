"""A dense cache that also records queries, for caches that measure the attention of a prompt."""

from __future__ import annotations

from typing import Any, Self

from jax import Array

from decodax.cache.dense import Dense
from decodax.cache.entry import AskedEntry
from decodax.cache.wrapper import Wrapper
from decodax.common.struct import struct
from decodax.core.cache import Entries, PyTree


@struct
class AskingDense(Wrapper):
    """A dense cache whose entries also hold the scaled queries."""

    base: Dense

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        return out, AskedEntry.of(entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> Self:
        return self.replace(base=self.base.commit([entry.pair for entry in entries], slots))
