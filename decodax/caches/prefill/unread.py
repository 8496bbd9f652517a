"""Prompts that no layer reads while they come in chunks: what they are read into reads them when they are in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.core.cache import Cache, Entries, PyTree, ReadPrompt


@struct
class Unread(Cache):
    """How much of a prompt there is, `i32[B]`, and what it will be read into: a cache with a method `read(prompt,
    length)` that gives the cache with the first `length` tokens of `prompt.tokens`."""

    length: Array
    into: Any

    @property
    def capacity(self) -> int:
        return int(self.into.capacity)

    @property
    def inputs(self) -> PyTree:
        return self.into.inputs

    @property
    def reads(self) -> int | None:
        return 0

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        raise ValueError(f"cache: {self.into.kind.name} reads a prompt when it is in, and this model reads it before; "
                         "takes a Transformer, with no other cache beside this one")

    def commit(self, entries: Entries, slots: Array) -> Unread:
        return self.replace(length=jnp.maximum(self.length, slots.max(1) + 1))

    def settled(self, prompt: ReadPrompt) -> Cache:
        return self.into.read(prompt, self.length)
