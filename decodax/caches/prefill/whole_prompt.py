"""Base classes of caches that prefill a prompt only when all of its tokens are known, instead of chunk by chunk.

While chunks of a prompt arrive, no layer of the model runs; `Collected` counts the tokens. Then
`ReadAtOnce.read_prompt` runs the model, for instance segment by segment. Segments are counted from the beginning of the
text, so the chunks do not matter.
"""

from __future__ import annotations

import abc
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, unpadded
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.configs import PaperConfig
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import PromptInPart, PromptPhase, ReadPrompt
from decodax.core.types import Out
from decodax.core.window import Window, causal


class ReadAtOnce(PromptPhase):
    """Base of caches that prefill a prompt when all of its tokens are known. Implement `read_prompt`."""

    def prefill_cache(self) -> Cache:
        return Collected(length=jnp.zeros_like(self.length), into=self) if self.capacity else self

    @abc.abstractmethod
    def read_prompt(self, prompt: ReadPrompt, length: Array) -> Cache:
        """Returns the cache after a prefill of the first `length` (`i32[B]`) tokens of `prompt.tokens`. The token at
        position `length` is the newest one, which is not prefilled."""


@struct
class Collected(PromptInPart):
    """A cache that only counts the tokens of a prompt, while prefill passes it chunk by chunk and no layer runs.
    `finish_prefill` then prefills all of them.

    Attributes:
        length: `i32[B]`, number of tokens so far.
        into: the cache that will prefill them.
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

    def refuse_whole(self) -> None:
        raise ValueError(f"cache: {self.into.kind.name} reads a prompt when it is in, and this model reads it before; "
                         "takes a Transformer, with no other cache beside this one")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        self.refuse_whole()
        raise AssertionError

    def commit(self, entries: Entries, slots: Array) -> Collected:
        return self.replace(length=jnp.maximum(self.length, slots.max(1) + 1))

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:
        found: Cache = self.into.read_prompt(prompt, self.length)
        return found


@struct
class SparsePrefill(ReadAtOnce, Wrapper):     # type: ignore[misc]
    """Base of dense caches whose prompts are prefilled with sparse attention. Later tokens attend to all tokens.

    Attributes:
        base: the dense cache.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: PrefillConfig = static()


class PrefillConfig(PaperConfig):
    """Base of configs of `SparsePrefill` caches. Derive a frozen dataclass, and implement `around`."""

    @abc.abstractmethod
    def around(self, base: Dense, shapes: tuple[KVLayer, ...]) -> Cache:
        """Returns the cache that wraps `base`, an empty dense cache."""

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        return self.around(unpadded(shapes, batch, size, dtype, inputs), shapes)


class WholePromptReader:
    """Replaces the cache `base` while the model runs on a part of a prompt, to compute its attention. Derived classes
    implement `attend`."""

    def __init__(self, base: Any):
        self.base = base
        self.inputs, self.capacity = base.inputs, base.capacity


def padded(tokens: Array, width: int) -> Array:
    """Pads tokens `i32[B, N]` with zeros, so that `N` is a multiple of `width`."""
    return jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % width)))


def segment(tokens: Array, start: Array, width: int, stop: Array) -> Window:
    """Returns a causal window of the prompts' tokens at positions `start` to `start + width - 1` (`start` is `i32[]`).
    Tokens at positions from `stop` (`i32[B]`) on are dead."""
    at = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (len(tokens), width))
    return causal(lax.dynamic_slice_in_dim(tokens, start, width, 1), at[:, 0], at < stop[:, None])


def slots_of(window: Window, out: Out) -> Array:
    """Returns the positions at which a cache stores the entries of a window (the argument of `Cache.commit`), `i32[B,
    W]`: the position of each live node, -1 for dead ones. They depend on `out`, the model's output for the window,
    since XLA on CPU would otherwise copy the cache to protect its readers."""
    return jnp.where(window.live & jnp.isfinite(out.hidden).all(-1), window.positions, -1)
