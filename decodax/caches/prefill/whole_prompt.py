"""Prompts that are read when all of their tokens are known, not as they come in chunks.

While a prompt comes in, no layer of the model runs; `Collected` counts its tokens. Then the cache reads it with
`ReadAtOnce.read_prompt`, for instance segment by segment. Segments are counted from the beginning of a text, whatever
the chunks that it comes in.
"""

from __future__ import annotations

import abc
from typing import Any, Self

import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.configs import PaperConfig
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import PromptPhase, ReadPrompt
from decodax.core.types import Out
from decodax.core.window import Window, causal


class ReadAtOnce(PromptPhase):
    """Base of caches that read a prompt when it is known as a whole."""

    def prefill_cache(self) -> Cache:
        return Collected(length=jnp.zeros_like(self.length), into=self) if self.capacity else self

    @abc.abstractmethod
    def read_prompt(self, prompt: ReadPrompt, length: Array) -> Cache:
        """Returns the cache with the first `length` tokens (`i32[B]`) of `prompt.tokens`; the newest one comes after
        them."""


@struct
class Collected(PromptPhase):
    """A stand-in while a prompt comes in: counts its tokens.

    Attributes:
        length: `i32[B]`, number of tokens so far. into: the cache that will read them.
    """

    length: Array
    into: Any

    @property
    def capacity(self) -> int:
        return int(self.into.capacity)

    @property
    def inputs(self) -> PyTree:
        return self.into.inputs

    @property
    def layers_read(self) -> int | None:
        return 0

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        raise ValueError(f"cache: {self.into.kind.name} reads a prompt when it is in, and this model reads it before; "
                         "takes a Transformer, with no other cache beside this one")

    def commit(self, entries: Entries, slots: Array) -> Collected:
        return self.replace(length=jnp.maximum(self.length, slots.max(1) + 1))

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:
        found: Cache = self.into.read_prompt(prompt, self.length)
        return found


@struct
class SparsePrefill(ReadAtOnce, Wrapper):     # type: ignore[misc]
    """Base of dense caches whose prompts are read with sparse attention; what follows reads everything.

    Attributes:
        base: the dense cache. shapes, kind: static; the layers, and the config.
    """

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: PrefillConfig = static()


class PrefillConfig(PaperConfig):
    """Base of the configs of `SparsePrefill` caches; a derived class is a frozen dataclass."""

    @abc.abstractmethod
    def around(self, base: Dense, shapes: tuple[KVLayer, ...]) -> Cache:
        """Returns the cache around an empty dense one."""

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        return self.around(dense(shapes, batch, size, dtype, inputs), shapes)


class WholePromptReader:
    """Stands in for a cache while the model reads a part of a prompt: derived classes implement `attend`."""

    def __init__(self, base: Any):
        self.base = base
        self.inputs, self.capacity = base.inputs, base.capacity


@struct
class AskingDense(Wrapper):
    """A dense cache whose entries also hold the scaled queries."""

    base: Dense

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        return out, (*entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> Self:
        return self.replace(base=self.base.commit([entry[:2] for entry in entries], slots))


def padded(tokens: Array, width: int) -> Array:
    """Returns tokens `i32[B, N]` padded to a multiple of `width`."""
    return jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % width)))


def segment(tokens: Array, start: Array, width: int, stop: Array) -> Window:
    """Returns the tokens of prompts at `width` positions from `start` (`i32[]`) on as a window; those from `stop`
    (`i32[B]`) on are dead."""
    at = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (len(tokens), width))
    return causal(lax.dynamic_slice_in_dim(tokens, start, width, 1), at[:, 0], at < stop[:, None])


def slots_of(window: Window, out: Out) -> Array:
    """Returns the slots at which the nodes of a window that the model has read are committed, `i32[B, W]`, -1 for dead
    ones. They depend on the output, or XLA on CPU copies the cache to protect its readers."""
    return jnp.where(window.live & jnp.isfinite(out.hidden).all(-1), window.positions, -1)
