"""MInference: prompts are prefilled in long segments. Each query head attends to the columns and diagonals of the score
matrix that the last queries of the segment attend to ("MInference 1.0: Accelerating Pre-filling for Long-Context LLMs
via Dynamic Sparse Attention", Jiang et al., 2024; by segments as in "Qwen2.5-1M Technical Report", Yang et al., 2025).

The pattern is that of the authors' `vertical_and_slash_kernel` and of its converter
(`decodax.caches.prefill.vertical_slash`), by default with their sizes: 1000 columns and 6096 diagonals. The authors
treat the whole prompt as one segment (`segment_size` at least its length, `threshold=0`). The defaults here are those
of Qwen2.5-1M: segments of 32768 tokens, and full attention for prompts of at most 32768 tokens. vLLM's code for it
differs from this in three points: its segments also end at each border of a chunk of dual chunk attention; a size of 30
columns becomes 130; and it estimates the pattern by queries whose distance to earlier chunks is not clamped, while here
the estimate and attention have the same scores.

If all columns are kept, it is dense attention. Tokens after a prompt attend to all tokens. Layers with sliding windows
always use full attention within the window.

Columns and diagonals are those of the authors' code (fb56c91), tiles those of its kernel, and with segments of vLLM's
(161944b). Only patterns of the kind `vertical_and_slash` are supported; a head keeps at least `near` diagonals.
Biases that differ between heads are not supported.
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
from decodax.cache.entry import KVEntry
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
"""For each layer, triples for some of its heads: the head, its number of columns, and its number of diagonals."""


def read_sizes(table: str | Path | Sequence[Mapping[Any, Sequence[Any]]]) -> HeadSizes:
    """Returns the sizes in a table that the authors publish for a model.

    Args:
        table: for each layer `{head: (pattern, columns, diagonals, score)}`, or the path of a JSON file with this
            content.

    Raises:
        ValueError: a pattern is not "vertical_and_slash", or a size is not an integer from 1.

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
    """Replaces the cache while the model runs on one segment of a prompt, and computes the segment's attention.

    Attributes:
        sparse: `bool[B]`, True for rows with sparse attention; None: all rows use full attention.
        start: `i32[]`, position of the first token of the segment.
        stop: `i32[B]`, position where each row's part of the segment ends.
    """

    def __init__(self, base: Dense, kind: MInferenceConfig, sparse: Array | None, start: Array, stop: Array,
                 shapes: tuple[KVLayer, ...]):
        super().__init__(base)
        self.kind, self.sparse, self.start, self.stop, self.shapes = kind, sparse, start, stop, shapes

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None, bias: Any = None,
               sinks: Array | None = None) -> tuple[Array, PyTree]:
        kind, sparse = self.kind, self.sparse
        held = write(self.base.kv[layer], jnp.concatenate((k, v), -1), window.positions)
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias, sinks=sinks)
        step = step_of(q.shape[1], kind.block_size)
        whole = lambda stop: _whole(q, k, v, held, self.start, stop, step=step, **options)
        if sparse is None or sliding is not None or held.shape[2] <= kind.block_size:
            return whole(self.stop.max()), KVEntry(k, v)
        assert softcap is None
        if not (bias is None or isinstance(bias, FixedBias)):
            raise kind.no_scores
        sizes = kind.sizes(layer, q.shape[2])
        columns, distances = (min(int(n), held.shape[2]) for n in sizes.max(1))
        stop = jnp.where(sparse, self.stop, 0)
        part = lambda: _part(q, held, self.start, stop, jnp.asarray(sizes), most=(columns, distances), kind=kind,
                             scale=scale, bias=bias, sinks=sinks)
        # a segment in which no row reads a part, or no row reads everything, takes less time
        nothing = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
        some = lax.cond(sparse.any(), part, lambda: nothing)
        return jnp.where(sparse[:, None, None, None], some, whole(jnp.where(sparse, 0, self.stop).max())), KVEntry(k, v)


def _whole(q: Array, k: Array, v: Array, held: Array, start: Array, stop: Array, *, step: int,
           **options: Any) -> Array:
    """Returns full causal attention of a segment, `step` queries at a time; queries from position `stop` on are
    skipped."""
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
          kind: MInferenceConfig, scale: float, bias: FixedBias | None, sinks: Array | None) -> Array:
    """Returns sparse attention of a segment, head by head, `f[B, W, H, e]`.

    Args:
        q: `f[B, W, H, d]`.
        held: `f[B, G, S, d + e]`, keys and values up to the segment's end.
        start: `i32[]`, position of the first query.
        stop: `i32[B]`, position where queries end; 0 for rows with full attention.
        sizes: `i32[2, H]`, numbers of columns and of diagonals.
        most: the maxima of both over heads.
        kind, scale, bias, sinks: the configuration, and options of attention.
    """

    def local(q: Array, held: Array, start: Array, stop: Array, sizes: Array, sinks: Array | None) -> Array:
        (_, W, H, d), G = q.shape, held.shape[1]
        last = jnp.clip(stop[:, None] - start - kind.last_q + jnp.arange(kind.last_q, dtype=jnp.int32), 0, W - 1)

        def head(given: tuple[Array, Array, Array, Array | None]) -> Array:
            h, own, size, sink = given
            kv = lax.dynamic_index_in_dim(held, h // (H // G), 1, keepdims=False)
            ends = jnp.take_along_axis(own, last[..., None], 1)
            weights = last_weights(ends, kv[..., :d], start, stop, scale=scale, bias=bias)
            kept = pattern(weights, stop, size[0], size[1], most, kind.first, kind.near)
            return sparse_attention(own, kv, start, stop.max(), *kept, scale=scale, block=kind.block_size,
                                    bias=bias, sink=sink).astype(q.dtype)

        out = lax.map(head, (jnp.arange(H, dtype=jnp.int32), jnp.moveaxis(q, 2, 0), sizes.T, sinks))
        return jnp.moveaxis(out, 0, 2)

    heads = P(DATA, None, MODEL)
    specs = heads, P(DATA, MODEL), P(), P(DATA), P(None, MODEL), P(MODEL)
    return shardwise(local, specs, heads, q, held, start, stop, sizes, sinks)


@struct
class MInferenceCache(SparsePrefill):
    """A dense cache whose prompt is prefilled by segments with sparse attention."""

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
    """Keeps all tokens; each head of a segment of a prompt attends to the columns and diagonals of the score matrix
    that its last queries attend to.

    It saves prefill time for prompts of many thousand tokens. Example: `cache="minference:vertical_size=500"`.

    Attributes:
        vertical_size: number of columns (keys) that a head keeps, at least `first`.
        slash_size: number of diagonals (distances) that a head keeps, at least `near`.
        heads: other sizes for single heads: a JSON file in the authors' format or its content, see `read_sizes`.
        segment_size: number of tokens of a segment; a multiple of `block_size`.
        last_q: number of last queries of a segment that choose the columns and diagonals.
        first: number of first columns that are always kept.
        near: number of nearest diagonals that are always kept.
        block_size: number of queries that share tiles of keys, and number of keys of a tile.
        threshold: maximum length of prompts that are prefilled with full attention.
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

    @property
    def no_scores(self) -> ValueError:
        """The error for a model whose attention scores have a soft cap, or a bias for each head."""
        return ValueError(f"cache: {self.name} scores columns and diagonals by queries and keys; takes a model without "
                          "a soft cap of its attention scores, or a bias that tells heads apart")

    def around(self, base: Dense, shapes: tuple[KVLayer, ...]) -> Cache:
        if any(shape.softcap is not None and shape.sliding is None for shape in shapes):
            raise self.no_scores
        if shapes and len(self.heads) > len(shapes):
            raise ValueError(f"heads: got {len(self.heads)} layers, the model has {len(shapes)}")
        for i, (heads, shape) in enumerate(zip(self.heads, shapes, strict=False)):
            for head, *_ in heads:
                if not 0 <= head < (shape.queries or head + 1):
                    raise ValueError(f"heads: got head {head} of layer {i}, which has {shape.queries}")
        return MInferenceCache(base=base, shapes=shapes, kind=self)
