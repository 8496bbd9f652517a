"""Prompts that are read segment by segment, each of which attends to a part of what is before it ("CritiPrefill: A
Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs", Lv et al., 2024).

Queries of neighbouring tokens look for much the same, so they share what they read. A segment of queries and a block of
keys are described by the smallest and the largest value of each channel, and their products say which blocks are
critical to the segment; what the layer before said counts, too. Its queries attend to these blocks and to their own
segment. The first segments and the last one read everything, and so do all tokens behind the prompt.

Segments are counted from the beginning of a text, whatever the chunks that it comes in: no layer reads these
(`decodax.caches.prefill.unread`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.prefill.unread import Unread
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, PyTree, ReadPrompt
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import BLOCK, window_attention


def criticality(queries: Array, keys: Array, whole: Array) -> Array:
    """`f32[G, N]`: how critical each of `N` blocks of keys is to a segment of queries, all blocks together 1.

    Args:
        queries: `f[n, H, d]`. keys: `f[G, N, P, d]`. whole: `bool[N]`, which blocks there are before the segment.
    """
    (_, H, d), G, f32 = queries.shape, keys.shape[0], jnp.float32
    # the mean of the products with the segment's largest and smallest values
    middle = (queries.max(0).astype(f32) + queries.min(0).astype(f32)).reshape(G, H // G, d) / 2
    products = [jnp.einsum("grd,gnd->grn", middle, bound.astype(f32)) for bound in (keys.max(2), keys.min(2))]
    return jax.nn.softmax(jnp.maximum(*products).mean(1), axis=-1, where=whole)


class Segment:
    """In a cache's place while a segment is read; it notes what a layer has said, for the next one."""

    def __init__(self, base: Dense, kind: Critical, sparse: Array, shapes: tuple[KVLayer, ...]):
        self.base, self.kind, self.sparse, self.shapes = base, kind, sparse, shapes
        self.before: Array | None = None
        self.inputs, self.reads, self.capacity = base.inputs, None, base.capacity

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               **options: Any) -> tuple[Array, PyTree]:
        kind, base, d = self.kind, self.base, self.shapes[layer].width
        whole = lambda: base.attend(layer, q, k, v, window, scale=scale, **options)[0]
        if layer < kind.skip or self.shapes[layer].sliding is not None or base.capacity // kind.block < kind.blocks:
            return whole(), (k, v)
        if options.get("bias") is not None or options.get("softcap") is not None:
            raise ValueError(f"cache: {kind.name} scores blocks by queries and keys alone; takes a model without a "
                             "soft cap or a bias of its attention scores")
        kv, P = base.kv[layer], kind.block
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
            n = at.shape[2]
            at = jnp.pad(at, ((0, 0), (0, 0), (0, -n % BLOCK if n > BLOCK else 0)), constant_values=-1)
            own = jnp.take_along_axis(kv, jnp.maximum(at, 0)[..., None], 2)
            return window_attention(q, k, v, window.visible(), window.positions, own, slot_positions=at, scale=scale,
                                    key_positions=window.key_positions), worth

        # segments in which no row reads a part, and those in which no row reads everything, take half the time
        nothing = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), jnp.zeros((B, G, blocks), jnp.float32)
        part, self.before = lax.cond(self.sparse.any(), some, lambda: nothing)
        full = lax.cond((~self.sparse).any(), whole, lambda: nothing[0])
        return jnp.where(self.sparse[:, None, None, None], part.astype(q.dtype), full), (k, v)


@struct
class Critically(Wrapper):
    """A dense cache, of a prompt that is read by segments."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: Critical = static()

    def for_prompt(self) -> Cache:      # type: ignore[override]
        return Unread(length=jnp.zeros_like(self.base.length), into=self) if self.base.kv else self

    def read(self, prompt: ReadPrompt, length: Array) -> Critically:
        """With the first `length` tokens (`i32[B]`) of a prompt; the newest one comes behind them."""
        kind, tokens = self.kind, prompt.tokens
        B, n = tokens.shape
        tokens = jnp.pad(tokens, ((0, 0), (0, -n % kind.segment)))

        def visit(i: Array, base: Dense) -> Dense:
            start = i * kind.segment
            slots = jnp.broadcast_to(start + jnp.arange(kind.segment, dtype=jnp.int32), (B, kind.segment))
            live = slots < length[:, None]
            window = causal(lax.dynamic_slice_in_dim(tokens, start, kind.segment, 1), slots[:, 0], live)
            sparse = (start >= kind.dense) & (start + kind.segment < length + 1)
            reading: Any = Segment(base, kind, sparse, self.shapes)
            out = prompt.model.apply(prompt.params, window, reading)
            return base.commit(out.entries, jnp.where(live & jnp.isfinite(out.hidden).all(-1), slots, -1))

        segments = (length.max() + kind.segment - 1) // kind.segment
        return self.replace(base=lax.fori_loop(0, segments, visit, self.base))


@dataclasses.dataclass(frozen=True)
class Critical(CacheConfig):
    """A `Critically` read cache.

    Attributes:
        budget: tokens before its own segment that a query reads. segment: tokens of a segment. block: of a block.
        dense: segments that begin before this position read everything; the budget or more.
        memory: how much what the layer before said counts, from the third layer on. skip: the first layers, which read
            everything. name: what errors call it.
    """

    budget: int
    segment: int = 512
    block: int = 32
    dense: int = 4096
    memory: float = 0.25
    skip: int = 1
    name: str = "critiprefill"

    def __post_init__(self) -> None:
        for name in ("budget", "segment", "block"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number from 1")
        if self.segment % self.block or self.budget < self.block:
            raise ValueError(f"block: got {self.block}, takes a divisor of the segment of {self.segment}, at most the "
                             f"budget of {self.budget}")
        if not 0 <= self.memory <= 1 or self.skip < 0:
            raise ValueError(f"memory, skip: got {self.memory} and {self.skip}, takes 0 to 1, and 0 or more")

    @property
    def blocks(self) -> int:
        """How many blocks a segment reads."""
        return self.budget // self.block

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return Critically(base=dense(shapes, batch, capacity, dtype, inputs), shapes=shapes, kind=self)
