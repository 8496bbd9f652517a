"""Rows that share what they have in common: samples of one prompt, or prompts with the same beginning (Hydragen: "High-
Throughput LLM Inference with Shared Prefixes", Juravsky et al., 2024).

A prompt's keys and values are kept once, however many rows go on from it, and attention reads them once for all of
these rows' queries; each row's own tokens lie beside. `decodax.generate` shares the prompt of `num_samples`, and the
beginning that all prompts of a batch have in common, which is then computed once, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.dense import Dense, dense, write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.cache.wrapper import Wrapper
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, window_attention_lse


@struct
class SharedPrefix(KeyValues):
    """Prefixes, and what each row has behind its own.

    Attributes:
        prefixes: a tuple of one `f[P, G, N, d + e]` a layer. fixed: `i32[P]`, how many tokens each of them has.
        of: `i32[B]`, the prefix that each row goes on from.
        kv, given, widths: see `KeyValues`; the row's tokens behind the prefix.
        length: `i32[B]` tokens of the text, the prefix among them.
        size, shapes, kind: static; how it was made.
    """

    prefixes: tuple[Array, ...]
    fixed: Array
    of: Array
    kv: tuple[Array, ...]
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: Sharing = static()

    supports = frozenset({"trees"})
    by_row = False

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def start(self) -> Array:
        """`i32[B]`: where each row's own tokens begin."""
        return self.fixed[self.of]

    def room(self, running: Array) -> Array | None:
        return self.kv[0].shape[2] + self.start - self.length if self.kv else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if bias is not None:
            raise ValueError("cache: hydragen takes models without a bias of the attention scores")
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        start, at = self.start[:, None], window.positions
        own = window_attention_lse(q, k, v, window.visible(), at - start, self.kv[layer], self.length - start[:, 0],
                                   key_positions=window.key_positions - start, **options)
        out, _ = merge(own, self._prefix(layer, q, at, options))
        new = k.shape[1] - q.shape[1]
        return out, (k[:, new:], v[:, new:])

    def _prefix(self, layer: int, q: Array, at: Array, options: dict[str, Any]) -> tuple[Array, Array]:
        """Attention to the prefixes: in one pass where each has as many rows, in more where some have more."""
        B, P = q.shape[0], self.fixed.shape[0]
        most = -(-B // P)
        earlier = jnp.tril(self.of[:, None] == self.of, -1).sum(1, dtype=jnp.int32)     # rows of the same prefix
        turn, place = earlier // most, self.of * most + earlier % most

        def part(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            mine = turn == i
            row = jnp.zeros(P * most, jnp.int32).at[jnp.where(mine, place, P * most)].set(
                jnp.arange(B, dtype=jnp.int32), mode="drop")
            new = prefix_attention(q[row], at[row], self.prefixes[layer], self.fixed, **options)
            put = lambda x, y: jnp.where(mine.reshape(-1, *[1] * (x.ndim - 1)), y[place], x)
            return jax.tree.map(put, so_far, new)

        zeros = jax.eval_shape(lambda: prefix_attention(q[:1].repeat(P, 0), at[:1].repeat(P, 0), self.prefixes[layer],
                                                        self.fixed, **options))
        empty = jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), zeros)
        if P == 1:
            return part(jnp.zeros((), jnp.int32), empty)
        return jax.lax.fori_loop(0, turn.max() + 1, part, empty)

    def commit(self, entries: Entries, slots: Array) -> SharedPrefix:
        if not self.kv:
            return self
        to = jnp.where(slots >= 0, slots - self.start[:, None], -1)
        kv = tuple(write(held, jnp.concatenate(entry, -1), to)
                   for held, entry in zip(self.kv, entries, strict=True))
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def select(self, rows: Array) -> SharedPrefix:
        some = lambda x: x[rows]
        return self.replace(of=self.of[rows], kv=tuple(map(some, self.kv)), length=self.length[rows],
                            given=jax.tree.map(some, self.given))

    def prefill_cache(self) -> Cache:
        if not self.kv or self.kind.prefix:
            return self
        return UnsharedPrompt(base=dense(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given),
                              into=self.replace(prefixes=(), kv=()))

    def adopt(self, prefix: Cache) -> SharedPrefix:
        assert isinstance(prefix, Dense)
        fixed = prefix.length[:1]
        return self.replace(prefixes=prefix.kv, fixed=fixed, length=jnp.broadcast_to(fixed, self.length.shape))


@struct
class UnsharedPrompt(Wrapper):
    """Prompts while they are read, each for itself; `into` is what comes of them, without its arrays."""

    base: Dense
    into: SharedPrefix

    by_row = False

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        made, length = self.into, self.base.length
        slots = made.kind.slots(made.size)
        return made.replace(prefixes=self.base.kv, fixed=length, length=length, given=self.base.given,
                            kv=empty_kv(made.shapes, length.shape[0], slots, self.base.kv[0].dtype))


@dataclasses.dataclass(frozen=True)
class Sharing(CacheConfig):
    """A `SharedPrefix`.

    Attributes:
        prefix: positions of a beginning that all rows have in common, and that `Cache.adopt` brings in; 0: what rows
            share is what `Cache.select` makes them share, the prompt of several samples.
        new: how many tokens there will be behind the prefix at most (`fit`); None: not known.
    """

    prefix: int = 0
    new: int | None = None

    def fit(self, new: int) -> Sharing:
        return dataclasses.replace(self, new=new)

    def share(self, prefix: int, more: int) -> Sharing:
        return dataclasses.replace(self, prefix=prefix, new=None if self.new is None else self.new + more)

    def slots(self, size: int) -> int:
        """Positions of a row's own."""
        return size if self.new is None else min(self.new, size)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        prefixes, length = (1, self.prefix) if self.prefix else (batch, 0)
        return SharedPrefix(
            prefixes=empty_kv(shapes, prefixes, length, dtype), fixed=jnp.zeros(prefixes, jnp.int32),
            of=jnp.zeros(batch, jnp.int32) if self.prefix else jnp.arange(batch, dtype=jnp.int32),
            kv=empty_kv(shapes, batch, self.slots(capacity), dtype), length=jnp.zeros(batch, jnp.int32), given=inputs,
            widths=key_widths(shapes), size=capacity, shapes=shapes, kind=self)
