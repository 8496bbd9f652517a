"""A sketch of attention in place of older tokens ("SubGen: Token Generation in Sublinear Time and Memory", Zandieh et
al., 2024).

Attention is a sum of values over a sum of weights, and both are estimated from samples. Keys are clustered as they
come: a key joins the nearest cluster if that is near enough, else it begins one. Of each cluster a few keys are drawn,
each of its keys as likely as any other, and stand for all of them in the sum of weights. Of all tokens some are drawn
by the squares of their values' norms, and stand for all values, each divided by how likely it was. Both sums are right
in the mean over what is drawn. The latest tokens are kept as they are.

What is drawn depends on a token's position and on `seed` alone, so that it does not matter how tokens come. `every`
tokens leave the latest ones together, and a round commits no token beyond that point. Where there are as many clusters
as there is room for, a key joins the nearest one, however far.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense, write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.cache.wrapper import Wrapper
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import BLOCK, Bias, window_attention_lse


@struct
class Sketch(Struct):
    """What stands for the older tokens of a layer, of one row or of several.

    Attributes:
        centres: `f32[..., G, C, d]`, the first key of each cluster. counts: `i32[..., G, C]`, how many keys each has;
            0: there is none. keys: `f32[..., G, C, t, d]`, those that were drawn of it.
        tokens: `f32[..., G, s, d + e]`, keys and values that were drawn of all tokens.
        mass: `f32[..., G]`, the sum of the squares of all values' norms.
    """

    centres: Array
    counts: Array
    keys: Array
    tokens: Array
    mass: Array


def taken_in(sketch: Sketch, kv: Array, valid: Array, draws: Array, radius: float) -> Sketch:
    """With one more token `f32[G, d + e]` of a row, if it is `valid` (`bool[]`), by numbers `f32[G, t + s]` that were
    drawn between 0 and 1."""
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
    """With the tokens `f32[G, n, d + e]` of a row, which stand at positions `start` (`i32[]`) and behind, up to `stop`.

    Args:
        seed: a key of `jax.random`; a token's numbers are drawn by it and its position.
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
    """What a sketch says of queries `f32[G, r, d]`: the sum of values, `f32[G, r, e]`, and that of weights, `f32[G,
    r]`, both divided by the exponential of a third, `f32[G, r]`, the largest exponent in them."""
    t = sketch.keys.shape[2]
    own = jnp.einsum("grd,gctd->grct", q, sketch.keys)
    there = (sketch.counts > 0)[:, None, :, None]
    keys, values = sketch.tokens[..., :d], sketch.tokens[..., d:]
    exponents = jnp.einsum("grd,gsd->grs", q, keys)
    squares = jnp.square(values).sum(-1)
    share = jnp.where(squares > 0, sketch.mass[:, None] / jnp.maximum(squares, 1e-30), 0) / values.shape[1]
    top = jnp.maximum(jnp.where(there, own, -1e30).max((2, 3)),
                      jnp.where(share[:, None] > 0, exponents, -1e30).max(-1))
    safe = lambda x: jnp.exp(jnp.minimum(x, 0))     # what does not count may be larger
    total = (jnp.where(there, safe(own - top[..., None, None]), 0) * sketch.counts[:, None, :, None]).sum((2, 3)) / t
    values = jnp.einsum("grs,gs,gse->gre", safe(exponents - top[..., None]), share, values)
    return values, total, top


@struct
class Sublinear(KeyValues):
    """The latest tokens, and a sketch of the others.

    Attributes:
        kv, given, widths: see `KeyValues`; the token at position `p` in slot `p` modulo the number of them.
        sketches: a tuple of one a layer. done: `i32[B]`, how many tokens those are of.
        length: `i32[B]`. size, shapes, kind: static; the most tokens of a text.
    """

    kv: tuple[Array, ...]
    sketches: tuple[Sketch, ...]
    done: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: Sublinearly = static()

    supports = frozenset({"trees"})

    @property
    def capacity(self) -> int:
        return self.size

    def horizon(self) -> Array | None:
        return self.kind.slots - (self.length - self.done) if self.kv else None

    def for_prompt(self) -> Cache:
        if not self.kv:
            return self
        whole = dense(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given)
        return PromptToSketch(base=whole, shapes=self.shapes, kind=self.kind)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if window.certain or bias is not None or softcap is not None:
            raise ValueError(f"cache: {self.kind.name} reads a prompt as a whole, which only the model that answers "
                             "does, and takes no bias and no soft cap of the scores; give a draft model another cache")
        kv, sketch, d = self.kv[layer], self.sketches[layer], self.widths[layer]
        G, R = kv.shape[1], self.kind.slots
        slot = jnp.arange(kv.shape[2], dtype=jnp.int32)
        at = self.done[:, None] + (slot - self.done[:, None]) % R
        at = jnp.where((slot < R) & (at < self.length[:, None]), at, -1)
        near, lse = window_attention_lse(q, k, v, window.visible(), window.positions, kv, slot_positions=at[:, None],
                                         scale=scale, key_positions=window.key_positions)

        def one(sketch: Any, q: Array, near: Array, lse: Array) -> Array:       # of one node
            values, total, top = estimated(sketch, q.reshape(G, -1, d), d)
            most = jnp.maximum(top, lse.reshape(top.shape))
            far, close = jnp.exp(top - most), jnp.exp(lse.reshape(top.shape) - most)
            values = values * far[..., None] + close[..., None] * near.reshape(values.shape)
            return (values / jnp.maximum(total * far + close, 1e-30)[..., None]).reshape(near.shape)

        f32 = lambda x: x.astype(jnp.float32)
        out = each_node(functools.partial(jax.vmap(one), sketch), f32(q) * scale, f32(near), f32(lse))
        own = k.shape[1] - q.shape[1]
        return out.astype(near.dtype), (k[:, own:], v[:, own:])

    def commit(self, entries: Entries, slots: Array) -> Sublinear:
        if not self.kv:
            return self
        to = jnp.where(slots >= 0, slots % self.kind.slots, -1)
        kv = tuple(write(held, jnp.concatenate(entry, -1), to) for held, entry in zip(self.kv, entries, strict=True))
        new = self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))
        full = new.length - new.done >= self.kind.slots
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._sketched(full))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _sketched(self, rows: Array) -> Sublinear:
        """With the oldest of the latest tokens of those rows (`bool[B]`) in sketches."""
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
    """A prompt of which there will be a sketch."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: Sublinearly = static()

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
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


@dataclasses.dataclass(frozen=True)
class Sublinearly(CacheConfig):
    """A `Sublinear` cache.

    Attributes:
        radius: how far a key may lie from the first one of its cluster.
        clusters: there are at most, in each head. keys: that are drawn of each. values: tokens that are drawn of all.
        recent: the latest tokens, which stay as they are, and up to `every` more: so many are sketched together.
        seed: of what is drawn. name: what errors call it.
    """

    radius: float
    clusters: int = 256
    keys: int = 4
    values: int = 256
    recent: int = 128
    every: int = 32
    seed: int = 0
    name: str = "subgen"

    def __post_init__(self) -> None:
        for name in ("clusters", "keys", "values", "every"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number from 1")
        if self.radius < 0 or self.recent < 0:
            raise ValueError(f"radius, recent: got {self.radius} and {self.recent}, takes 0 or more")

    @property
    def slots(self) -> int:
        """How many of the latest tokens there are at most."""
        return self.recent + self.every

    def key(self, layer: int) -> Array:
        """What a layer draws by."""
        return jax.random.fold_in(jax.random.key(self.seed), layer)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Sublinear:
        """An empty cache."""
        if any(shape.sliding is not None for shape in shapes):
            raise ValueError(f"cache: {self.name} takes a model without sliding windows")
        slots = self.slots if self.slots <= BLOCK else -(-self.slots // BLOCK) * BLOCK
        C, zeros = self.clusters, lambda *rest, of=jnp.float32: jnp.zeros((batch, *rest), of)
        sketches = tuple(Sketch(
            centres=zeros(s.heads, C, s.width), counts=zeros(s.heads, C, of=jnp.int32),
            keys=zeros(s.heads, C, self.keys, s.width), tokens=zeros(s.heads, self.values, s.both),
            mass=zeros(s.heads)) for s in shapes)
        none = zeros(of=jnp.int32)
        return Sublinear(kv=empty_kv(shapes, batch, slots, dtype), sketches=sketches, done=none, length=none,
                         given=inputs, widths=key_widths(shapes), size=size, shapes=shapes, kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
