"""MInference: prompts are read a long segment at a time, each query head of which attends to the columns and diagonals
that the segment's last queries attend to ("MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic
Sparse Attention", Jiang et al., 2024; by segments as in "Qwen2.5-1M Technical Report", Yang et al., 2025).

The pattern is that of the authors' `vertical_and_slash_kernel` and of its converter
(`decodax.caches.prefill.vertical_slash`), with their sizes by default: 1000 columns and 6096 diagonals. They read a
whole prompt as one segment, of whatever length (`segment_size` at least as long, `threshold=0`). Qwen2.5-1M reads 32768
tokens at a time, as is done here, and prompts of at most 32768 tokens whole. vLLM's code for it differs from this in
three points: its segments also end at each border of a chunk of dual chunk attention; a size of 30 columns becomes 130;
and the pattern is estimated by queries whose distance to earlier chunks is not clamped, while here the estimate and
attention have the same scores.

If all columns are kept it is dense attention. Tokens after a prompt read everything, and so do layers with sliding
windows, within those.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.cache.dense import Dense, write
from decodax.cache.key_values import KVLayer
from decodax.caches.prefill.vertical_slash import last_weights, pattern, sparse_attention, step_of
from decodax.caches.prefill.whole_prompt import PrefillConfig, SparsePrefill, WholePromptReader, segment, slots_of
from decodax.common.axes import DATA, MODEL, shardwise
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.pallas_kernels.window_attention import FixedBias, window_attention

HeadSizes = tuple[tuple[tuple[int, int, int], ...], ...]
"""For each layer, for some of its heads: the head, its number of columns, and its number of diagonals."""


def read_sizes(table: str | Path | Sequence[Mapping[Any, Sequence[Any]]]) -> HeadSizes:
    """Returns the sizes in a table of the form that the authors publish for models: for each layer the pattern of each
    head.

    Args:
        table: for each layer `{head: (pattern, columns, diagonals, score)}`, or the path of a JSON file of that.

    Raises:
        ValueError: another pattern than "vertical_and_slash", or sizes that are no numbers from 1.

    >>> read_sizes([{"0": ["vertical_and_slash", 30, 800, 0.99]}])
    (((0, 30, 800),),)
    """
    layers = json.loads(Path(table).read_text()) if isinstance(table, (str, Path)) else table

    def one(layer: int, head: Any, given: Sequence[Any]) -> tuple[int, int, int]:
        name, *sizes = given
        if name != "vertical_and_slash":
            raise ValueError(f"heads: got the pattern {name!r} for head {head} of layer {layer}, takes "
                             "'vertical_and_slash'")
        if len(sizes) < 2 or not all(isinstance(n, int) and n > 0 for n in sizes[:2]):
            raise ValueError(f"heads: got the sizes {sizes[:2]} for head {head} of layer {layer}, takes numbers from 1")
        return int(head), sizes[0], sizes[1]

    return tuple(tuple(one(i, head, given) for head, given in heads.items()) for i, heads in enumerate(layers))


class SegmentReader(WholePromptReader):
    """Stands in for the cache while a segment is read.

    Attributes:
        sparse: `bool[B]`, rows that read a part; None: no row does. start: `i32[]`, where the segment begins.
        stop: `i32[B]`, where a row's part of it ends.
    """

    def __init__(self, base: Dense, kind: MInferenceConfig, sparse: Array | None, start: Array, stop: Array,
                 shapes: tuple[KVLayer, ...]):
        super().__init__(base)
        self.kind, self.sparse, self.start, self.stop, self.shapes = kind, sparse, start, stop, shapes

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None, bias: Any = None) -> tuple[Array, PyTree]:
        kind, sparse = self.kind, self.sparse
        held = write(self.base.kv[layer], jnp.concatenate((k, v), -1), window.positions)
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias)
        step = step_of(q.shape[1], kind.block_size)
        whole = lambda stop: _whole(q, k, v, held, self.start, stop, step=step, **options)
        if sparse is None or sliding is not None or held.shape[2] <= kind.block_size:
            return whole(self.stop.max()), (k, v)
        if softcap is not None or not (bias is None or isinstance(bias, FixedBias)):
            raise ValueError(f"cache: {kind.name} scores columns and diagonals by queries and keys; takes a model "
                             "without a soft cap of its attention scores, or a bias that tells heads apart")
        sizes = kind.sizes(layer, q.shape[2])
        columns, distances = (min(int(n), held.shape[2]) for n in sizes.max(1))
        stop = jnp.where(sparse, self.stop, 0)
        part = lambda: _part(q, held, self.start, stop, jnp.asarray(sizes), most=(columns, distances), kind=kind,
                             scale=scale, bias=bias)
        # a segment in which no row reads a part, or no row reads everything, takes less time
        nothing = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
        some = lax.cond(sparse.any(), part, lambda: nothing)
        return jnp.where(sparse[:, None, None, None], some, whole(jnp.where(sparse, 0, self.stop).max())), (k, v)


def _whole(q: Array, k: Array, v: Array, held: Array, start: Array, stop: Array, *, step: int,
           **options: Any) -> Array:
    """Returns attention of a segment to everything before it and in it, `step` queries at a time and none from `stop`
    on."""
    (B, W), e = q.shape[:2], v.shape[-1]
    mask = jnp.tril(jnp.ones((1, step, step), bool))

    def visit(i: Array, out: Array) -> Array:
        own = lambda x: lax.dynamic_slice_in_dim(x, i * step, step, 1)
        first = start + i * step
        at = jnp.broadcast_to(first + jnp.arange(step, dtype=jnp.int32), (B, step))
        some = window_attention(own(q), own(k), own(v), mask, at, held, jnp.broadcast_to(first, (B,)), **options)
        return lax.dynamic_update_slice_in_dim(out, some, i * step, 1)

    steps = jnp.clip((stop - start + step - 1) // step, 0, W // step)
    return lax.fori_loop(0, steps, visit, jnp.zeros((*q.shape[:3], e), q.dtype))


# traced and lowered once for all layers of a kind
@functools.partial(jax.jit, static_argnames=("most", "kind", "scale", "bias"))
def _part(q: Array, held: Array, start: Array, stop: Array, sizes: Array, *, most: tuple[int, int],
          kind: MInferenceConfig, scale: float, bias: FixedBias | None) -> Array:
    """Returns sparse attention of a segment, head by head, `f[B, W, H, e]`.

    Args:
        stop: `i32[B]`, 0 for rows that read everything. sizes: `i32[2, H]`, numbers of columns and of diagonals.
    """

    def local(q: Array, held: Array, start: Array, stop: Array, sizes: Array) -> Array:
        (_, W, H, d), G = q.shape, held.shape[1]
        last = jnp.clip(stop[:, None] - start - kind.last_q + jnp.arange(kind.last_q, dtype=jnp.int32), 0, W - 1)

        def head(given: tuple[Array, Array, Array]) -> Array:
            h, own, size = given
            kv = lax.dynamic_index_in_dim(held, h // (H // G), 1, keepdims=False)
            ends = jnp.take_along_axis(own, last[..., None], 1)
            weights = last_weights(ends, kv[..., :d], start, stop, scale=scale, bias=bias)
            kept = pattern(weights, stop, size[0], size[1], most, kind.first, kind.near)
            return sparse_attention(own, kv, start, stop.max(), *kept, scale=scale, block=kind.block_size,
                                    bias=bias).astype(q.dtype)

        out = lax.map(head, (jnp.arange(H, dtype=jnp.int32), jnp.moveaxis(q, 2, 0), sizes.T))
        return jnp.moveaxis(out, 0, 2)

    heads = P(DATA, None, MODEL)
    return shardwise(local, (heads, P(DATA, MODEL), P(), P(DATA), P(None, MODEL)), heads, q, held, start, stop, sizes)


@struct
class MInferenceCache(SparsePrefill):
    """A dense cache, whose prompt is read by segments."""

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> Cache:
        kind: Any = self.kind
        n, step = prompt.tokens.shape[1], step_of(kind.segment_size, kind.block_size)
        # a segment costs its width, so prompts that are all read whole have narrow ones, and so has the last segment
        short = n < kind.threshold
        width = step if short else kind.segment_size
        sparse = None if short else length + 1 > kind.threshold
        tokens = jnp.pad(prompt.tokens, ((0, 0), (0, width + step)))

        def visit(i: Array, base: Dense, own: int) -> Dense:
            start = i * width
            stop = jnp.minimum(length, start + own)
            window = segment(tokens, start, -(-own // step) * step, stop)
            reading: Any = SegmentReader(base, kind, sparse, start, stop, self.shapes)
            out = prompt.model.apply(prompt.params, window, reading)
            return base.commit(out.entries, slots_of(window, out))

        rest = n % width if width > step else 0
        full = (n - rest + width - 1) // width
        longest = length.max()
        segments = jnp.minimum((longest + width - 1) // width, full)
        base = lax.fori_loop(0, segments, lambda i, base: visit(i, base, width), self.base)
        if rest:
            base = lax.cond(longest > full * width, lambda base: visit(jnp.int32(full), base, rest), lambda x: x, base)
        return self.replace(base=base)


@CACHES.register("minference",
                 "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention",
                 "Jiang et al. 2024", family="prefill")
@dataclasses.dataclass(frozen=True)
class MInferenceConfig(PrefillConfig):
    """Keeps everything; each head of a segment of a prompt attends to the columns and the diagonals of the score matrix
    that its last queries attend to.

    It saves the time of reading prompts of many thousand tokens. Example: `cache="minference:vertical_size=500"`.

    Attributes:
        vertical_size: number of columns that a head keeps, at least the first `first`.
        slash_size: number of diagonals that a head keeps, at least the nearest `near`.
        heads: other sizes for single heads: a JSON file of the authors' form or its content, see `read_sizes`.
        segment_size: tokens that are read at a time; a multiple of the block.
        last_q: number of last queries of a segment that choose the columns and diagonals.
        first: number of first columns that are always kept.
        near: number of nearest diagonals that are always kept.
        block_size: number of queries that read the same tiles, and of keys of a tile.
        threshold: length up to which prompts are read whole.
    """

    vertical_size: Count = 1000
    slash_size: Count = 6096
    heads: Any = ()
    segment_size: Count = 32768
    last_q: Count = 64
    first: Whole = 30
    near: Count = 100
    block_size: Count = 64
    threshold: Whole = 32768

    name: ClassVar[str] = "minference"

    def __post_init__(self) -> None:
        if not isinstance(self.heads, tuple) or any(isinstance(layer, Mapping) for layer in self.heads):
            object.__setattr__(self, "heads", read_sizes(self.heads))
        super().__post_init__()
        if self.segment_size % self.block_size:
            raise ValueError(f"block_size: got {self.block_size}, takes a divisor of the segment of "
                             f"{self.segment_size}")

    def sizes(self, layer: int, heads: int) -> np.ndarray:
        """Returns the numbers of columns and of diagonals that each head of a layer keeps, `i32[2, H]`."""
        given = np.full((2, heads), [[self.vertical_size], [self.slash_size]], np.int32)
        for head, *sizes in self.heads[layer] if layer < len(self.heads) else ():
            given[:, head] = sizes
        return np.maximum(given, [[self.first], [self.near]]).astype(np.int32)

    def around(self, base: Dense, shapes: tuple[KVLayer, ...]) -> Cache:
        if shapes and len(self.heads) > len(shapes):
            raise ValueError(f"heads: got {len(self.heads)} layers, the model has {len(shapes)}")
        for i, (heads, shape) in enumerate(zip(self.heads, shapes, strict=False)):
            for head, *_ in heads:
                if not 0 <= head < (shape.queries or head + 1):
                    raise ValueError(f"heads: got head {head} of layer {i}, which has {shape.queries}")
        return MInferenceCache(base=base, shapes=shapes, kind=self)
