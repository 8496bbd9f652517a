"""Neighbouring layers that share the directions of their keys and values ("MiniCache: KV Cache Compression in Depth
Dimension for Large Language Models", Liu et al., 2024).

Deep in a network a token's key of one layer points nearly where that of the next one does, and so do its values. From
the middle on, layers are taken in pairs: of a prompt's tokens one direction is kept for both, between theirs, and the
length of each. The tokens whose directions differ most stay as they are. So do the tokens behind the prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Dense, KVLayer, Wrapper, dense
from decodax.cache.dense import write
from decodax.cache.key_values import KeyValues, empty_kv, key_widths
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, window_attention_lse


@struct
class SharedDirections(Struct):
    """Keys, or values, of a pair of layers, of one row or of several.

    Attributes:
        direction: `f[..., S, d]`. lengths: `f[..., S, 2]`, of the earlier and of the later layer.
        at: `i32[..., R]`, the tokens that both keep, `S` for none. earlier, later: `f[..., R, d]` those.
    """

    direction: Array
    lengths: Array
    at: Array
    earlier: Array
    later: Array

    def restored(self, later: bool) -> Array:
        """`f[..., S, d]`: what it stands for in one of the layers."""
        whole = self.direction * self.lengths[..., int(later), None]
        own = self.later if later else self.earlier
        put = lambda x, at, new: x.at[at].set(new, mode="drop")
        for _ in self.at.shape[:-1]:
            put = jax.vmap(put)
        return put(whole, self.at, own)


def shared(earlier: Array, later: Array, length: Array, towards: float, most: int, share: float) -> SharedDirections:
    """What two layers' `f[G, S, d]` have in common, of which the first `length` (`i32[]`) count.

    Args:
        towards: how far from the earlier layer's direction to the later one's, along the great circle.
        most: tokens that may stay as they are; of so many those of this share of the length do that differ most.
    """
    f32 = lambda x: x.astype(jnp.float32)
    norm = lambda x: jnp.maximum(jnp.linalg.norm(f32(x), axis=-1, keepdims=True), 1e-6)
    a, b = f32(earlier) / norm(earlier), f32(later) / norm(later)
    angle = jnp.arccos(jnp.clip((a * b).sum(-1, keepdims=True), -1 + 1e-6, 1 - 1e-6))
    sine = jnp.sin(angle)
    round_ = (jnp.sin((1 - towards) * angle) * a + jnp.sin(towards * angle) * b) / sine
    between = jnp.where(jnp.abs(sine) > 1e-6, round_, (1 - towards) * a + towards * b)
    direction = between / norm(between)
    apart = jnp.where(jnp.arange(earlier.shape[1]) < length, angle[..., 0], -1)
    found, at = lax.top_k(apart, most)
    keep = (found >= 0) & (jnp.arange(most) < jnp.ceil(length * share - 1e-4))
    take = lambda x: jnp.take_along_axis(x, at[..., None], 1)
    return SharedDirections(direction=direction.astype(earlier.dtype),
                            lengths=jnp.concatenate([norm(earlier), norm(later)], -1).astype(earlier.dtype),
                            at=jnp.where(keep, at, earlier.shape[1]).astype(jnp.int32), earlier=take(earlier),
                            later=take(later))


@struct
class MergedLayers(KeyValues):
    """A prompt whose deep layers share directions, and what follows it.

    Attributes:
        prompt: a tuple of one `f[B, G, S, d + e]` for each layer that is alone. pairs: a tuple of keys and values for
            each pair of layers. prompt_length: `i32[B]`.
        kv, given, widths: see `KeyValues`; the tokens behind the prompt. length: `i32[B]` tokens of the text.
    """

    prompt: tuple[Array, ...]
    pairs: tuple[tuple[SharedDirections, SharedDirections], ...]
    prompt_length: Array
    kv: tuple[Array, ...]
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: Merging = static()

    supports = frozenset({"trees"})

    @property
    def capacity(self) -> int:
        return self.size

    def room(self, running: Array) -> Array | None:
        return self.kv[0].shape[2] + self.prompt_length - self.length if self.kv else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill or bias is not None:
            raise ValueError("cache: minicache reads a prompt as a whole, which only the model that answers does, and "
                             "takes no bias of the scores; give a draft model another cache")
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        start, at = self.prompt_length[:, None], window.positions
        own = window_attention_lse(q, k, v, window.visible(), at - start, self.kv[layer],
                                   self.length - self.prompt_length, key_positions=window.key_positions - start,
                                   **options)
        out, _ = merge(own, prefix_attention(q, at, self.of_prompt(layer), self.prompt_length, **options))
        new = k.shape[1] - q.shape[1]
        return out, (k[:, new:], v[:, new:])

    def of_prompt(self, layer: int) -> Array:
        """What is kept of the prompt's keys and values stands for, `f[B, G, S, d + e]`."""
        first = self.kind.first(len(self.kv))
        if layer < first or layer >= first + 2 * len(self.pairs):
            return self.prompt[layer if layer < first else layer - 2 * len(self.pairs)]
        pair, later = divmod(layer - first, 2)
        return jnp.concatenate([part.restored(bool(later)) for part in self.pairs[pair]], -1)

    def commit(self, entries: Entries, slots: Array) -> MergedLayers:
        if not self.kv:
            return self
        to = jnp.where(slots >= 0, slots - self.prompt_length[:, None], -1)
        kv = tuple(write(held, jnp.concatenate(entry[:2], -1), to)
                   for held, entry in zip(self.kv, entries, strict=True))
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        whole = dense(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given)
        return PromptToMerge(base=whole, shapes=self.shapes, kind=self.kind)


@struct
class PromptToMerge(Wrapper):
    """A prompt whose layers will be merged."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: Merging = static()

    def load_prefix(self, kv: Sequence[Array], length: Array) -> PromptToMerge:
        return self.replace(base=self.base.load_prefix(kv, length))

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        kv, length, size = self.base.kv, self.base.length, self.base.capacity
        first, most = self.kind.first(len(kv)), math.ceil(size * self.kind.retained)
        last = first + (len(kv) - first) // 2 * 2
        pairs = []
        for i in range(first, last, 2):
            d = self.shapes[i].width

            def one(row: tuple[Array, Array, Array], d: int = d) -> tuple[SharedDirections, SharedDirections]:
                a, b, n = row
                part = lambda x, y: shared(x, y, n, self.kind.towards, most, self.kind.retained)
                return part(a[..., :d], b[..., :d]), part(a[..., d:], b[..., d:])

            pairs.append(lax.map(one, (kv[i], kv[i + 1], length)))
        into = self.kind.empty(self.shapes, length.shape[0], size, kv[0].dtype, self.base.given)
        return into.replace(prompt=(*kv[:first], *kv[last:]), pairs=tuple(pairs), prompt_length=length, length=length)


@dataclasses.dataclass(frozen=True)
class Merging(CacheConfig):
    """A `MergedLayers` cache.

    Attributes:
        start: the first layer that is merged with the next one; None: that in the middle.
        towards: where the common direction lies, from 0, the earlier layer's, to 1.
        retained: the share of tokens that stay as they are.
        new: how many tokens there will be behind the prompt at most (`fit`); None: not known.
    """

    start: int | None = None
    towards: float = 0.6
    retained: float = 0.05
    new: int | None = None

    def __post_init__(self) -> None:
        for name in ("towards", "retained"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 0 to 1")
        if self.start is not None and self.start < 0:
            raise ValueError(f"start: got {self.start}, takes 0 or more")

    def first(self, depth: int) -> int:
        """The first layer that is merged, of so many."""
        return min(depth // 2 if self.start is None else self.start, depth)

    def fit(self, new: int) -> Merging:
        return dataclasses.replace(self, new=new)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> MergedLayers:
        """An empty cache, without a prompt."""
        first = self.first(len(shapes))
        last, zeros = first + (len(shapes) - first) // 2 * 2, lambda *dims: jnp.zeros((batch, *dims), dtype)
        for a, b in zip(shapes[first:last:2], shapes[first + 1:last:2], strict=True):
            if a[:3] != b[:3]:
                raise ValueError(f"cache: minicache takes layers of one shape, got {a[:3]} beside {b[:3]}")
        most = math.ceil(size * self.retained)
        no_tokens = lambda G, d: SharedDirections(
            direction=zeros(G, size, d), lengths=zeros(G, size, 2), at=jnp.full((batch, G, most), size, jnp.int32),
            earlier=zeros(G, most, d), later=zeros(G, most, d))
        alone = [zeros(s.heads, size, s.both) for s in (*shapes[:first], *shapes[last:])]
        return MergedLayers(
            prompt=tuple(alone), pairs=tuple((no_tokens(s.heads, s.width), no_tokens(s.heads, s.both - s.width))
                                             for s in shapes[first:last:2]),
            prompt_length=jnp.zeros(batch, jnp.int32), length=jnp.zeros(batch, jnp.int32), given=inputs,
            kv=empty_kv(shapes, batch, size if self.new is None else min(self.new, size), dtype),
            widths=key_widths(shapes), size=size, shapes=shapes, kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
