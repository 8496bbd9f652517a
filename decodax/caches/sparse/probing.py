"""Caches that keep everything and read blocks that a probe query chooses ("Activation-aware Probe-Query: Effective
Key-Value Retrieval for Long-Context LLMs Inference", Xiao et al., 2025: ActQKV).

A prompt is read a window of tokens at a time. The probe query of a window is the mean of its queries, weighted by their
activation bias: how far a query is from the mean of those before it and its own window's, in standard deviations. While
decoding each query is its own probe. A block of keys is described by the mean of the few that receive most attention
while they are among the latest `recent` tokens. The cosine of the probe with these, of all heads of a layer together,
says which blocks are read; the first tokens and the latest are, in any case. Keys of blocks are scored as if they all
stood at one distance.

While decoding, the layers divide what they read between them by information density: the entropy of a layer's scores of
blocks, over its largest value, on the average of the latest `samples` windows and tokens.

What a token reads depends on committed tokens and on itself: windows are counted from the beginning of a text, whatever
the chunks that it comes in, and both the description of a block and the division over layers look at tokens alone that
are `room` behind, so that a round with that many nodes sees what plain decoding would see.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.caches.prefill.unread import Unread
from decodax.caches.rotation import rotated, turned
from decodax.caches.sparse.retrieval import attention_to
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import causal, each_node
from decodax.pallas_kernels.window_attention import BLOCK, Bias, merge, window_attention, window_attention_lse

LONGEST = 1000
"""Windows after which the mean of the queries goes on as if there were no more."""


@struct
class Activations(Struct):
    """What the queries of a layer were like in the windows so far: their mean and variance, `f32[B, m]`."""

    mean: Array
    variance: Array

    def after(self, x: Array, live: Array, count: Array) -> Activations:
        """With those of one more window, `f32[B, W, m]` where `live` (`bool[B, W]`), behind `count` (`i32[]`) ones."""
        size = jnp.maximum(live.sum(1), 1)[:, None].astype(jnp.float32)
        some = live[..., None]
        mean = jnp.where(some, x, 0).sum(1) / size
        variance = jnp.where(some, jnp.square(x - mean[:, None]), 0).sum(1) / size
        n = jnp.maximum(count, 1).astype(jnp.float32)
        first = Activations(mean=mean, variance=variance * size / jnp.maximum(size - 1, 1))
        later = Activations(mean=(self.mean * n + mean) / (n + 1),
                            variance=(self.variance * (n - 1 / size) + variance
                                      + jnp.square(mean - self.mean) / (1 + 1 / n)) / (n + 1 - 1 / size))
        new = jax.tree.map(lambda a, b: jnp.where(count == 0, a, b), first, later)
        return jax.tree.map(lambda old, new: jnp.where(live.any(1)[:, None], new, old), self, new)

    def bias(self, x: Array, live: Array) -> Array:
        """`f32[B, W]`: the activation biases of queries `f32[B, W, m]`, together 1; equal ones where all are zero."""
        spread = self.variance + self.variance.mean(-1, keepdims=True) / 100
        off = jnp.square(x - self.mean[:, None]) / jnp.maximum(spread, 1e-30)[:, None]
        off = jnp.where(live, off.mean(-1), 0)
        total = off.sum(1, keepdims=True)
        number = jnp.maximum(live.sum(1, keepdims=True), 1)
        return jnp.where(total > 0, off / jnp.maximum(total, 1e-30), jnp.where(live, 1 / number, 0))


def cosines(probe: Array, blocks: Array) -> Array:
    """`f32[N]`: of a probe `f32[H, d]` with what describes blocks, `f32[H, N, d]`, all heads together, to 14 bits."""
    products = jnp.einsum("hd,hnd->n", probe, blocks)
    norms = jnp.sqrt(jnp.square(blocks).sum((0, 2))), jnp.sqrt(jnp.square(probe).sum())
    # in the first layer, blocks with the same tokens have the same keys but for what their rotation and its inverse
    # round: equal ones shall tie, whatever that is, so that the earlier one is taken in a batch of any size
    return jnp.round(products / jnp.maximum(norms[0], 1e-12) / jnp.maximum(norms[1], 1e-12) * 2 ** 14) / 2 ** 14


def density(scores: Array, there: Array) -> Array:
    """`f32[]`: the entropy of the first `there` (`i32[]`) of scores `f32[N]`, behind a softmax, over its largest value;
    -1 where there are fewer than 2."""
    shares = jax.nn.softmax(scores, where=jnp.arange(len(scores)) < there)
    entropy = -(shares * jnp.log(shares + 1e-10)).sum()
    return jnp.where(there > 1, entropy / jnp.log(jnp.maximum(there, 2).astype(jnp.float32)), -1)


def divided(densities: Array, total: int, least: Array, most: Array) -> Array:
    """`i32[L]`: how many of `total` blocks each layer reads, by its share of what the layers from it on have, between
    `least` and `most` (`i32[]`); layer by layer, each from what those before it have left."""
    def one(left: Array, layer: tuple[Array, Array]) -> tuple[Array, Array]:
        own, rest = layer
        part = jnp.round(own / jnp.maximum(rest, 1e-30) * left)
        number = jnp.maximum(jnp.minimum(part, most), least)
        return left - number, number

    rest = jnp.cumsum(densities[::-1])[::-1]
    return lax.scan(one, jnp.float32(total), (densities, rest))[1].astype(jnp.int32)


@struct
class Probed(KeyValues):
    """Everything, in the order of positions, with a description of each block.

    Attributes:
        kv, given, widths: see `KeyValues`. blocks: a tuple of one `f32[B, H, N, d]` a layer, the mean of a block's
            representative keys before their rotation; None where a layer reads everything.
        paid: a tuple of one `f32[B, H, S, 1]` a layer, the attention that each token has received that counts.
        densities: `f32[B, L, M]`, of each layer with blocks, in the latest windows and tokens, which end at the
            positions `sampled` (`i32[B, M]`, -1: none).
        length: `i32[B]`. kind: static.
    """

    kv: tuple[Array, ...]
    blocks: tuple[Array | None, ...]
    paid: tuple[Array | None, ...]
    densities: Array
    sampled: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: ProbeQueries = static()

    supports = frozenset({"trees"})

    def for_prompt(self) -> Cache:
        return Unread(length=jnp.zeros_like(self.length), into=self) if self.kv else self

    def read(self, prompt: ReadPrompt, length: Array) -> Probed:
        """With the first `length` tokens (`i32[B]`) of a prompt; the newest one comes behind them."""
        kind, (B, n) = self.kind, prompt.tokens.shape
        tokens = jnp.pad(prompt.tokens, ((0, 0), (0, -n % kind.window)))
        none = tuple(Activations(mean=jnp.zeros((B, own.shape[1] * own.shape[3])), variance=jnp.zeros(
            (B, own.shape[1] * own.shape[3]))) for own in self.blocks if own is not None)

        def visit(i: Array, carry: tuple[Probed, tuple[Activations, ...]]) -> tuple[Probed, tuple[Activations, ...]]:
            cache, before = carry
            start = i * kind.window
            slots = jnp.broadcast_to(start + jnp.arange(kind.window, dtype=jnp.int32), (B, kind.window))
            live = slots < length[:, None]
            window = causal(lax.dynamic_slice_in_dim(tokens, start, kind.window, 1), slots[:, 0], live)
            reading: Any = ProbingWindow(cache, i, before)
            out = prompt.model.apply(prompt.params, window, reading)
            slots = jnp.where(live & jnp.isfinite(out.hidden).all(-1), slots, -1)
            return cache.commit(out.entries, slots), tuple(reading.after)

        windows = (length.max() + kind.window - 1) // kind.window
        return lax.fori_loop(0, windows, visit, (self, none))[0]

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own, kind, shape = k.shape[1] - q.shape[1], self.kind, self.shapes[layer]
        k_own, v_own, blocks = k[:, own:], v[:, own:], self.blocks[layer]
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, key_positions=window.key_positions)
        if blocks is None:
            return window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], self.length,
                                    sliding=sliding, bias=bias, **options), (k_own, v_own)
        kind.refuse(bias, softcap)
        if window.certain:
            raise ValueError(f"cache: {kind.name} reads a prompt by windows of its own, which only the model that "
                             "answers does; give a draft model another cache")
        if k.shape[1] > kind.room:
            raise ValueError(f"cache: {kind.name} takes windows of at most room={kind.room} nodes, got one of "
                             f"{k.shape[1]}; takes room={k.shape[1]} or more")
        near = window_attention_lse(q, k, v, window.visible(), window.positions, **options)
        at, asked = window.positions, q.astype(jnp.float32)
        far = kind.at_one_distance(shape, asked, at)
        each = jax.vmap(lambda *row: self._read(layer, *row))
        read = functools.partial(each, self.kv[layer], blocks, self.densities, self.sampled, self.length)
        *far, found = each_node(read, scale * asked, far, at)
        out, lse = merge(near, tuple(far))
        return out, (k_own, v_own, scale * asked, lse, found)

    def _read(self, layer: int, kv: Array, blocks: Array, densities: Array, sampled: Array, length: Array, q: Array,
              far: Array, at: Array) -> tuple[Array, Array, Array]:
        """Attention of a query `f32[H, d]` at `at` (`i32[]`) of one row to what it reads of the cache, and the density
        of its scores; `far`: the query at the distance that scores are of."""
        kind, G, d = self.kind, kv.shape[0], self.widths[layer]
        there = kind.available(at)
        number = self._cut(layer, densities, sampled, there, at)
        where, found = self._where(blocks, far, there, number, length)
        some = kv[:, jnp.maximum(where, 0)].astype(jnp.float32)
        out, lse = attention_to(q.reshape(G, -1, d), some, jnp.broadcast_to(where >= 0, (G, len(where))), d)
        return out, lse, found

    def _where(self, blocks: Array, probe: Array, there: Array, number: Array, length: Array) -> tuple[Array, Array]:
        """`i32[n]`: the positions in the cache that a probe reads, of the `there` first blocks the best `number`; -1:
        none. And the density of its scores."""
        kind, N = self.kind, blocks.shape[1]
        P, S = kind.block, self.capacity
        scores = cosines(probe, blocks)
        found, best = lax.top_k(jnp.where(jnp.arange(N) < there, scores, -jnp.inf), min(2 * kind.blocks, N))
        chosen = jnp.where((found > -jnp.inf) & (jnp.arange(len(best)) < number), kind.sinks + best * P, -1)
        chosen = jnp.where(chosen[:, None] >= 0, chosen[:, None] + jnp.arange(P), -1).reshape(-1)
        late = kind.sinks + there * P + jnp.arange(min(kind.recent + P, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.arange(min(kind.sinks, S), dtype=jnp.int32), late])
        where = jnp.concatenate([jnp.where(always < length, always, -1), chosen.astype(jnp.int32)])
        return where, density(scores, there)

    def _cut(self, layer: int, densities: Array, sampled: Array, there: Array, at: Array) -> Array:
        """`i32[]`: how many of `there` blocks a layer reads at a position, by densities at least `room` before it."""
        kind = self.kind
        known = (sampled >= 0) & (sampled <= at - kind.room)
        used = known & (jnp.cumsum(known[::-1])[::-1] <= kind.samples)
        means = jnp.where(used, densities, 0).sum(1) / kind.samples
        parts = divided(means, kind.blocks * len(means), jnp.minimum(there, kind.least),
                        jnp.minimum(there, 2 * kind.blocks))
        place = sum(own is not None for own in self.blocks[:layer])
        return jnp.where(used.sum() == kind.samples, parts[place], jnp.minimum(there, kind.blocks))

    def commit(self, entries: Entries, slots: Array) -> Probed:
        if not self.kv:
            return self
        length = jnp.maximum(self.length, slots.max(1) + 1)
        kv, blocks, paid, found = [], [], [], []
        for layer, (held, own, was, entry) in enumerate(zip(self.kv, self.blocks, self.paid, entries, strict=True)):
            kv.append(write(held, jnp.concatenate(entry[:2], -1), slots))
            if own is not None and was is not None:
                d = self.widths[layer]
                was = jax.vmap(lambda *row, d=d: self._received(d, *row))(was, kv[-1], length, slots, *entry[2:4])
                own = self._described(layer, own, kv[-1], was, length, slots.shape[1])
                found.append(entry[4])
            blocks.append(own)
            paid.append(was)
        densities, sampled = self.densities, self.sampled
        if found:
            new = jnp.where((slots >= 0) & (found[0] >= 0), slots, -1)
            every = jnp.concatenate([sampled, new], 1)
            # the latest ones in their order; those that there are none of come first
            order = jnp.argsort(every, axis=1, stable=True)[:, -sampled.shape[1]:]
            sampled = jnp.take_along_axis(every, order, 1)
            densities = jnp.take_along_axis(jnp.concatenate([densities, jnp.stack(found, 1)], 2), order[:, None], 2)
        return self.replace(kv=tuple(kv), blocks=tuple(blocks), paid=tuple(paid), densities=densities, sampled=sampled,
                            length=length)

    def _received(self, d: int, paid: Array, kv: Array, length: Array, slots: Array, q: Array, lse: Array) -> Array:
        """With the attention that queries `f32[W, H, d]` of one row, whose sums are `lse` (`f32[W, H]`), pay."""
        kind, (W, H, _), (G, S, _) = self.kind, q.shape, kv.shape
        n = min(kind.recent + W, S)
        first = jnp.clip(length - n, 0, S - n)
        keys = lax.dynamic_slice_in_dim(kv, first, n, 1)[..., :d].astype(jnp.float32)
        scores = jnp.einsum("wgrd,gnd->wgrn", q.reshape(W, G, -1, d), keys).reshape(W, H, n)
        at = first + jnp.arange(n, dtype=jnp.int32)
        behind = slots[:, None] - at
        end = kind.sinks + ((at - kind.sinks) // kind.block + 1) * kind.block
        counts = (slots[:, None] >= 0) & (behind >= 0) & (behind < kind.recent) & (at >= kind.sinks)
        counts &= slots[:, None] <= end + kind.recent - kind.room
        new = jnp.where(counts[:, None], jnp.exp(scores - lse[..., None]), 0).sum(0)[..., None]
        old = lax.dynamic_slice_in_dim(paid, first, n, 1)
        return lax.dynamic_update_slice_in_dim(paid, old + new, first, 1)

    def _described(self, layer: int, blocks: Array, kv: Array, paid: Array, length: Array, width: int) -> Array:
        """With the blocks that the last of the attention that counts for them has been paid to, in a window so wide."""
        kind, d, (B, H, N, _) = self.kind, self.widths[layer], blocks.shape
        P, S, G = kind.block, self.capacity, kv.shape[1]
        which = kind.complete(self.length)[:, None] + jnp.arange(min(width // P + 2, N), dtype=jnp.int32)
        at = jnp.minimum((kind.sinks + which[..., None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(B, -1), S - 1)
        keys = jnp.take_along_axis(kv[..., :d], at[:, None, :, None], 2).astype(jnp.float32)
        keys = turned(self.shapes[layer], keys.swapaxes(1, 2), -at).swapaxes(1, 2).reshape(B, G, -1, P, d)
        received = jnp.take_along_axis(paid, at[:, None, :, None], 2).reshape(B, H, -1, P)
        best = lax.top_k(received, min(kind.representatives, P))[1]
        some = jnp.take_along_axis(jnp.repeat(keys, H // G, 1), best[..., None], 3).mean(3)
        return write(blocks, some.swapaxes(1, 2), jnp.where(which < kind.complete(length)[:, None], which, -1))


class ProbingWindow:
    """In a cache's place while a window of a prompt is read; `after` becomes what the layers' queries were like.

    Attributes:
        count: `i32[]`, how many windows were before it. before: what queries were like in these.
    """

    def __init__(self, base: Probed, count: Array, before: tuple[Activations, ...]):
        self.base, self.count, self.before = base, count, before
        self.after: list[Activations] = []
        self.inputs, self.reads, self.capacity = base.inputs, None, base.capacity

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               **options: Any) -> tuple[Array, PyTree]:
        base, kind = self.base, self.base.kind
        blocks, kv = base.blocks[layer], base.kv[layer]
        given = q, k, v, window.visible(), window.positions
        if blocks is None:
            return window_attention(*given, kv, base.length, key_positions=window.key_positions, scale=scale,
                                    **options), (k, v)
        kind.refuse(options.get("bias"), options.get("softcap"))
        B, W, H, d = q.shape
        asked = q.astype(jnp.float32)
        far = kind.at_one_distance(base.shapes[layer], asked, window.positions).reshape(B, W, -1)
        now = self.before[len(self.after)].after(far, window.live, jnp.minimum(self.count, LONGEST))
        self.after.append(now)
        probe = jnp.einsum("bw,bwm->bm", now.bias(far, window.live), far).reshape(B, H, d)
        there = kind.available(self.count * kind.window)
        at, found = jax.vmap(lambda blocks, probe, length: base._where(
            blocks, probe, there, jnp.int32(kind.blocks), length))(blocks, probe, base.length)
        n = at.shape[1]
        at = jnp.pad(at, ((0, 0), (0, -n % BLOCK if n > BLOCK else 0)), constant_values=-1)[:, None]
        some = jnp.take_along_axis(kv, jnp.maximum(at, 0)[..., None], 2)
        out, lse = window_attention_lse(*given, some, slot_positions=at, scale=scale,
                                        key_positions=window.key_positions)
        last = jnp.arange(W) == window.live.sum(1, keepdims=True) - 1
        return out, (k, v, scale * asked, lse, jnp.where(last, found[:, None], -1))


@dataclasses.dataclass(frozen=True)
class ProbeQueries(CacheConfig):
    """A `Probed` cache.

    Attributes:
        budget: tokens that a window or a token reads beside its own window: the first `sinks`, the latest `recent`, and
            blocks of `block` tokens. While decoding it is what layers read on the average, at most twice as many blocks
            and at least `least`.
        window: tokens of a prompt that are read at a time; at most `recent`.
        representatives: keys of a block that describe it. samples: windows and tokens whose densities divide the blocks
            over layers; before there are so many all layers read the same number.
        room: the most nodes of a round. name: what errors call it.
    """

    budget: int
    sinks: int = 64
    recent: int = 512
    block: int = 32
    window: int = 256
    representatives: int = 4
    samples: int = 100
    least: int = 32
    room: int = 64
    name: str = "act-qkv"
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("budget", "recent", "block", "window", "representatives", "samples", "least"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number from 1")
        if self.sinks < 0:
            raise ValueError(f"sinks: got {self.sinks}, takes 0 or more")
        if not 1 <= self.room < self.recent or self.window > self.recent:
            raise ValueError(f"room, window: got {self.room} and {self.window}, takes 1 or more and less than "
                             f"the {self.recent} recent tokens, and at most these")
        if self.blocks < self.least:
            raise ValueError(f"budget: got {self.budget}, {self.blocks} blocks of {self.block} beside the {self.sinks} "
                             f"first tokens and the {self.recent} latest, takes {self.least} (least) or more")

    @property
    def blocks(self) -> int:
        """How many blocks a layer reads on the average."""
        return (self.budget - self.sinks - self.recent) // self.block

    def available(self, at: Array) -> Array:
        """How many blocks lie as a whole before the latest tokens at a position."""
        return jnp.maximum((at - self.recent - self.sinks) // self.block, 0)

    def complete(self, length: Array) -> Array:
        """How many blocks of so long a text have received all the attention that counts for them."""
        return self.available(length + self.room - 1)

    def at_one_distance(self, shape: KVLayer, q: Array, at: Array) -> Array:
        """Queries `f32[B, W, H, d]` at `i32[B, W]`, rotated to the distance that keys are scored at."""
        return rotated(shape, turned(shape, q, -at), jnp.full_like(at, self.recent - 1))

    def refuse(self, bias: Any, softcap: float | None) -> None:
        """Raises ValueError where scores are more than products of queries and keys."""
        if bias is not None or softcap is not None:
            raise ValueError(f"cache: {self.name} scores blocks by queries and keys alone; takes a model without a "
                             "soft cap or a bias of its attention scores")

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        N, M = max((capacity - self.sinks) // self.block, 1), self.samples + self.room
        blocks: list[Array | None] = []
        for shape in shapes:
            if shape.queries is None:
                raise ValueError(f"cache: {self.name} takes a model that says how many query heads it has")
            blocks.append(None if shape.sliding is not None else
                          jnp.zeros((batch, shape.queries, N, shape.width), jnp.float32))
        paid = tuple(None if own is None else jnp.zeros((batch, own.shape[1], capacity, 1), jnp.float32)
                     for own in blocks)
        return Probed(kv=empty_kv(shapes, batch, capacity, dtype), blocks=tuple(blocks), paid=paid,
                      densities=jnp.zeros((batch, sum(own is not None for own in blocks), M), jnp.float32),
                      sampled=jnp.full((batch, M), -1, jnp.int32), length=jnp.zeros(batch, jnp.int32), given=inputs,
                      widths=key_widths(shapes), shapes=shapes, kind=self)
