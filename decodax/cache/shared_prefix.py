"""Hydragen: rows share the keys and values of a common prefix ("Hydragen: High-Throughput LLM Inference with Shared
Prefixes", Juravsky et al., 2024).

A prefix is stored once for all rows that continue it, and attention loads it once for the queries of all these rows.
Later tokens are stored for each row. `decodax.generate` shares the prompt among `num_samples` samples. It also shares
the common beginning of all prompts of a batch, which is then prefilled only once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.dense import Dense, dense_like, unpadded
from decodax.cache.entry import own_entry
from decodax.cache.key_values import FittedConfig, KVLayer, Score, empty_kv
from decodax.cache.tail import Tail
from decodax.cache.wrapper import Wrapper
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, CacheConfig, Layout, PyTree
from decodax.core.capabilities import PromptPhase, ReadPrompt
from decodax.core.memory import bucket
from decodax.core.types import Model
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention


@struct
class SharedPrefixCache(Tail, PromptPhase):
    """Prefixes that rows share, and the tokens of each row after its prefix.

    Attributes:
        prefixes: a tuple with one array `f[P, G, N, d + e]` for each layer: keys and values of `P` prefixes.
        fixed: `i32[P]`, number of tokens of each prefix.
        of: `i32[B]`, index of the prefix that each row continues.
        kv, length, given, size, shapes, kind: see `Tail`.
    """

    prefixes: tuple[Array, ...]
    fixed: Array
    of: Array

    if TYPE_CHECKING:
        kind: SharedPrefixConfig

    layout = Layout(by_row=False)

    @property
    def start(self) -> Array:
        """`i32[B]`: length of the prefix of each row, in tokens."""
        return self.fixed[self.of]

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        out, _ = merge(self.attend_tail(layer, q, k, v, window, sinks=sinks, **options),
                       self._prefix(layer, q, window.positions, options))
        return out, own_entry(q, k, v)

    def _prefix(self, layer: int, q: Array, at: Array, options: dict[str, Any]) -> tuple[Array, Array]:
        """Attends to the prefixes, and returns the output and the logarithms of its softmax sums. Takes one pass if
        each prefix has at most `ceil(B / P)` rows, else several."""
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
        return UnsharedPrompt(base=dense_like(self), into=self.replace(prefixes=(), kv=()))

    def adopt(self, prefix: Dense) -> SharedPrefixCache:
        """Returns the cache with the prefix that `prefix` holds, a dense cache of one row, as the beginning of all
        rows' texts."""
        fixed = prefix.length[:1]
        return self.replace(prefixes=prefix.kv, fixed=fixed, length=jnp.broadcast_to(fixed, self.length.shape))


@struct
class UnsharedPrompt(Wrapper):
    """Hydragen's cache during prefill, with a prompt in each row. `finish_prefill` makes each prompt a prefix.

    Attributes:
        base: the keys and values of the prompts.
        into: the `SharedPrefixCache` to make, without its arrays of keys and values.
    """

    base: Dense
    into: SharedPrefixCache

    layout = Layout(by_row=False)

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        made, length = self.into, self.base.length
        slots = made.kind.new_tokens(made.size)
        return made.replace(prefixes=self.base.kv, fixed=length, length=length, given=self.base.given,
                            kv=empty_kv(made.shapes, length.shape[0], slots, self.base.kv[0].dtype))


@dataclasses.dataclass(frozen=True)
class SharedPrefixConfig(FittedConfig):
    """Configuration of a `SharedPrefixCache`.

    Attributes:
        prefix: maximum number of tokens of a beginning that all rows share; `SharedPrefixCache.adopt` sets it. 0: each
            row of the prefill is a prefix of its own, shared by the rows that `Cache.select` copies from it, such as
            the samples of a prompt.
    """

    prefix: int = 0

    def share(self, prefix: int, more: int) -> SharedPrefixConfig:
        shared = dataclasses.replace(self, prefix=prefix)
        return shared if self._new is None else shared.with_length(self._new + more)

    def takes_latents(self) -> bool:
        return True

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("biases",))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any,
              inputs: PyTree) -> SharedPrefixCache:
        prefixes, length = (1, self.prefix) if self.prefix else (batch, 0)
        return SharedPrefixCache(
            prefixes=empty_kv(shapes, prefixes, length, dtype), fixed=jnp.zeros(prefixes, jnp.int32),
            of=jnp.zeros(batch, jnp.int32) if self.prefix else jnp.arange(batch, dtype=jnp.int32),
            kv=empty_kv(shapes, batch, self.new_tokens(size), dtype), length=jnp.zeros(batch, jnp.int32), given=inputs,
            size=size, shapes=shapes, kind=self)


def sharing(model: Model, prefix: int, more: int) -> tuple[Model, Model] | None:
    """Returns the models for prompts with a common beginning.

    Args:
        model: the network. Its cache must support a shared beginning (`CacheConfig.share`).
        prefix: maximum number of tokens of the beginning.
        more: maximum number of tokens of a prompt after the beginning.

    Returns:
        The model for the rows, and the model with a dense cache that prefills the beginning. None if the cache of
        `model` cannot share one.
    """
    kind = model.cache_kind
    shared = kind.share(prefix, more) if isinstance(kind, CacheConfig) else None
    if shared is None:
        return None
    made = model.with_cache(shared)
    if not isinstance(jax.eval_shape(lambda: made.init_cache(1, bucket(prefix + more))), SharedPrefixCache):
        return None     # of which more is kept than keys and values
    return made, model.with_cache(unpadded)


@CACHES.register("hydragen", "Hydragen: High-Throughput LLM Inference with Shared Prefixes", "Juravsky et al. 2024",
                 family="prefix", guarantee="exact")
def hydragen() -> SharedPrefixConfig:
    """Keeps all tokens, and stores a prefix that rows have in common only once.

    Saves memory and time for many samples of one prompt, or for prompts with the same long beginning.
    """
    return SharedPrefixConfig()
