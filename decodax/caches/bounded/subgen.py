"""SubGen: a sketch of attention in place of older tokens ("SubGen: Token Generation in Sublinear Time and Memory",
Zandieh et al., 2024).

Attention is a sum of weighted values, divided by a sum of weights; both are estimated from samples. Keys are clustered
as they arrive: a key joins the nearest cluster if it is near enough, else it starts a new one. For the sum of weights,
a few keys of each cluster are drawn uniformly, and represent all keys of the cluster. For the sum of values, tokens are
drawn from the whole text with probability proportional to the squared norms of their values, and each value is divided
by its probability. Both sums are unbiased. The latest tokens are stored exactly.

The draws depend on a token's position and on `seed` alone, so drafts and chunks do not change the result. The latest
tokens are moved to the sketch `every` at a time, and a round does not commit tokens beyond that point. When the maximum
number of clusters is reached, each key joins the nearest one.

No code is public. The number of clusters is bounded, and the latest tokens are stored separately, as in the paper's
experiments.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense_like, write_entries
from decodax.cache.entry import own_entry
from decodax.cache.key_values import KeyValues, KVConfig, KVLayer, Score, empty_kv, key_widths, refuse_prefill
from decodax.cache.wrapper import Wrapper
from decodax.common.options import Count, NonNegative, Whole, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt, WholePrompt
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import Bias, whole_blocks, window_attention_lse


@struct
class Sketch(Struct):
    """A sketch of the older tokens of a layer: `C` clusters of keys with `t` keys drawn from each, and `s` tokens drawn
    from all. Its arrays are those of one row, or of several rows with leading axes.

    Attributes:
        centres: `f32[..., G, C, d]`, the first key of each cluster.
        counts: `i32[..., G, C]`, number of keys of each cluster; 0: no cluster.
        keys: `f32[..., G, C, t, d]`, keys drawn uniformly from each cluster.
        tokens: `f32[..., G, s, d + e]`, keys and values, drawn in proportion to the squared norm of the value.
        mass: `f32[..., G]`, sum of the squared norms of all values.
    """

    centres: Array
    counts: Array
    keys: Array
    tokens: Array
    mass: Array


def taken_in(sketch: Sketch, kv: Array, valid: Array, draws: Array, radius: float) -> Sketch:
    """Returns the sketch of a row after one more token.

    Args:
        sketch: the sketch before.
        kv: `f32[G, d + e]`, key and value of the token.
        valid: `bool[]`; False leaves the sketch as it is.
        draws: `f32[G, t + s]`, random numbers from 0 to 1, for the `t` drawn keys of a cluster and the `s` drawn
            tokens.
        radius: maximum distance of a key to the first key of its cluster.
    """
    (C, d), t = sketch.centres.shape[1:], sketch.keys.shape[2]
    key, value = kv[:, :d], kv[:, d:]
    distance = jnp.where(sketch.counts > 0, jnp.square(sketch.centres - key[:, None]).sum(-1), jnp.inf)
    nearest, used = distance.argmin(1), (sketch.counts > 0).sum(1)
    begins = (distance.min(1) > radius ** 2) & (used < C)
    of = jnp.where(begins, used, nearest)
    number = jnp.where(begins, 0, jnp.take_along_axis(sketch.counts, of[:, None], 1)[:, 0]) + 1
    own = (jnp.arange(C) == of[:, None]) & valid
    first = own & begins[:, None]
    # each of the keys of a cluster stays with the same probability
    drawn = own[..., None] & (draws[:, None, :t] * number[:, None, None] < 1)
    squares = jnp.square(value).sum(-1)
    mass = sketch.mass + jnp.where(valid, squares, 0)
    stays = (draws[:, t:] * mass[:, None] < squares[:, None]) & valid
    return Sketch(centres=jnp.where(first[..., None], key[:, None], sketch.centres),
                  counts=jnp.where(own, number[:, None], sketch.counts),
                  keys=jnp.where(drawn[..., None], key[:, None, None], sketch.keys),
                  tokens=jnp.where(stays[..., None], kv[:, None], sketch.tokens), mass=mass)


def sketched(sketch: Sketch, kv: Array, start: Array, stop: Array, seed: Any, radius: float) -> Sketch:
    """Returns the sketch of a row after consecutive tokens.

    Args:
        sketch: the sketch.
        kv: `f32[G, n, d + e]`, keys and values of the tokens at positions `start` to `start + n - 1`.
        start: `i32[]`, position of the first token.
        stop: `i32[]`; tokens at positions from `stop` on are ignored.
        seed: a key of `jax.random`. The draws of a token depend on it and on the position.
        radius: maximum distance of a key to the first key of its cluster.
    """
    G, n, _ = kv.shape
    more = sketch.keys.shape[2] + sketch.tokens.shape[1]

    def one(sketch: Sketch, token: tuple[Array, Array]) -> tuple[Sketch, None]:
        kv, at = token
        draws = jax.random.uniform(jax.random.fold_in(seed, at), (G, more))
        return taken_in(sketch, kv, at < stop, draws, radius), None

    at = start + jnp.arange(n, dtype=jnp.int32)
    return lax.scan(one, sketch, (kv.astype(jnp.float32).swapaxes(0, 1), at))[0]


def estimated(sketch: Sketch, q: Array, d: int) -> tuple[Array, Array, Array]:
    """Estimates the attention of queries to all tokens that a sketch stands for.

    Args:
        sketch: the sketch of a row.
        q: `f32[G, r, d]`, scaled queries; `r` query heads share a key head.
        d: width of keys.

    Returns:
        The sum of weighted values `f32[G, r, e]`, and the sum of weights `f32[G, r]`, both divided by `exp(top)`; and
        `top`, the largest exponent, `f32[G, r]`.
    """
    t = sketch.keys.shape[2]
    own = jnp.einsum("grd,gctd->grct", q, sketch.keys)
    there = (sketch.counts > 0)[:, None, :, None]
    keys, values = sketch.tokens[..., :d], sketch.tokens[..., d:]
    exponents = jnp.einsum("grd,gsd->grs", q, keys)
    squares = jnp.square(values).sum(-1)
    share = jnp.where(squares > 0, sketch.mass[:, None] / jnp.maximum(squares, 1e-30), 0) / values.shape[1]
    top = jnp.maximum(jnp.where(there, own, -1e30).max((2, 3)),
                      jnp.where(share[:, None] > 0, exponents, -1e30).max(-1))
    safe = lambda x: jnp.exp(jnp.minimum(x, 0))     # exponents that do not count may be larger
    total = (jnp.where(there, safe(own - top[..., None, None]), 0) * sketch.counts[:, None, :, None]).sum((2, 3)) / t
    values = jnp.einsum("grs,gs,gse->gre", safe(exponents - top[..., None]), share, values)
    return values, total, top


@struct
class SubGenCache(KeyValues, WholePrompt):
    """The latest tokens, and a sketch of the older ones.

    Attributes:
        kv: for each layer `f[B, G, R, d + e]`, the latest tokens; position `p` is in slot `p % kind.slots`.
        sketches: the `Sketch` of each layer.
        done: `i32[B]`, number of tokens in the sketches.
        length: `i32[B]`, number of tokens of the verified text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        size: static; maximum number of tokens of a text.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    kv: tuple[Array, ...]
    sketches: tuple[Sketch, ...]
    done: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: SubGenConfig = static()

    supports = frozenset({"trees"})

    @property
    def capacity(self) -> int:
        return self.size

    def max_commit(self) -> Array | None:
        return self.kind.slots - (self.length - self.done) if self.kv else None

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        return PromptToSketch(base=dense_like(self), shapes=self.shapes, kind=self.kind)

    def check_windows(self) -> None:
        refuse_prefill(self.kind.name)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        kv, sketch, d = self.kv[layer], self.sketches[layer], self.widths[layer]
        G, R = kv.shape[1], self.kind.slots
        slot = jnp.arange(kv.shape[2], dtype=jnp.int32)
        at = self.done[:, None] + (slot - self.done[:, None]) % R
        at = jnp.where((slot < R) & (at < self.length[:, None]), at, -1)
        near, lse = window_attention_lse(q, k, v, window.visible(), window.positions, kv, slot_positions=at[:, None],
                                         scale=scale, key_positions=window.key_positions, sinks=sinks)

        def one(sketch: Any, q: Array, near: Array, lse: Array) -> Array:       # of one node
            values, total, top = estimated(sketch, q.reshape(G, -1, d), d)
            most = jnp.maximum(top, lse.reshape(top.shape))
            far, close = jnp.exp(top - most), jnp.exp(lse.reshape(top.shape) - most)
            values = values * far[..., None] + close[..., None] * near.reshape(values.shape)
            return (values / jnp.maximum(total * far + close, 1e-30)[..., None]).reshape(near.shape)

        f32 = lambda x: x.astype(jnp.float32)
        out = each_node(functools.partial(jax.vmap(one), sketch), f32(q) * scale, f32(near), f32(lse))
        return out.astype(near.dtype), own_entry(q, k, v)

    def commit(self, entries: Entries, slots: Array) -> SubGenCache:
        if not self.kv:
            return self
        to = jnp.where(slots >= 0, slots % self.kind.slots, -1)
        kv = write_entries(self.kv, entries, to)
        new = self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))
        full = new.length - new.done >= self.kind.slots
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._sketched(full))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _sketched(self, rows: Array) -> SubGenCache:
        """Returns the cache with the `every` oldest exact tokens of `rows` (`bool[B]`) moved to the sketches."""
        kind, n = self.kind, self.kind.every
        stop = jnp.where(rows, self.done + n, self.done)

        def one(row: Any, seed: Array) -> Sketch:
            sketch, kv, done, stop = row
            some = kv[:, (done + jnp.arange(n, dtype=jnp.int32)) % kind.slots]
            return sketched(sketch, some, done, stop, seed, kind.radius)

        made = tuple(jax.vmap(lambda row, layer=layer: one(row, kind.key(layer)))((sketch, kv, self.done, stop))
                     for layer, (sketch, kv) in enumerate(zip(self.sketches, self.kv, strict=True)))
        return self.replace(sketches=made, done=stop)


@struct
class PromptToSketch(Wrapper):
    """SubGen's cache during prefill, with all tokens of the prompt in `base`. `finish_prefill` moves the older ones to
    sketches."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: SubGenConfig = static()

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base, kind = self.base, self.kind
        into = kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        done = jnp.maximum(base.length - kind.recent, 0) // kind.every * kind.every
        slot = jnp.arange(into.kv[0].shape[2], dtype=jnp.int32)
        at = jnp.minimum(done[:, None] + (slot - done[:, None]) % kind.slots, base.capacity - 1)
        latest = tuple(jnp.take_along_axis(kv, at[:, None, :, None], 2) for kv in base.kv)
        made = []
        for layer, (sketch, kv) in enumerate(zip(into.sketches, base.kv, strict=True)):
            one = lambda row, layer=layer: sketched(row[0], row[1], jnp.int32(0), row[2], kind.key(layer), kind.radius)
            made.append(jax.vmap(one)((sketch, kv, done)))
        return into.replace(kv=latest, sketches=tuple(made), done=done, length=base.length)


@CACHES.register("subgen", "SubGen: Token Generation in Sublinear Time and Memory", "Zandieh et al. 2024",
                 family="bounded")
@dataclasses.dataclass(frozen=True)
class SubGenConfig(KVConfig):
    """Keeps the latest tokens, and samples of the others: keys drawn from clusters, and tokens drawn by the norms of
    values.

    Decodes texts of any length in constant memory; the prefill stores the whole prompt. Choose `radius` for a model, by
    the lengths of its keys.

    Attributes:
        radius: maximum distance of a key to the first key of its cluster.
        clusters: maximum number of clusters of each head.
        keys: number of keys drawn from each cluster.
        values: number of tokens drawn from all tokens.
        recent: minimum number of latest tokens that are stored exactly.
        every: number of further exact tokens; when this number is reached, they are moved to the sketches together.
        seed: seed of the draws.
    """

    radius: NonNegative
    clusters: Count = 256
    keys: Count = 4
    values: Count = 256
    recent: Whole = 128
    every: Count = 32
    seed: Whole = 0

    name = "subgen"

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    @property
    def slots(self) -> int:
        """Maximum number of recent tokens that are stored exactly, `recent + every`. When it is reached, the oldest
        `every` of them are moved to the sketches."""
        return self.recent + self.every

    def key(self, layer: int) -> Array:
        """Returns the `jax.random` key of layer number `layer`, from which the draws of its sketch derive."""
        return jax.random.fold_in(jax.random.key(self.seed), layer)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> SubGenCache:
        slots = whole_blocks(self.slots)
        C, zeros = self.clusters, lambda *rest, of=jnp.float32: jnp.zeros((batch, *rest), of)
        sketches = tuple(Sketch(
            centres=zeros(s.heads, C, s.width), counts=zeros(s.heads, C, of=jnp.int32),
            keys=zeros(s.heads, C, self.keys, s.width), tokens=zeros(s.heads, self.values, s.both),
            mass=zeros(s.heads)) for s in shapes)
        none = zeros(of=jnp.int32)
        return SubGenCache(kv=empty_kv(shapes, batch, slots, dtype), sketches=sketches, done=none, length=none,
                         given=inputs, widths=key_widths(shapes), size=size, shapes=shapes, kind=self)

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("sliding windows", "soft caps", "biases"))
