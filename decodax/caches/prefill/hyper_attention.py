"""HyperAttention: attention to far tokens of a prompt is approximated by hashing and sampling ("HyperAttention:
Long-context Attention in Near-Linear Time", Han et al., 2023).

Causal attention is divided by halving: each half of a text attends to itself in the same way, and the second half to
the whole first half. Short pieces attend to themselves exactly. For attention of a second half to the first, queries
and keys are hashed by the signs of a few random projections and sorted by their hashes, so that similar vectors come
close together. A query attends exactly to the keys of its own block. For the other keys, it attends to a uniform sample
of columns, each of which counts for `s / m` keys, with `s` keys and `m` columns. The parts are merged by their softmax
sums. Tokens after the prompt use full attention, and all tokens are kept.

Halves are counted from the beginning of a text: two pieces of `min_seq_len` tokens form one that is twice as long, and
so on. So a first half is always full, and only the last second half of a text may be shorter than its first. Random
numbers depend on the layer and the position of a half, so the result of a row depends on its own prompt alone.

The sorted queries of a shorter second half are divided evenly over the blocks. With fewer than `min_seq_len` queries it
uses full attention. In the authors' float32 and CUDA code, columns that a query has attended to in its block count
twice; here they count once, as in their Triton kernel.

The outputs are those of the authors' code (68b91e9) with its Triton kernel, for prompts of `min_seq_len` times a
power of two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense
from decodax.cache.entry import KVEntry
from decodax.cache.key_values import KVLayer, Score
from decodax.caches.prefill.whole_prompt import (
    PrefillConfig,
    SparsePrefill,
    WholePromptReader,
    padded,
    segment,
    slots_of,
)
from decodax.common.options import Count, Range, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.pallas_kernels.window_attention import BLOCK, merge, prefix_attention, window_attention_lse

Part = tuple[Array, Array]
"""Attention to some of the keys, and the logarithms of its softmax sums."""

UNSEEN = -1e30


def bucket(x: Array, projections: Array) -> Array:
    """Returns the hash by which vectors `f[..., d]` are sorted, `i32[...]`: the Gray code of the number whose bits are
    the signs of their products with `projections` (`f32[d, R]`)."""
    signs = jnp.matmul(x.astype(jnp.float32), projections) > 0
    number = (signs.astype(jnp.int32) << jnp.arange(projections.shape[1], dtype=jnp.int32)).sum(-1)
    return number ^ (number >> 1)


def sampled_attention(q: Array, k: Array, v: Array, count: Array, sample: Array, projections: Array, *, block: int,
                      scale: float) -> Part:
    """Returns attention of the first `count` queries to all `s` keys, without a mask: exact within blocks of similar
    vectors, and by a sample of the other keys.

    Args:
        q: `f[r, s, d]`, of the query heads that share the keys.
        k, v: `f[s, d]` and `f[s, e]`, keys and values.
        count: `i32[]`, number of queries.
        sample: `i32[r, m]`, indices of sampled columns among the sorted keys.
        projections: `f32[d, R]`, random projections of the hash.
        block: number of keys of a block, a divisor of `s`.
        scale: factor of the scores.

    Returns:
        `f32[r, s, e]`, and the logarithms of the softmax sums, `f32[r, s]`; zeros and -1e30 from `count` on.
    """
    s, f32 = k.shape[0], jnp.float32
    blocks = s // block
    order = jnp.argsort(bucket(k, projections), stable=True)
    k, v = k[order], v[order]
    # sorted queries, divided over the blocks of keys as evenly as they go
    each, more = count // blocks, count % blocks
    place = jnp.arange(blocks, dtype=jnp.int32)
    first, number = place * each + jnp.minimum(place, more), each + (place < more)
    inside = jnp.arange(block, dtype=jnp.int32)
    there = inside < number[:, None]

    def attend(own: Array, keys: Array, values: Array, seen: Array | None, equation: str) -> Part:
        scores = jnp.einsum(f"npd,{equation}d->npk", own, keys, preferred_element_type=f32) * scale
        scores = scores if seen is None else jnp.where(seen[:, None], scores, UNSEEN)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top) if seen is None else jnp.where(seen[:, None], jnp.exp(scores - top), 0)
        total = weights.sum(-1)
        out = jnp.einsum(f"npk,{equation}e->npe", weights.astype(v.dtype), values, preferred_element_type=f32)
        some = jnp.where(total == 0, 1, total)
        return out / some[..., None], jnp.where(total == 0, UNSEEN, top[..., 0] + jnp.log(some))

    def one(q: Array, sample: Array) -> Part:
        rank = jnp.argsort(jnp.where(jnp.arange(s) < count, bucket(q, projections), 1 << projections.shape[1]),
                           stable=True)
        at = rank[jnp.minimum(first[:, None] + inside, s - 1)]
        own = q[at]
        found = attend(own, k.reshape(blocks, block, -1), v.reshape(blocks, block, -1), None, "nk")
        if blocks > 1:
            few, lse = attend(own, k[sample], v[sample], sample // block != place[:, None], "k")
            found = merge(found, (few, lse + math.log(s / len(sample))))
        back = jnp.where(there, at, s)
        return (jnp.zeros((s, v.shape[-1]), f32).at[back].set(found[0], mode="drop"),
                jnp.full(s, UNSEEN, f32).at[back].set(found[1], mode="drop"))

    return jax.vmap(one)(q, sample)


class Halves(WholePromptReader):
    """Replaces the cache while the model runs on whole prompts, and computes causal attention half by half: each half
    of a text attends to itself, and the second half to the first. `N` is the padded number of tokens, of which row `b`
    has `length[b]` (`i32[B]`)."""

    def __init__(self, base: Dense, kind: HyperAttentionConfig, length: Array, N: int, shapes: tuple[KVLayer, ...]):
        super().__init__(base)
        self.kind, self.length, self.shapes = kind, length, shapes
        halves, starts = kind.places(N)
        self.first = {half: halves.index(half) for half in halves}
        # for all layers together, since each draw takes time to compile; from a number that XLA does not know to be the
        # seed, or it would evaluate the draws while it compiles, which takes longer
        seed = kind.seed + jnp.minimum(length.min(), 0)
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(jnp.arange(len(shapes)))
        self.projections = kind.projected(keys, max(shape.width for shape in shapes))
        self.columns = kind.sampled(keys, halves, starts, max(shape.queries or 0 for shape in shapes))

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               **options: Any) -> tuple[Array, PyTree]:
        kind, N = self.kind, q.shape[1]
        if layer < kind.skip or self.shapes[layer].sliding is not None or N < 2 * kind.min_seq_len:
            return self._within(q, k, v, N, scale=scale, **options)[0].astype(q.dtype), KVEntry(k, v)
        near = self._within(q, k, v, kind.min_seq_len, scale=scale, sinks=options.get("sinks"))
        out, _ = self._far(layer, q, k, v, near, scale)
        return out.astype(q.dtype), KVEntry(k, v)

    def _within(self, q: Array, k: Array, v: Array, segment: int, **options: Any) -> Part:
        """Returns exact causal attention within each segment of `segment` tokens."""
        (B, N, H, _), chunk = q.shape, self.kind.chunk
        kv = jnp.concatenate([k, v], -1).swapaxes(1, 2)
        mask, inside = jnp.tril(jnp.ones((1, chunk, chunk), bool)), jnp.arange(chunk, dtype=jnp.int32)

        def visit(i: Array, part: Part) -> Part:
            start = i * chunk
            base = start // segment * segment
            own = lambda x: lax.dynamic_slice_in_dim(x, start, chunk, 1)
            held = _walked(lax.dynamic_slice_in_dim(kv, base, segment, 2))
            before = jnp.full(B, start - base, jnp.int32)
            found = window_attention_lse(own(q), own(k), own(v), mask, before[:, None] + inside, held, before,
                                         **options)
            return _put(part, found, start)

        nothing = _nothing(B, N, H, v.shape[-1])
        return lax.fori_loop(0, -(-self.length.max() // chunk), visit, nothing)

    def _far(self, layer: int, q: Array, k: Array, v: Array, part: Part, scale: float) -> Part:
        """Returns `part` merged with attention of each second half to its first half."""
        N, half = q.shape[1], self.kind.min_seq_len
        while half < N:
            padded = tuple(_padded(x, 2 * half) for x in (q, k, v))

            def visit(j: Array, part: Part, half: int = half, padded: tuple[Array, ...] = padded) -> Part:
                start, columns = 2 * half * j + half, self.columns[layer, self.first[half] + j]
                old, lse = (lax.dynamic_slice_in_dim(x, start, half, 1) for x in part)
                found = self._across(layer, padded, columns, start, half, scale)
                return _put(part, merge((old, lse), found), start)

            pairs = (self.length.max() + half - 1) // (2 * half)
            out, lse = lax.fori_loop(0, pairs, visit, (_padded(part[0], 2 * half), _padded(part[1], 2 * half)))
            part, half = (out[:, :N], lse[:, :N]), 2 * half
        return part

    def _across(self, layer: int, qkv: tuple[Array, ...], columns: Array, start: Array, half: int,
                scale: float) -> Part:
        """Returns attention of the half that begins at `start` to the one before it. `columns` are the sampled columns,
        `i32[H, m]`, perhaps with further rows for layers with more heads."""
        q, k, v = (lax.dynamic_slice_in_dim(x, at, half, 1) for x, at in zip(
            qkv, (start, start - half, start - half), strict=True))
        kind, (B, _, H, d), G = self.kind, q.shape, k.shape[2]
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        count = jnp.clip(self.length - start, 0, half)
        few = (count > 0) & (count < kind.min_seq_len)
        nothing = _nothing(B, half, H, v.shape[-1])

        def sampled() -> Part:
            projections = self.projections[layer, :d]
            each = (q.reshape(B, half, G, H // G, d).transpose(0, 2, 3, 1, 4), k, v,
                    jnp.broadcast_to(count[:, None], (B, G)),
                    jnp.broadcast_to(columns[:H].reshape(G, H // G, -1), (B, G, H // G, columns.shape[-1])))
            # head by head, since the scores of all blocks take much memory
            def one(x: tuple[Array, Array, Array, Array, Array]) -> Part:
                return sampled_attention(*x, projections, block=kind.block_size, scale=scale)

            out, lse = lax.map(one, jax.tree.map(lambda x: x.reshape(B * G, *x.shape[2:]), each))
            return out.reshape(B, H, half, -1).swapaxes(1, 2), lse.reshape(B, H, half).swapaxes(1, 2)

        def exact() -> Part:
            full, own = jnp.full(B, half, jnp.int32), q[:, :kind.min_seq_len]
            return _put(nothing, prefix_attention(own, jnp.full(own.shape[:2], half, jnp.int32), _walked(
                jnp.concatenate([k, v], -1)), full, scale=scale), jnp.int32(0))

        many = lax.cond((count >= kind.min_seq_len).any(), sampled, lambda: nothing)
        some = lax.cond(few.any(), exact, lambda: nothing)
        return (jnp.where(few[:, None, None, None], some[0], many[0]),
                jnp.where(few[:, None, None], some[1], many[1]))


def _padded(x: Array, unit: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % unit), *[(0, 0)] * (x.ndim - 2)))


def _walked(kv: Array) -> Array:
    """Pads the slots of `f[B, G, S, d]` to a number that the attention kernels take: whole blocks."""
    S = kv.shape[2]
    return jnp.pad(kv, ((0, 0), (0, 0), (0, -S % BLOCK if S > BLOCK else 0), (0, 0)))


def _nothing(B: int, N: int, H: int, width: int) -> Part:
    return jnp.zeros((B, N, H, width), jnp.float32), jnp.full((B, N, H), UNSEEN, jnp.float32)


def _put(part: Part, found: Part, start: Array) -> Part:
    write = lambda x, new: lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), start, 1)
    return write(part[0], found[0]), write(part[1], found[1])


@struct
class HyperAttentionCache(SparsePrefill):
    """A dense cache whose prompt is prefilled by halves with approximate attention."""

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> Cache:
        kind: Any = self.kind
        unit = kind.min_seq_len if prompt.tokens.shape[1] > kind.min_seq_len else kind.chunk
        tokens = padded(prompt.tokens, unit)
        reading: Any = Halves(self.base, kind, length, tokens.shape[1], self.shapes)
        window = segment(tokens, jnp.int32(0), tokens.shape[1], length)
        out = prompt.model.apply(prompt.params, window, reading)
        return self.replace(base=self.base.commit(out.entries, slots_of(window, out)))


@CACHES.register("hyper-attention", "HyperAttention: Long-context Attention in Near-Linear Time", "Han et al. 2023",
                 family="prefill")
@dataclasses.dataclass(frozen=True)
class HyperAttentionConfig(PrefillConfig):
    """Keeps all tokens; queries of a prompt attend to far tokens with similar hashes, and to a sample of the other far
    tokens.

    It saves prefill time for long prompts. Example: `cache="hyper-attention:min_seq_len=2048"`.

    Attributes:
        block_size: number of sorted keys that a query attends to exactly.
        sample_size: number of other keys that all queries of a half attend to.
        min_seq_len: number of tokens of a piece that attends to itself exactly, a multiple of `block_size`. A half with
            fewer queries uses full attention.
        lsh_num_projs: number of random projections of a hash.
        skip: number of first layers that use full attention.
        seed: seed of the projections and of the sampled columns.
    """

    block_size: Count = 256
    sample_size: Count = 256
    min_seq_len: Count = 4096
    lsh_num_projs: Annotated[int, Range(1, 24)] = 7
    skip: Whole = 0
    seed: Whole = 0

    name: ClassVar[str] = "hyper-attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_seq_len % self.block_size:
            raise ValueError(f"min_seq_len: got {self.min_seq_len}, takes a multiple of the block of {self.block_size}")

    @property
    def chunk(self) -> int:
        """Number of queries whose exact attention is computed in one step; it divides `min_seq_len` and 256."""
        return math.gcd(self.min_seq_len, 256)

    def places(self, N: int) -> tuple[list[int], list[int]]:
        """Returns the sizes and the start positions of the pieces of a text of `N` tokens that are the first of two
        halves, in ascending order of size. The second half follows each directly."""
        sizes = [self.min_seq_len << i for i in range(N.bit_length()) if self.min_seq_len << i < N]
        found = [(half, start) for half in sizes for start in range(0, N - half, 2 * half)]
        return [half for half, _ in found], [start for _, start in found]

    def projected(self, keys: Array, width: int) -> Array:
        """Returns random projections for the hashes of each layer, `f32[L, d, R]` with `d = width` and `R` projections.
        The heads of a layer share them. `keys` (`key[L]`) has one `jax.random` key for each layer."""
        one = lambda key: jax.random.normal(jax.random.fold_in(key, 0), (width, self.lsh_num_projs))
        return jax.vmap(one)(keys)

    def sampled(self, keys: Array, halves: Sequence[int], starts: Sequence[int], heads: int) -> Array:
        """Draws the sampled columns: for each layer, each of `P` first halves and each query head, the indices of `m`
        keys within the half, with replacement: `i32[L, P, H, m]`.

        Args:
            keys: `key[L]`, a `jax.random` key for each layer.
            halves, starts: sizes and start positions of the first halves, the result of `places`.
            heads: number of query heads, `H`.
        """
        def one(key: Array, half: Array, start: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(key, half), start)
            return jax.random.randint(key, (heads, self.sample_size), 0, half, jnp.int32)

        each = jax.vmap(jax.vmap(one, (None, 0, 0)), (0, None, None))
        return each(keys, jnp.array(halves, jnp.int32), jnp.array(starts, jnp.int32))

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset() if layer < self.skip or shape.sliding is not None else frozenset(("soft caps", "biases"))

    def around(self, base: Dense, shapes: tuple[KVLayer, ...]) -> Cache:
        return HyperAttentionCache(base=base, shapes=shapes, kind=self)
