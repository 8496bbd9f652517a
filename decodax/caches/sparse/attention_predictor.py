"""Attention to the blocks of tokens that a small network expects to be attended to next ("AttentionPredictor: Temporal
Patterns Matter for KV Cache Compression", Yang et al., 2025).

The attention of the latest `history` tokens, as the largest weight in each block of `block` tokens, is an image of time
and place for each head. A convolutional network, the same for all layers and heads, reads it and gives a score for
each block; a query reads the first tokens, the latest ones, and the blocks of highest score. Its own attention becomes
the next row of the image. No token is ever lost. `decodax.train.attention_predictor` trains the network.

What is expected depends on the attention of all tokens before. So blocks are chosen when a token is committed, and hold
for the next `every` tokens; a round of drafts is cut there. `every=1` is the paper, of which each round commits one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import Dense, dense, write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.cache.wrapper import Wrapper
from decodax.caches.constant import Constant
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.pallas_kernels.window_attention import Bias, window_attention


@dataclasses.dataclass(frozen=True)
class AttentionNet:
    """The network: two convolutions over time and blocks, the mean over time, and a weighted sum.

    Attributes:
        first, first_bias: `f32[c, 1, 3, 3]` and `f32[c]`. second, second_bias: `f32[c', c, 3, 3]` and `f32[c']`.
        last, last_bias: `f32[c']` and `f32[]`. In the paper `c` is 16 and `c'` 32.
    """

    first: Constant
    first_bias: Constant
    second: Constant
    second_bias: Constant
    last: Constant
    last_bias: Constant

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> AttentionNet:
        """That with so many arrays, in the order of the attributes."""
        return cls(*(Constant(np.asarray(x, np.float32)) for x in arrays))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All of them, in the order of the attributes."""
        return tuple(jnp.asarray(getattr(self, field.name).value) for field in dataclasses.fields(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the arrays to a file `.npz`, by their names."""
        np.savez(path, **{field.name: getattr(self, field.name).value for field in dataclasses.fields(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionNet:
        """What `save` wrote.

        Raises:
            ValueError: a file without one of the arrays.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        with np.load(path, allow_pickle=False) as found:
            if lacking := [name for name in names if name not in found]:
                raise ValueError(f"net: {os.fspath(path)} has no {' and no '.join(lacking)}, takes a file that "
                                 "AttentionNet.save wrote")
            return cls.of([found[name] for name in names])


def expected(arrays: Sequence[Array], image: Array, real: Array) -> Array:
    """`f32[N, n]`: the scores of blocks, of images `f32[N, t, n]` by the arrays of an `AttentionNet`.

    Args:
        real: `bool[t, n]` or `bool[N, t, n]`, the part of the arrays that is an image; around it they are taken for 0,
            as convolutions take what is beyond the border.
    """
    first, first_bias, second, second_bias, last, last_bias = arrays
    real = jnp.broadcast_to(real, image.shape)[:, None]

    def convolve(x: Array, kernel: Array, bias: Array) -> Array:
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", precision=lax.Precision.HIGHEST)
        return jnp.where(real, jax.nn.relu(x + bias[:, None, None]), 0)

    x = convolve(convolve(jnp.where(real, image[:, None], 0), first, first_bias), second, second_bias)
    mean = x.sum(2) / jnp.maximum(real.sum(2), 1)
    return jnp.einsum("ncw,c->nw", mean, last) + last_bias


def pooled(weights: Array, at: Array, blocks: int, block: int) -> Array:
    """`f32[blocks]`: the largest of the weights `f32[n]` of tokens at positions `i32[n]` (-1: none) in each block."""
    where = jnp.where(at >= 0, at // block, blocks)
    return jnp.zeros(blocks, jnp.float32).at[where].max(weights, mode="drop")


@struct
class Expecting(KeyValues):
    """Everything, in the order of positions, the latest attention, and the blocks that are read next.

    Attributes:
        kv, given, widths: see `KeyValues`.
        images: a tuple of one `f32[B, H, t, n]` a layer: of the latest `t` tokens the largest weight in each of `n`
            blocks, that of position `p` at `p % t`; None: the layer reads everything.
        chosen: a tuple of one `i32[B, H, C]` a layer, blocks; -1: none. None: as of `images`.
        start: `i32[B]`, the position of the first token that chose. since: `i32[B]`, that of the first one that reads
            what is chosen now.
        length: `i32[B]`. kind: static.
    """

    kv: tuple[Array, ...]
    images: tuple[Array | None, ...]
    chosen: tuple[Array | None, ...]
    start: Array
    since: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: Expectation = static()

    supports = frozenset({"trees"})

    def horizon(self) -> Array | None:
        return self.kind.every - (self.length - self.since) if any(x is not None for x in self.chosen) else None

    def for_prompt(self) -> Cache:
        if not self.kv:
            return self
        whole = dense(self.shapes, self.length.shape[0], self.capacity, self.kv[0].dtype, self.given)
        queries = tuple(None if image is None else jnp.zeros((*image.shape[:3], d), whole.kv[0].dtype)
                        for image, d in zip(self.images, self.widths, strict=True))
        return PromptToExpect(base=whole, queries=queries, shapes=self.shapes, kind=self.kind)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own = k.shape[1] - q.shape[1]
        entry = k[:, own:], v[:, own:]
        if self.chosen[layer] is None:
            return window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], self.length,
                                    scale=scale, sliding=sliding, softcap=softcap, bias=bias,
                                    key_positions=window.key_positions), entry
        if window.certain or bias is not None or softcap is not None:
            raise ValueError("cache: attention-predictor reads a prompt as a whole, which only the model that answers "
                             "does, and takes no bias and no soft cap of the scores; give a draft model another cache")
        q = q.astype(jnp.float32) * scale
        seen = jnp.broadcast_to(window.visible(), (*q.shape[:2], k.shape[1]))
        at = self._read(layer)
        out, row = self._attend(layer, q, k, v, seen, window.key_positions, at)
        if self.kind.full is not None:
            now = (window.positions - self.start[:, None] + 1) % self.kind.full == 0
            # a loop of one trip or none, since a conditional would have XLA copy what it reads
            once = lambda c: (jnp.zeros((), bool), self._everything(layer, q, k, seen, window.key_positions))
            _, whole = lax.while_loop(lambda c: c[0], once, (now.any(), row))
            row = jnp.where(now[:, :, None, None], whole, row)
            # what is committed has to wait for this, too, or XLA on CPU copies the cache to protect its readers
            out = jnp.where(jnp.isfinite(row).all(-1, keepdims=True), out, jnp.nan)
        return out.astype(v.dtype), (*entry, row)

    def _read(self, layer: int) -> Array:
        """`i32[B, H, n]`: the positions that a row's heads read of what is cached, each once; -1: none."""
        kind, chosen = self.kind, self.chosen[layer]
        assert chosen is not None
        first = jnp.arange(kind.sinks, dtype=jnp.int32)
        # behind a text of whole blocks there is a token between the last one of these and the latest tokens, which the
        # authors' code does not read; where all blocks are chosen everything is read
        end = -(-self.since // kind.block) - kind.recent // kind.block
        every = end - kind.sinks // kind.block <= chosen.shape[2]
        begin = self.since - kind.recent + 1
        begin = jnp.maximum(jnp.where(every, jnp.minimum(end * kind.block, begin), begin), kind.sinks)[:, None]
        late = begin + jnp.arange(min(kind.recent + kind.every + 1, self.capacity), dtype=jnp.int32)
        some = (chosen[..., None] * kind.block + jnp.arange(kind.block, dtype=jnp.int32)).reshape(*chosen.shape[:2], -1)
        some = jnp.where((some >= kind.sinks) & (some < begin[:, :, None]), some, -1)
        wide = lambda x: jnp.broadcast_to(jnp.where(x < self.length[:, None], x, -1)[:, None],
                                          (*chosen.shape[:2], x.shape[-1]))
        return jnp.concatenate([wide(first[None]), some, wide(late)], -1)

    def _attend(self, layer: int, q: Array, k: Array, v: Array, seen: Array, keys_at: Array,
                at: Array) -> tuple[Array, Array]:
        """Attention `f32[B, W, H, e]` of queries `f32[B, W, H, d]` to the tokens at `at` (`i32[B, H, n]`) and to those
        of the window that they see, and the largest weight in each block, `f32[B, W, H, blocks]`."""
        image, d, block = self.images[layer], self.widths[layer], self.kind.block
        assert image is not None

        def one(row: tuple[Array, ...]) -> tuple[Array, Array]:
            kv, k, v, q, seen, keys_at, at = row
            each = len(at) // len(kv)
            some = jax.vmap(lambda own, at: own[jnp.maximum(at, 0)])(kv, at.reshape(len(kv), -1))
            some = some.reshape(len(at), -1, some.shape[-1]).astype(jnp.float32)
            mine = jnp.concatenate([k, v], -1).astype(jnp.float32).swapaxes(0, 1).repeat(each, 0)
            held = jnp.broadcast_to((at >= 0)[None], (len(q), *at.shape))
            there = jnp.concatenate([held, jnp.broadcast_to(seen[:, None], (*held.shape[:2], seen.shape[1]))], -1)
            both = jnp.concatenate([some, mine], 1)
            scores = jnp.einsum("whd,hnd->whn", q, both[..., :d])
            weights = jax.nn.softmax(jnp.where(there, scores, -1e30), axis=-1)
            weights = jnp.where(there, weights, 0)
            where = jnp.concatenate([at, jnp.broadcast_to(keys_at, (len(at), len(keys_at)))], -1)
            rows = jax.vmap(lambda own: jax.vmap(lambda w, at: pooled(w, at, image.shape[3], block))(own, where))
            return jnp.einsum("whn,hne->whe", weights, both[..., d:]), rows(weights)

        return jax.vmap(lambda *row: one(row))(self.kv[layer], k, v, q, seen, keys_at, at)

    def _everything(self, layer: int, q: Array, k: Array, seen: Array, keys_at: Array) -> Array:
        """The largest weight in each block, `f32[B, W, H, blocks]`, of attention to everything; see `_attend`."""
        image, d, block = self.images[layer], self.widths[layer], self.kind.block
        assert image is not None
        n = image.shape[3]

        def one(row: tuple[Array, ...]) -> Array:
            kv, length, k, q, seen, keys_at = row
            (G, S, _), (W, H, _) = kv.shape, q.shape
            q = q.reshape(W, G, H // G, d)
            far = jnp.einsum("wgrd,gsd->wgrs", q, kv[..., :d].astype(jnp.float32)).reshape(W, H, S)
            near = jnp.einsum("wgrd,kgd->wgrk", q, k.astype(jnp.float32)).reshape(W, H, -1)
            there = jnp.concatenate([jnp.broadcast_to(jnp.arange(S) < length, (W, S)), seen], -1)[:, None]
            weights = jax.nn.softmax(jnp.where(there, jnp.concatenate([far, near], -1), -1e30), axis=-1)
            weights = jnp.where(there, weights, 0)
            far = jnp.pad(weights[..., :S], ((0, 0), (0, 0), (0, n * block - S))).reshape(W, H, n, block).max(-1)
            rows = jax.vmap(jax.vmap(lambda own: pooled(own, keys_at, n, block)))
            return jnp.maximum(far, rows(weights[..., S:]))

        return jax.vmap(lambda *row: one(row))(self.kv[layer], self.length, k, q, seen, keys_at)

    def commit(self, entries: Entries, slots: Array) -> Expecting:
        if not self.kv:
            return self
        kv, images = [], []
        length = jnp.maximum(self.length, slots.max(1) + 1)
        places = ring(slots, length, self.kind.history)
        for held, image, entry in zip(self.kv, self.images, entries, strict=True):
            kv.append(write(held, jnp.concatenate(entry[:2], -1), slots))
            images.append(None if image is None else write(image, entry[2], places))
        new = self.replace(kv=tuple(kv), images=tuple(images), length=length)
        if all(x is None for x in self.chosen):
            return new
        due = length - self.since >= self.kind.every
        # a loop of one trip or none, which carries no more than what it changes: XLA copies the rest
        once = lambda c: (jnp.zeros((), bool), new.choose(due).chosen)
        _, chosen = lax.while_loop(lambda c: c[0], once, (due.any(), self.chosen))
        return new.replace(chosen=chosen, since=jnp.where(due, length, self.since))

    def choose(self, rows: Array) -> Expecting:
        """With the blocks that the network expects next, in those rows (`bool[B]`)."""
        kind, arrays, made = self.kind, self.kind.net.arrays, []

        def one(image: Array, old: Array, length: Array, start: Array) -> Array:
            t, n = image.shape[1:]
            image = image[:, (length + jnp.arange(t)) % t]                  # in the order of time, the latest last
            block, size = jnp.arange(n), -(-length // kind.block)
            free = (block >= kind.sinks // kind.block) & (block < size - kind.recent // kind.block)
            real = (jnp.arange(t) >= t - jnp.minimum(start, t))[:, None] & free
            worth = expected(arrays, image, real)
            worth = jnp.where(free.sum() < 3, jnp.zeros_like(worth), worth)     # less than the kernels' width: take all
            found, chosen = lax.top_k(jnp.where(free, worth, -jnp.inf), old.shape[1])
            return jnp.where(found > -jnp.inf, chosen.astype(jnp.int32), -1)

        for image, old in zip(self.images, self.chosen, strict=True):
            new = None if image is None or old is None else jax.vmap(one)(image, old, self.length, self.start)
            made.append(None if new is None or old is None else jnp.where(rows[:, None, None], new, old))
        return self.replace(chosen=tuple(made), since=jnp.where(rows, self.length, self.since))


def ring(slots: Array, length: Array, size: int) -> Array:
    """`i32[B, W]`: where in a ring of `size` places nodes of positions `slots` go that are among the latest of texts of
    a `length` (`i32[B]`); -1: they do not."""
    return jnp.where((slots >= 0) & (slots >= length[:, None] - size), slots % size, -1)


@struct
class PromptToExpect(Wrapper):
    """A prompt, and the queries of its latest tokens.

    Attributes:
        queries: a tuple of one `f[B, H, t, d]` a layer, that of position `p` at `p % t`; None: nothing is predicted.
    """

    base: Dense
    queries: tuple[Array | None, ...]
    shapes: tuple[KVLayer, ...] = static()
    kind: Expectation = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        if self.queries[layer] is None:
            return out, entry
        if options.get("bias") is not None or options.get("softcap") is not None:
            raise ValueError("cache: attention-predictor computes scores of queries and keys alone; takes a model "
                             "without a soft cap or a bias of its attention scores")
        return out, (*entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> PromptToExpect:
        base = self.base.commit([entry[:2] for entry in entries], slots)
        places = ring(slots, base.length, self.kind.history)
        queries = tuple(None if old is None else write(old, entry[2], places)
                        for old, entry in zip(self.queries, entries, strict=True))
        return self.replace(base=base, queries=queries)

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base, kind = self.base, self.kind
        images: list[Array | None] = []
        into = kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        for kv, queries, image, d in zip(base.kv, self.queries, into.images, base.widths, strict=True):
            if queries is None or image is None:
                images.append(None)
                continue

            def one(row: tuple[Array, ...], d: int = d, shape: tuple[int, ...] = image.shape) -> Array:
                kv, q, length = row
                (t, n), S = shape[2:], kv.shape[1]
                slot = jnp.arange(t)
                at = length - 1 - (length - 1 - slot) % t       # the position of each place in the ring
                q = q.astype(jnp.float32).reshape(len(kv), -1, t, d)
                scores = jnp.einsum("grtd,gsd->grts", q, kv[..., :d].astype(jnp.float32))
                weights = jax.nn.softmax(jnp.where(jnp.arange(S) <= at[:, None], scores, -1e30), axis=-1)
                weights = jnp.where(jnp.arange(S) <= at[:, None], weights, 0).reshape(-1, t, S)
                return jnp.pad(weights, ((0, 0), (0, 0), (0, n * kind.block - S))).reshape(-1, t, n, kind.block).max(-1)

            images.append(lax.map(one, (kv, queries, base.length)))
        new = into.replace(kv=base.kv, images=tuple(images), start=base.length, since=base.length, length=base.length)
        return new.choose(jnp.ones(base.length.shape, bool))


@dataclasses.dataclass(frozen=True)
class Expectation(CacheConfig):
    """An `Expecting` cache.

    Attributes:
        net: what `decodax.train.attention_predictor` trained.
        budget: tokens that a query reads, with the first `sinks` and the latest `recent`, its own included.
        every: how many tokens read what is chosen once. block: tokens of a block.
        history: how many tokens' attention the network sees.
        full: each so many tokens the network sees what attention to everything would have been; None: never.
        skip: layers that read everything.
    """

    net: AttentionNet
    budget: int = 1024
    sinks: int = 64
    recent: int = 64
    every: int = 1
    block: int = 16
    history: int = 64
    full: int | None = None
    skip: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("every", "block", "history", "full"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or given < 1):
                raise ValueError(f"{name}: got {given!r}, takes a number from 1")
        if self.sinks < 0 or self.recent < 1 or self.sinks % self.block or self.recent % self.block:
            raise ValueError(f"sinks, recent: got {self.sinks} and {self.recent}, takes whole blocks of {self.block} "
                             "tokens, and of the latest at least one")
        if not isinstance(self.budget, int) or self.budget < self.sinks + self.recent + 2 * self.block:
            raise ValueError(f"budget: got {self.budget!r}, takes a number of tokens with room for two blocks of "
                             f"{self.block} beside the {self.sinks} first tokens and the {self.recent} latest")

    @property
    def blocks(self) -> int:
        """How many blocks are chosen."""
        return (self.budget - self.sinks - self.recent) // self.block

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Expecting:
        """An empty cache."""
        images: list[Array | None] = []
        chosen: list[Array | None] = []
        count = -(-size // self.block)
        for layer, shape in enumerate(shapes):
            if layer in self.skip or shape.sliding is not None or size <= self.budget:
                images.append(None)
                chosen.append(None)
                continue
            if shape.queries is None:
                raise ValueError("cache: attention-predictor takes a model that says how many heads its queries have")
            images.append(jnp.zeros((batch, shape.queries, self.history, count), jnp.float32))
            chosen.append(jnp.full((batch, shape.queries, min(self.blocks, count)), -1, jnp.int32))
        zeros = jnp.zeros(batch, jnp.int32)
        return Expecting(kv=empty_kv(shapes, batch, size, dtype), images=tuple(images), chosen=tuple(chosen),
                         start=zeros, since=zeros + 0, length=zeros + 0, given=inputs, widths=key_widths(shapes),
                         shapes=shapes, kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
