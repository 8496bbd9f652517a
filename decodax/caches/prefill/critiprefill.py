"""CritiPrefill: prompts are prefilled in segments, each of which attends to a part of the tokens before it
("CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs", Lv et al., 2024).

Queries of neighbouring tokens attend to similar tokens, so they share their blocks of keys. A segment of queries and a
block of keys are each represented by the minimum and maximum of each channel. The products of these, combined with
those of the layer before, give the criticality of a block for the segment. The queries attend to the most critical
blocks and to their own segment. The first segments and the last one use full attention, and so do all tokens after the
prompt.

The blocks attended to are those of the authors' code (3067f1e) from position `threshold_len` on. Segments are
processed once the whole prompt is known.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

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
from decodax.caches.sparse.reading import gathered
from decodax.common.options import Count, Share, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.pallas_kernels.window_attention import window_attention


def criticality(queries: Array, keys: Array, whole: Array) -> Array:
    """Returns the criticality of each of `N` blocks of keys for a segment of queries, `f32[G, N]`, with sum 1.

    Args:
        queries: `f[n, H, d]`, queries of the segment.
        keys: `f[G, N, P, d]`, keys of the blocks.
        whole: `bool[N]`, True for blocks before the segment.
    """
    (_, H, d), G, f32 = queries.shape, keys.shape[0], jnp.float32
    # the mean of the products with the segment's largest and smallest values
    middle = (queries.max(0).astype(f32) + queries.min(0).astype(f32)).reshape(G, H // G, d) / 2
    products = [jnp.einsum("grd,gnd->grn", middle, bound.astype(f32)) for bound in (keys.max(2), keys.min(2))]
    return jax.nn.softmax(jnp.maximum(*products).mean(1), axis=-1, where=whole)


class CriticalReader(WholePromptReader):
    """Replaces the cache while the model runs on one segment of a prompt. Each layer computes the criticality of the
    blocks before the segment, which the next layer combines with its own.

    Attributes:
        sparse: `bool[B]`, True for rows whose segment uses sparse attention.
    """

    def __init__(self, base: Dense, kind: CritiPrefillConfig, sparse: Array, shapes: tuple[KVLayer, ...]):
        super().__init__(base)
        self.kind, self.sparse, self.shapes = kind, sparse, shapes
        self.before: Array | None = None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               **options: Any) -> tuple[Array, PyTree]:
        kind, base, d = self.kind, self.base, self.shapes[layer].width
        whole = lambda: base.attend(layer, q, k, v, window, scale=scale, **options)[0]
        few = base.capacity // kind.block_size < kind.blocks
        if layer < kind.skip or self.shapes[layer].sliding is not None or few:
            return whole(), KVEntry(k, v)
        kv, P = base.kv[layer], kind.block_size
        B, G, S, _ = kv.shape
        blocks = S // P

        def some() -> tuple[Array, Array]:
            there = jnp.arange(blocks) < base.length[:, None] // P
            worth = jax.vmap(criticality)(q, kv[:, :, :blocks * P, :d].reshape(B, G, blocks, P, d), there)
            if self.before is not None and layer > 1:
                worth = kind.memory * self.before + (1 - kind.memory) * worth
            found, chosen = lax.top_k(jnp.where(there[:, None], worth, -1), kind.blocks)
            at = (chosen[..., None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(B, G, -1)
            at = jnp.where(jnp.repeat(found >= 0, P, -1), at, -1)
            own, at = gathered(kv, at)
            return window_attention(q, k, v, window.visible(), window.positions, own, slot_positions=at, scale=scale,
                                    key_positions=window.key_positions, sinks=options.get("sinks")), worth

        # a segment in which no row reads a part, or no row reads everything, takes half the time
        nothing = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), jnp.zeros((B, G, blocks), jnp.float32)
        part, self.before = lax.cond(self.sparse.any(), some, lambda: nothing)
        full = lax.cond((~self.sparse).any(), whole, lambda: nothing[0])
        return jnp.where(self.sparse[:, None, None, None], part.astype(q.dtype), full), KVEntry(k, v)


@struct
class CritiPrefillCache(SparsePrefill):
    """A dense cache whose prompt is prefilled by segments with sparse attention."""

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> Cache:
        kind: Any = self.kind
        width, tokens = kind.segment_size, padded(prompt.tokens, kind.segment_size)

        def visit(i: Array, base: Dense) -> Dense:
            start = i * width
            window, sparse = segment(tokens, start, width, length), start >= kind.threshold_len
            reading: Any = CriticalReader(base, kind, sparse & (start + width < length + 1), self.shapes)
            out = prompt.model.apply(prompt.params, window, reading)
            return base.commit(out.entries, slots_of(window, out))

        return self.replace(base=lax.fori_loop(0, -(-length.max() // width), visit, self.base))


@CACHES.register("critiprefill",
                 "CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs",
                 "Lv et al. 2024", family="prefill")
@dataclasses.dataclass(frozen=True)
class CritiPrefillConfig(PrefillConfig):
    """Keeps all tokens; each segment of a prompt attends to the most critical blocks before it.

    It saves prefill time for long prompts. Example: `cache="critiprefill:budget=1024"`.

    Attributes:
        budget: number of tokens before its own segment that a query attends to; at least `block_size`.
        segment_size: number of tokens of a segment; a multiple of `block_size`.
        block_size: number of tokens of a block.
        threshold_len: segments that begin before this position use full attention.
        memory: weight of the layer before in the criticality of a block, from the third layer on.
        skip: number of first layers that use full attention.
    """

    budget: Count = 2048
    segment_size: Count = 512
    block_size: Count = 32
    threshold_len: Whole = 4096
    memory: Share = 0.25
    skip: Whole = 1

    name: ClassVar[str] = "critiprefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segment_size % self.block_size or self.budget < self.block_size:
            raise ValueError(f"block_size: got {self.block_size}, takes a divisor of the segment of "
                             f"{self.segment_size}, at most the budget of {self.budget}")

    @property
    def blocks(self) -> int:
        """Number of blocks before its own segment that a segment attends to in each head, `budget // block_size`."""
        return self.budget // self.block_size

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset() if layer < self.skip or shape.sliding is not None else frozenset(("soft caps", "biases"))

    def around(self, base: Dense, shapes: tuple[KVLayer, ...]) -> Cache:
        return CritiPrefillCache(base=base, shapes=shapes, kind=self)
