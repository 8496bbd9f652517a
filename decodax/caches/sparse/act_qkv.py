"""ActQKV: each query attends to blocks of tokens that a probe query chooses ("Activation-aware Probe-Query: Effective
Key-Value Retrieval for Long-Context LLMs Inference", Xiao et al., 2025).

A prompt is prefilled in windows of tokens. The probe query of a window is the mean of its queries, weighted by their
activation bias: the distance of a query, in standard deviations, from the mean of the queries so far. While decoding,
each query is its own probe. A block of keys is represented by the mean of a few keys, those that receive the most
attention while they are among the latest `recent` tokens. The score of a block is the cosine of the probe and this
mean, over all heads of a layer together. The blocks of highest score, the first tokens and the latest tokens are
attended to. Scores are computed as if all keys were at one distance.

While decoding, the layers share a budget of blocks by information density: the entropy of a layer's scores of blocks,
divided by its maximum, averaged over the latest `samples` windows and tokens.

The tokens that a query attends to depend on committed tokens and on the query itself. Windows are counted from the
beginning of a text, whatever the chunks of the prefill. The mean of a block and the division over layers use only
tokens that are at least `room` positions earlier, so a round with up to `room` nodes gives the same result as plain
decoding.

The authors keep one set of query statistics for all layers and texts, and in larger chunks their windows attend to some
keys twice. Here each layer of a text has its own statistics, and each key is attended to once. Their option to add a
question's query to the scores of a prompt is not implemented.

Otherwise the chosen blocks are those of the authors' code (175c84b), except that tokens keep their own positions and
scores are rounded to 14 bits, so that equal blocks tie.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.entry import KVEntry, MeasuredEntry, own_entry
from decodax.cache.key_values import KVLayer, refuse_prefill
from decodax.caches.prefill.whole_prompt import ReadAtOnce, WholePromptReader, padded, segment, slots_of
from decodax.caches.rotation import rotated, turned
from decodax.caches.sparse.activations import LONGEST, Activations, cosines, density, divided
from decodax.caches.sparse.reading import SparseCache, SparseConfig, attention_to, gathered
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt, WholePrompt
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse


@struct
class ActQKVEntry(MeasuredEntry):
    """Keys, values, scaled queries and softmax sums of a window's own nodes, with the density of their scores.

    Attributes:
        density: `f32[B, W]`, the density of the scores of blocks; -1 where too few blocks exist.
    """

    density: Array


@struct
class ActQKVCache(ReadAtOnce, WholePrompt, SparseCache):
    """All tokens, with a representative key of each block.

    An entry holds key, value, scaled query, logarithms of its softmax sums, and density of its scores.

    Attributes:
        blocks: for each layer `f32[B, H, N, d]`, the mean of a block's representative keys before rotation; None: the
            layer attends to all tokens.
        paid: for each layer `f32[B, H, S, 1]`, the attention that each token has received while it was recent; None as
            for `blocks`.
        densities: `f32[B, L, M]`, densities of each layer with blocks, for the latest windows and tokens.
        sampled: `i32[B, M]`, positions at which these windows and tokens end; -1: none.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    blocks: tuple[Array | None, ...]
    paid: tuple[Array | None, ...]
    densities: Array
    sampled: Array

    if TYPE_CHECKING:
        kind: ActQKVConfig

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> Self:
        width, B = self.kind.window_size, len(length)
        tokens = padded(prompt.tokens, width)
        none = tuple(Activations(mean=jnp.zeros((B, own.shape[1] * own.shape[3])), variance=jnp.zeros(
            (B, own.shape[1] * own.shape[3]))) for own in self.blocks if own is not None)

        def visit(i: Array, carry: tuple[Self, tuple[Activations, ...]]) -> tuple[Self, tuple[Activations, ...]]:
            cache, before = carry
            window, reading = segment(tokens, i * width, width, length), ProbingWindow(cache, i, before)
            out = prompt.model.apply(prompt.params, window, reading)
            return cache.commit(out.entries, slots_of(window, out)), tuple(reading.after)

        return lax.fori_loop(0, -(-length.max() // width), visit, (self, none))[0]

    def check_windows(self) -> None:
        if any(own is not None for own in self.blocks):
            refuse_prefill(self.kind.name)

    def check_window(self, nodes: int) -> None:
        if nodes > self.kind.room and any(own is not None for own in self.blocks):
            raise ValueError(f"cache: {self.kind.name} takes windows of at most room={self.kind.room} nodes, got one "
                             f"of {nodes}; takes room={nodes} or more")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        entry, kind, shape, blocks = own_entry(q, k, v), self.kind, self.shapes[layer], self.blocks[layer]
        options: dict[str, Any] = dict(scale=scale, key_positions=window.key_positions)
        if blocks is None:
            return self.attend_all(layer, q, k, v, window, scale=scale, sliding=sliding, softcap=softcap,
                                   bias=bias, sinks=sinks), entry
        if window.is_prefill:
            refuse_prefill(kind.name)
        self.check_window(k.shape[1])
        near = window_attention_lse(q, k, v, window.visible(), window.positions, sinks=sinks, **options)
        at, asked = window.positions, q.astype(jnp.float32)
        far = kind.at_one_distance(shape, asked, at)
        each = jax.vmap(lambda *row: self._read(layer, *row))
        read = functools.partial(each, self.kv[layer], blocks, self.densities, self.sampled, self.length)
        *far, found = each_node(read, scale * asked, far, at)
        out, lse = merge(near, tuple(far))
        return out, ActQKVEntry(entry.keys, entry.values, scale * asked, lse, found)

    def _read(self, layer: int, kv: Array, blocks: Array, densities: Array, sampled: Array, length: Array, q: Array,
              far: Array, at: Array) -> tuple[Array, Array, Array]:
        """Returns attention of a query of one row to the tokens that it chooses, the logarithms of the softmax sums,
        and the density of its scores.

        Args:
            q: `f32[H, d]`, the scaled query.
            far: `f32[H, d]`, the query rotated to the distance for which scores are computed.
            at: `i32[]`, its position.
            layer, kv, blocks, densities, sampled, length: the layer and the row's arrays.
        """
        kind, G, d = self.kind, kv.shape[0], self.widths[layer]
        there = kind.available(at)
        number = self.block_limit(layer, densities, sampled, there, at)
        where, found = self._where(blocks, far, there, number, length)
        some = kv[:, jnp.maximum(where, 0)].astype(jnp.float32)
        out, lse = attention_to(q.reshape(G, -1, d), some, jnp.broadcast_to(where >= 0, (G, len(where))), d)
        return out, lse, found

    def _where(self, blocks: Array, probe: Array, there: Array, number: Array, length: Array) -> tuple[Array, Array]:
        """Returns the slots that a probe attends to, `i32[n]` (-1: none), and the density of its scores. The slots are
        the first tokens, the latest ones, and the best `number` of the first `there` blocks."""
        kind, N = self.kind, blocks.shape[1]
        P, S = kind.block_size, self.capacity
        scores = cosines(probe, blocks)
        found, best = lax.top_k(jnp.where(jnp.arange(N) < there, scores, -jnp.inf), min(2 * kind.blocks, N))
        chosen = jnp.where((found > -jnp.inf) & (jnp.arange(len(best)) < number), kind.sinks + best * P, -1)
        chosen = jnp.where(chosen[:, None] >= 0, chosen[:, None] + jnp.arange(P), -1).reshape(-1)
        late = kind.sinks + there * P + jnp.arange(min(kind.recent + P, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.arange(min(kind.sinks, S), dtype=jnp.int32), late])
        where = jnp.concatenate([jnp.where(always < length, always, -1), chosen.astype(jnp.int32)])
        return where, density(scores, there)

    def block_limit(self, layer: int, densities: Array, sampled: Array, there: Array, at: Array) -> Array:
        """Returns the number of blocks that a layer attends to, `i32[]`, from the densities of all layers. Layers share
        a budget of blocks; until there are `samples` densities, each gets the same number.

        Args:
            layer: number of the layer.
            densities, sampled: `f32[L, M]` and `i32[M]`, those of one row; see the attributes.
            there: `i32[]`, number of blocks that exist, the maximum of the result.
            at: `i32[]`, position of the query. Only densities from at least `room` positions before it count.
        """
        kind = self.kind
        known = (sampled >= 0) & (sampled <= at - kind.room)
        used = known & (jnp.cumsum(known[::-1])[::-1] <= kind.samples)
        means = jnp.where(used, densities, 0).sum(1) / kind.samples
        parts = divided(means, kind.blocks * len(means), jnp.minimum(there, kind.least),
                        jnp.minimum(there, 2 * kind.blocks))
        place = sum(own is not None for own in self.blocks[:layer])
        return jnp.where(used.sum() == kind.samples, parts[place], jnp.minimum(there, kind.blocks))

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        new_cache = super().commit(entries, slots)
        length, blocks, paid, found = new_cache.length, [], [], []
        for layer, (kv, own, was, entry) in enumerate(zip(new_cache.kv, self.blocks, self.paid, entries, strict=True)):
            if own is not None and was is not None:
                d = self.widths[layer]
                was = jax.vmap(lambda *row, d=d: self._received(d, *row))(was, kv, length, slots, entry.queries,
                                                                          entry.sums)
                own = self._described(layer, own, kv, was, length, slots.shape[1])
                found.append(entry.density)
            blocks.append(own)
            paid.append(was)
        densities, sampled = self.densities, self.sampled
        if found:
            new = jnp.where((slots >= 0) & (found[0] >= 0), slots, -1)
            every = jnp.concatenate([sampled, new], 1)
            # the latest ones in their order; -1, for none, comes first
            order = jnp.argsort(every, axis=1, stable=True)[:, -sampled.shape[1]:]
            sampled = jnp.take_along_axis(every, order, 1)
            densities = jnp.take_along_axis(jnp.concatenate([densities, jnp.stack(found, 1)], 2), order[:, None], 2)
        return new_cache.replace(blocks=tuple(blocks), paid=tuple(paid), densities=densities, sampled=sampled)

    def _received(self, d: int, paid: Array, kv: Array, length: Array, slots: Array, q: Array, lse: Array) -> Array:
        """Returns the attention that tokens of one row have received, including that of the queries `q` (`f32[W, H,
        d]`) with logarithms of softmax sums `lse` (`f32[W, H]`)."""
        kind, (W, H, _), (G, S, _) = self.kind, q.shape, kv.shape
        n = min(kind.recent + W, S)
        first = jnp.clip(length - n, 0, S - n)
        keys = lax.dynamic_slice_in_dim(kv, first, n, 1)[..., :d].astype(jnp.float32)
        scores = jnp.einsum("wgrd,gnd->wgrn", q.reshape(W, G, -1, d), keys).reshape(W, H, n)
        at = first + jnp.arange(n, dtype=jnp.int32)
        distance = slots[:, None] - at
        end = kind.sinks + ((at - kind.sinks) // kind.block_size + 1) * kind.block_size
        counts = (slots[:, None] >= 0) & (distance >= 0) & (distance < kind.recent) & (at >= kind.sinks)
        counts &= slots[:, None] <= end + kind.recent - kind.room
        new = jnp.where(counts[:, None], jnp.exp(scores - lse[..., None]), 0).sum(0)[..., None]
        old = lax.dynamic_slice_in_dim(paid, first, n, 1)
        return lax.dynamic_update_slice_in_dim(paid, old + new, first, 1)

    def _described(self, layer: int, blocks: Array, kv: Array, paid: Array, length: Array, width: int) -> Array:
        """Returns the means of blocks (`ActQKVCache.blocks`), with those that a window of `width` nodes has
        completed."""
        kind, d, (B, H, N, _) = self.kind, self.widths[layer], blocks.shape
        P, S, G = kind.block_size, self.capacity, kv.shape[1]
        which = kind.complete(self.length)[:, None] + jnp.arange(min(width // P + 2, N), dtype=jnp.int32)
        at = jnp.minimum((kind.sinks + which[..., None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(B, -1), S - 1)
        keys = jnp.take_along_axis(kv[..., :d], at[:, None, :, None], 2).astype(jnp.float32)
        keys = turned(self.shapes[layer], keys.swapaxes(1, 2), -at).swapaxes(1, 2).reshape(B, G, -1, P, d)
        received = jnp.take_along_axis(paid, at[:, None, :, None], 2).reshape(B, H, -1, P)
        best = lax.top_k(received, min(kind.representatives, P))[1]
        some = jnp.take_along_axis(jnp.repeat(keys, H // G, 1), best[..., None], 3).mean(3)
        return write(blocks, some.swapaxes(1, 2), jnp.where(which < kind.complete(length)[:, None], which, -1))


class ProbingWindow(WholePromptReader):
    """Replaces the cache while the model runs on a window of a prompt.

    Attributes:
        count: `i32[]`, number of windows before this one.
        before: for each layer the statistics of the queries in these windows.
        after: the same with this window; filled layer by layer.
    """

    def __init__(self, base: ActQKVCache, count: Array, before: tuple[Activations, ...]):
        super().__init__(base)
        self.count, self.before = count, before
        self.after: list[Activations] = []

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sinks: Array | None = None, **options: Any) -> tuple[Array, PyTree]:
        base, kind = self.base, self.base.kind
        blocks, kv = base.blocks[layer], base.kv[layer]
        given = q, k, v, window.visible(), window.positions
        if blocks is None:
            return base.attend_all(layer, q, k, v, window, scale=scale, sinks=sinks, **options), KVEntry(k, v)
        B, W, H, d = q.shape
        asked = q.astype(jnp.float32)
        far = kind.at_one_distance(base.shapes[layer], asked, window.positions).reshape(B, W, -1)
        now = self.before[len(self.after)].after(far, window.live, jnp.minimum(self.count, LONGEST))
        self.after.append(now)
        probe = jnp.einsum("bw,bwm->bm", now.bias(far, window.live), far).reshape(B, H, d)
        there = kind.available(self.count * kind.window_size)
        at, found = jax.vmap(lambda blocks, probe, length: base._where(
            blocks, probe, there, jnp.int32(kind.blocks), length))(blocks, probe, base.length)
        some, at = gathered(kv, at[:, None])
        out, lse = window_attention_lse(*given, some, slot_positions=at, scale=scale, sinks=sinks,
                                        key_positions=window.key_positions)
        last = jnp.arange(W) == window.live.sum(1, keepdims=True) - 1
        return out, ActQKVEntry(k, v, scale * asked, lse, jnp.where(last, found[:, None], -1))


@CACHES.register("act-qkv",
                 "Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs Inference",
                 "Xiao et al. 2025", family="sparse")
@dataclasses.dataclass(frozen=True)
class ActQKVConfig(SparseConfig):
    """Keeps all tokens; each window of a prompt, and each later token, attends to the blocks that a probe query
    chooses, the first tokens and the latest.

    Layers share blocks by information density. It saves the time of attention to long texts, prompts included, but no
    memory. Example: `cache="act-qkv:budget=4096"`.

    Attributes:
        budget: number of tokens outside its own window that a window or a token attends to: first ones, latest ones,
            and blocks. While decoding it is an average over layers; each layer gets at most twice as many blocks.
        sinks: number of first tokens that are always attended to.
        recent: number of latest tokens that are always attended to.
        block_size: number of tokens of a block.
        window_size: number of prompt tokens that are prefilled at a time; at most `recent`.
        representatives: number of keys whose mean represents a block.
        samples: number of windows and tokens over which densities are averaged. Before there are that many, all layers
            get the same number of blocks.
        least: minimum number of blocks of a layer.
        room: maximum number of nodes of a round; less than `recent`.
    """

    budget: Count = 2048
    sinks: Whole = 64
    recent: Count = 512
    block_size: Count = 32
    window_size: Count = 256
    representatives: Count = 4
    samples: Count = 100
    least: Count = 32
    room: Count = 64

    name: ClassVar[str] = "act-qkv"
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.room >= self.recent or self.window_size > self.recent:
            raise ValueError(f"room, window_size: got {self.room} and {self.window_size}, takes less than the "
                             f"{self.recent} recent tokens, and at most these")
        if self.blocks < self.least:
            raise ValueError(f"budget: got {self.budget}, {self.blocks} blocks of {self.block_size} beside the "
                             f"{self.sinks} first tokens and the {self.recent} latest, takes {self.least} (least) or "
                             "more")

    @property
    def blocks(self) -> int:
        """Mean number of blocks that a layer attends to: those of the budget that the first and the latest tokens
        leave."""
        return (self.budget - self.sinks - self.recent) // self.block_size

    def available(self, at: Array) -> Array:
        """Returns the number of complete blocks between the first `sinks` tokens and the latest `recent` ones, for a
        query at position `at` (an integer array of any shape)."""
        return jnp.maximum((at - self.recent - self.sinks) // self.block_size, 0)

    def complete(self, length: Array) -> Array:
        """Returns the number of blocks whose tokens have all left the latest tokens, so that their mean keys can be
        computed, in a text of `length` tokens (an integer array of any shape)."""
        return self.available(length + self.room - 1)

    def at_one_distance(self, shape: KVLayer, q: Array, at: Array) -> Array:
        """Returns rotated queries `q` (`f32[B, W, H, d]`, at the positions `at`, `i32[B, W]`) moved to position `recent
        - 1`. Their products with keys before rotation are scores as if each key were `recent - 1` positions away."""
        return rotated(shape, turned(shape, q, -at), jnp.full_like(at, self.recent - 1))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        N, M = max((size - self.sinks) // self.block_size, 1), self.samples + self.room
        blocks: list[Array | None] = []
        for layer, shape in enumerate(shapes):
            if shape.queries is None:
                raise ValueError(f"cache: {self.name} takes a model that says how many query heads a layer has "
                                 "(`KVLayer.queries`)")
            blocks.append(None if self.keeps_dense(layer, shape) else
                          jnp.zeros((batch, shape.queries, N, shape.width), jnp.float32))
        paid = tuple(None if own is None else jnp.zeros((batch, own.shape[1], size, 1), jnp.float32) for own in blocks)
        layers = sum(own is not None for own in blocks)
        return ActQKVCache(blocks=tuple(blocks), paid=paid, densities=jnp.zeros((batch, layers, M), jnp.float32),
                           sampled=jnp.full((batch, M), -1, jnp.int32), **self.parts(shapes, batch, size, dtype,
                           inputs))
