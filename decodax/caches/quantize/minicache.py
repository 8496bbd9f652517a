"""MiniCache: pairs of neighbouring layers share the directions of their keys and values ("MiniCache: KV Cache
Compression in Depth Dimension for Large Language Models", Liu et al., 2024).

In the deep half of a network, a token's key in one layer has nearly the same direction as in the next layer, and so has
its value. From the middle on, layers are merged in pairs: for each token of a prompt, one interpolated direction is
stored for both layers, and the norm for each. The tokens whose directions differ most are stored exactly, and so are
the tokens after the prompt.

The 5% of tokens that differ most are kept, as in KVCache-Factory; the paper has a threshold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Dense, KVLayer, Wrapper
from decodax.cache.dense import dense_like
from decodax.cache.entry import own_entry
from decodax.cache.key_values import FittedConfig, Score, empty_kv, refuse_prefill
from decodax.cache.tail import Tail
from decodax.common.options import Share, Whole, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, PyTree
from decodax.core.capabilities import LoadsPrefix, ReadPrompt, WholePrompt
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention


@struct
class SharedDirections(Struct):
    """The keys (or the values) of a pair of layers: one direction for each token, and its norm in each layer. The
    arrays are those of one row, or of several rows with leading axes.

    Attributes:
        direction: `f[..., S, d]`, the common direction of each token.
        lengths: `f[..., S, 2]`, norms in the earlier and in the later layer.
        at: `i32[..., R]`, indices of the tokens that are stored exactly; `S`: none.
        earlier, later: `f[..., R, d]`, these tokens in both layers.
    """

    direction: Array
    lengths: Array
    at: Array
    earlier: Array
    later: Array

    def restored(self, later: bool) -> Array:
        """Returns the keys, or values, of the later layer if `later` is True, else those of the earlier one, `f[..., S,
        d]`."""
        whole = self.direction * self.lengths[..., int(later), None]
        own = self.later if later else self.earlier
        put = lambda x, at, new: x.at[at].set(new, mode="drop")
        for _ in self.at.shape[:-1]:
            put = jax.vmap(put)
        return put(whole, self.at, own)


def merged(earlier: Array, later: Array, length: Array, interpolation: float, most: int,
           retention: float) -> SharedDirections:
    """Merges the keys, or values, of two layers.

    Args:
        earlier, later: `f[G, S, d]`, those of both layers.
        length: `i32[]`, number of tokens.
        interpolation: place of the direction on the great circle, from 0 (the earlier layer's) to 1 (the later one's).
        most: maximum number of tokens that are stored exactly.
        retention: share of the tokens that are stored exactly.
    """
    f32 = lambda x: x.astype(jnp.float32)
    norm = lambda x: jnp.maximum(jnp.linalg.norm(f32(x), axis=-1, keepdims=True), 1e-6)
    a, b = f32(earlier) / norm(earlier), f32(later) / norm(later)
    angle = jnp.arccos(jnp.clip((a * b).sum(-1, keepdims=True), -1 + 1e-6, 1 - 1e-6))
    sine = jnp.sin(angle)
    round_ = (jnp.sin((1 - interpolation) * angle) * a + jnp.sin(interpolation * angle) * b) / sine
    between = jnp.where(jnp.abs(sine) > 1e-6, round_, (1 - interpolation) * a + interpolation * b)
    direction = between / norm(between)
    apart = jnp.where(jnp.arange(earlier.shape[1]) < length, angle[..., 0], -1)
    found, at = lax.top_k(apart, most)
    keep = (found >= 0) & (jnp.arange(most) < jnp.ceil(length * retention - 1e-4))
    take = lambda x: jnp.take_along_axis(x, at[..., None], 1)
    return SharedDirections(direction=direction.astype(earlier.dtype),
                            lengths=jnp.concatenate([norm(earlier), norm(later)], -1).astype(earlier.dtype),
                            at=jnp.where(keep, at, earlier.shape[1]).astype(jnp.int32), earlier=take(earlier),
                            later=take(later))


@struct
class MiniCacheCache(Tail, WholePrompt):
    """A prompt whose deep layers share directions, and the tokens after it.

    Attributes:
        prompt: `f[B, G, S, d + e]` for each layer that is not merged.
        pairs: directions of keys and of values, for each pair of merged layers.
        start: `i32[B]`, number of prefilled tokens.
        kv, length, given, size, shapes, kind: see `Tail`.
    """

    prompt: tuple[Array, ...]
    pairs: tuple[tuple[SharedDirections, SharedDirections], ...]
    start: Array

    if TYPE_CHECKING:
        kind: MiniCacheConfig

    def check_windows(self) -> None:
        refuse_prefill("minicache")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        prompt = prefix_attention(q, window.positions, self.of_prompt(layer), self.start, **options)
        out, _ = merge(self.attend_tail(layer, q, k, v, window, sinks=sinks, **options), prompt)
        return out, own_entry(q, k, v)

    def of_prompt(self, layer: int) -> Array:
        """Returns the prompt's keys and values in layer number `layer`, `f[B, G, S, d + e]`; for a merged layer they
        are computed from the directions and norms of its pair."""
        first = self.kind.first(len(self.kv))
        if layer < first or layer >= first + 2 * len(self.pairs):
            return self.prompt[layer if layer < first else layer - 2 * len(self.pairs)]
        pair, later = divmod(layer - first, 2)
        return jnp.concatenate([part.restored(bool(later)) for part in self.pairs[pair]], -1)

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        return PromptToMerge(base=dense_like(self), shapes=self.shapes, kind=self.kind)


@struct
class PromptToMerge(Wrapper, LoadsPrefix):
    """MiniCache's cache during prefill, with all tokens of the prompt in `base`. `finish_prefill` merges pairs of
    layers."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: MiniCacheConfig = static()

    def load_prefix(self, kv: Sequence[Array], length: Array,
                    reuse: tuple[Array, Array] | None = None) -> PromptToMerge:
        return self.replace(base=self.base.load_prefix(kv, length))

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        kv, length, size = self.base.kv, self.base.length, self.base.capacity
        first, most = self.kind.first(len(kv)), math.ceil(size * self.kind.retention)
        last = first + (len(kv) - first) // 2 * 2
        pairs = []
        for i in range(first, last, 2):
            d = self.shapes[i].width

            def one(row: tuple[Array, Array, Array], d: int = d) -> tuple[SharedDirections, SharedDirections]:
                a, b, n = row
                part = lambda x, y: merged(x, y, n, self.kind.interpolation, most, self.kind.retention)
                return part(a[..., :d], b[..., :d]), part(a[..., d:], b[..., d:])

            pairs.append(lax.map(one, (kv[i], kv[i + 1], length)))
        into = self.kind.empty(self.shapes, length.shape[0], size, kv[0].dtype, self.base.given)
        return into.replace(prompt=(*kv[:first], *kv[last:]), pairs=tuple(pairs), start=length, length=length)


@CACHES.register("minicache", "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
                 "Liu et al. 2024", family="quantize")
@dataclasses.dataclass(frozen=True)
class MiniCacheConfig(FittedConfig):
    """Keeps all tokens; pairs of deep layers share the directions of a prompt's keys and values.

    For deep models with long prompts; the tokens after the prompt are stored exactly.

    Attributes:
        start_layer: the first layer that is merged with the next one. None: the middle layer.
        interpolation: place of the common direction, from 0 (the earlier layer's) to 1 (the later one's).
        retention: share of the prompt's tokens that are stored exactly.
    """

    start_layer: Whole | None = None
    interpolation: Share = 0.6
    retention: Share = 0.05

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    def first(self, depth: int) -> int:
        """Returns the first layer that is merged, in a model of `depth` layers."""
        return min(depth // 2 if self.start_layer is None else self.start_layer, depth)

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("biases",))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> MiniCacheCache:
        """Returns an empty cache, without a prompt."""
        first = self.first(len(shapes))
        last, zeros = first + (len(shapes) - first) // 2 * 2, lambda *dims: jnp.zeros((batch, *dims), dtype)
        for a, b in zip(shapes[first:last:2], shapes[first + 1:last:2], strict=True):
            if a[:3] != b[:3]:
                raise ValueError(f"cache: minicache takes layers of one shape, got {a[:3]} beside {b[:3]}")
        most = math.ceil(size * self.retention)
        no_tokens = lambda G, d: SharedDirections(
            direction=zeros(G, size, d), lengths=zeros(G, size, 2), at=jnp.full((batch, G, most), size, jnp.int32),
            earlier=zeros(G, most, d), later=zeros(G, most, d))
        alone = [zeros(s.heads, size, s.both) for s in (*shapes[:first], *shapes[last:])]
        return MiniCacheCache(
            prompt=tuple(alone), pairs=tuple((no_tokens(s.heads, s.width), no_tokens(s.heads, s.both - s.width))
                                             for s in shapes[first:last:2]),
            start=jnp.zeros(batch, jnp.int32), length=jnp.zeros(batch, jnp.int32), given=inputs,
            kv=empty_kv(shapes, batch, self.new_tokens(size), dtype),
            size=size, shapes=shapes, kind=self)
