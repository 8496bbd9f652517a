"""Hydragen: rows share the keys and values of a common prefix ("Hydragen: High-Throughput LLM Inference with Shared
Prefixes", Juravsky et al., 2024).

A prefix is kept once for all rows that continue it, and attention reads it once for the queries of all these rows. The
later tokens of each row are kept apart. `decodax.generate` shares the prompt of `num_samples`, and the common beginning
of all prompts of a batch, which is then computed once, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import KVLayer, empty_kv, own_entry
from decodax.cache.tail import Tail, TailConfig
from decodax.cache.wrapper import Wrapper
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Layout, PyTree
from decodax.core.capabilities import PromptPhase, ReadPrompt
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention


@struct
class SharedPrefixCache(Tail, PromptPhase):
    """Prefixes, and the tokens of each row after its prefix.

    Attributes:
        prefixes: a tuple of one `f[P, G, N, d + e]` a layer. fixed: `i32[P]`, number of tokens of each.
        of: `i32[B]`, index of the prefix that each row continues. kv, length, given: see `Tail`.
        size, shapes, kind: static; options that it was made with.
    """

    prefixes: tuple[Array, ...]
    fixed: Array
    of: Array
    kv: tuple[Array, ...]
    length: Array
    given: PyTree
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: SharedPrefixConfig = static()

    layout = Layout(by_row=False)

    @property
    def start(self) -> Array:
        """`i32[B]`: length of the prefix of each row."""
        return self.fixed[self.of]

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if bias is not None:
            raise ValueError("cache: hydragen takes models without a bias of the attention scores")
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        out, _ = merge(self.attend_tail(layer, q, k, v, window, **options),
                       self._prefix(layer, q, window.positions, options))
        return out, own_entry(q, k, v)

    def _prefix(self, layer: int, q: Array, at: Array, options: dict[str, Any]) -> tuple[Array, Array]:
        """Returns attention to the prefixes: in one pass if all have equally many rows, else in several."""
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

    def select(self, rows: Array) -> SharedPrefixCache:
        some = lambda x: x[rows]
        return self.replace(of=self.of[rows], kv=tuple(map(some, self.kv)), length=self.length[rows],
                            given=jax.tree.map(some, self.given))

    def prefill_cache(self) -> Cache:
        if not self.kv or self.kind.prefix:
            return self
        return UnsharedPrompt(base=dense(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given),
                              into=self.replace(prefixes=(), kv=()))

    def adopt(self, prefix: Dense) -> SharedPrefixCache:
        """Takes the common beginning of all rows' texts from a dense cache of one row."""
        fixed = prefix.length[:1]
        return self.replace(prefixes=prefix.kv, fixed=fixed, length=jnp.broadcast_to(fixed, self.length.shape))


@struct
class UnsharedPrompt(Wrapper):
    """Prompts while they are read, each in a row of its own. `into`: the cache they end up in, without its arrays."""

    base: Dense
    into: SharedPrefixCache

    layout = Layout(by_row=False)

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        made, length = self.into, self.base.length
        slots = made.kind.slots(made.size)
        return made.replace(prefixes=self.base.kv, fixed=length, length=length, given=self.base.given,
                            kv=empty_kv(made.shapes, length.shape[0], slots, self.base.kv[0].dtype))


@dataclasses.dataclass(frozen=True)
class SharedPrefixConfig(TailConfig):
    """Configuration of a `SharedPrefixCache`.

    Attributes:
        prefix: number of positions of a beginning that all rows have in common, which `SharedPrefixCache.adopt` brings
            in. 0: rows share what `Cache.select` makes them share, the prompt of several samples.
    """

    prefix: int = 0

    def share(self, prefix: int, more: int) -> SharedPrefixConfig:
        shared = dataclasses.replace(self, prefix=prefix)
        return shared if self.new is None else shared.fit(self.new + more)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any,
              inputs: PyTree) -> SharedPrefixCache:
        prefixes, length = (1, self.prefix) if self.prefix else (batch, 0)
        return SharedPrefixCache(
            prefixes=empty_kv(shapes, prefixes, length, dtype), fixed=jnp.zeros(prefixes, jnp.int32),
            of=jnp.zeros(batch, jnp.int32) if self.prefix else jnp.arange(batch, dtype=jnp.int32),
            kv=empty_kv(shapes, batch, self.slots(size), dtype), length=jnp.zeros(batch, jnp.int32), given=inputs,
            size=size, shapes=shapes, kind=self)


@CACHES.register("hydragen", "Hydragen: High-Throughput LLM Inference with Shared Prefixes", "Juravsky et al. 2024",
                 family="prefix", guarantee="exact")
def hydragen() -> SharedPrefixConfig:
    """Keeps everything, and a prefix that rows have in common only once.

    Saves memory and time for many samples of one prompt, or for prompts with the same long beginning.
    """
    return SharedPrefixConfig()
