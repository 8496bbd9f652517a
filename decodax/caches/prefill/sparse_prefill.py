"""Prompts that are read a long segment at a time, each query head of which attends to the columns and the diagonals
that the segment's last queries look at ("MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic
Sparse Attention", Jiang et al., 2024; by segments as in "Qwen2.5-1M Technical Report", Yang et al., 2025).

The pattern is that of the authors' `vertical_and_slash_kernel` and of its converter
(`decodax.caches.prefill.vertical_slash`), with their sizes by default: 1000 columns and 6096 diagonals. They read a
whole prompt as one segment, of whatever length (`segment` at least as long, `threshold=0`). Qwen2.5-1M reads 32768
tokens at a time, as is done here, and prompts of at most 32768 tokens whole. vLLM's code for it differs from this in
three points: its segments end at each border of a chunk of dual chunk attention, too; a size of 30 columns becomes 130;
and the pattern is estimated by queries whose distance to earlier chunks is not clamped, where here the estimate and
attention have the same scores.

Where all columns are kept it is dense attention. Tokens behind a prompt read everything, and so do layers with sliding
windows, within those. Segments are counted from the beginning of a text, whatever the chunks that it comes in: no layer
reads these (`decodax.caches.prefill.unread`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.cache.dense import Dense, dense, write
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.prefill.unread import Unread
from decodax.caches.prefill.vertical_slash import last_weights, pattern, sparse_attention, step_of
from decodax.common.axes import DATA, MODEL, shardwise
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, PyTree, ReadPrompt
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import FixedBias, window_attention

HeadSizes = tuple[tuple[tuple[int, int, int], ...], ...]
"""For each layer, for some of its heads: which one, how many columns and how many diagonals."""


def read_sizes(table: str | Path | Sequence[Mapping[Any, Sequence[Any]]]) -> HeadSizes:
    """The sizes in a table of the form that the authors publish for models: for each layer the pattern of each head.

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


class Segment:
    """In a cache's place while a segment is read.

    Attributes:
        sparse: `bool[B]`, the rows that read a part; None: no row does. start: `i32[]`, where the segment begins.
        stop: `i32[B]`, where what a row has of it ends.
    """

    def __init__(self, base: Dense, kind: VerticalSlash, sparse: Array | None, start: Array, stop: Array,
                 shapes: tuple[KVLayer, ...]):
        self.base, self.kind, self.sparse, self.start, self.stop, self.shapes = base, kind, sparse, start, stop, shapes
        self.inputs, self.reads, self.capacity = base.inputs, None, base.capacity

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None, bias: Any = None) -> tuple[Array, PyTree]:
        kind, sparse = self.kind, self.sparse
        held = write(self.base.kv[layer], jnp.concatenate((k, v), -1), window.positions)
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias)
        step = step_of(q.shape[1], kind.block)
        whole = lambda stop: _whole(q, k, v, held, self.start, stop, step=step, **options)
        if sparse is None or sliding is not None or held.shape[2] <= kind.block:
            return whole(self.stop.max()), (k, v)
        if softcap is not None or not (bias is None or isinstance(bias, FixedBias)):
            raise ValueError(f"cache: {kind.name} scores columns and diagonals by queries and keys; takes a model "
                             "without a soft cap of its attention scores, or a bias that tells heads apart")
        sizes = kind.sizes(layer, q.shape[2])
        columns, distances = (min(int(n), held.shape[2]) for n in sizes.max(1))
        stop = jnp.where(sparse, self.stop, 0)
        part = lambda: _part(q, held, self.start, stop, jnp.asarray(sizes), most=(columns, distances), kind=kind,
                             scale=scale, bias=bias)
        # segments in which no row reads a part, and those in which no row reads everything, take less time
        nothing = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
        some = lax.cond(sparse.any(), part, lambda: nothing)
        return jnp.where(sparse[:, None, None, None], some, whole(jnp.where(sparse, 0, self.stop).max())), (k, v)


def _whole(q: Array, k: Array, v: Array, held: Array, start: Array, stop: Array, *, step: int,
           **options: Any) -> Array:
    """Attention of a segment to everything before it and in it, `step` queries at a time and none from `stop` on."""
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
          kind: VerticalSlash, scale: float, bias: FixedBias | None) -> Array:
    """Attention of a segment, head by head: `f[B, W, H, e]`. `stop`: `i32[B]`, 0 of rows that are not asked. `sizes`:
    `i32[2, H]`."""

    def local(q: Array, held: Array, start: Array, stop: Array, sizes: Array) -> Array:
        (_, W, H, d), G = q.shape, held.shape[1]
        last = jnp.clip(stop[:, None] - start - kind.last + jnp.arange(kind.last, dtype=jnp.int32), 0, W - 1)

        def head(given: tuple[Array, Array, Array]) -> Array:
            h, own, size = given
            kv = lax.dynamic_index_in_dim(held, h // (H // G), 1, keepdims=False)
            ends = jnp.take_along_axis(own, last[..., None], 1)
            weights = last_weights(ends, kv[..., :d], start, stop, scale=scale, bias=bias)
            kept = pattern(weights, stop, size[0], size[1], most, kind.first, kind.near)
            return sparse_attention(own, kv, start, stop.max(), *kept, scale=scale, block=kind.block,
                                    bias=bias).astype(q.dtype)

        out = lax.map(head, (jnp.arange(H, dtype=jnp.int32), jnp.moveaxis(q, 2, 0), sizes.T))
        return jnp.moveaxis(out, 0, 2)

    heads = P(DATA, None, MODEL)
    return shardwise(local, (heads, P(DATA, MODEL), P(), P(DATA), P(None, MODEL)), heads, q, held, start, stop, sizes)


@struct
class Sparsely(Wrapper):
    """A dense cache, of a prompt that is read by segments."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: VerticalSlash = static()

    def for_prompt(self) -> Cache:      # type: ignore[override]
        return Unread(length=jnp.zeros_like(self.base.length), into=self) if self.base.kv else self

    def read(self, prompt: ReadPrompt, length: Array) -> Sparsely:
        """With the first `length` tokens (`i32[B]`) of a prompt; the newest one comes behind them."""
        kind, (B, n) = self.kind, prompt.tokens.shape
        step = step_of(kind.segment, kind.block)
        # a segment costs its width, so prompts that are all read whole have narrow ones, and so has the last segment
        short = n < kind.threshold
        width = step if short else kind.segment
        sparse = None if short else length + 1 > kind.threshold
        tokens = jnp.pad(prompt.tokens, ((0, 0), (0, width + step)))

        def visit(i: Array, base: Dense, own: int) -> Dense:
            start = i * width
            wide = -(-own // step) * step
            slots = jnp.broadcast_to(start + jnp.arange(wide, dtype=jnp.int32), (B, wide))
            stop = jnp.minimum(length, start + own)
            live = slots < stop[:, None]
            window = causal(lax.dynamic_slice_in_dim(tokens, start, wide, 1), slots[:, 0], live)
            reading: Any = Segment(base, kind, sparse, start, stop, self.shapes)
            out = prompt.model.apply(prompt.params, window, reading)
            return base.commit(out.entries, jnp.where(live & jnp.isfinite(out.hidden).all(-1), slots, -1))

        rest = n % width if width > step else 0
        full = (n - rest + width - 1) // width
        longest = length.max()
        segments = jnp.minimum((longest + width - 1) // width, full)
        base = lax.fori_loop(0, segments, lambda i, base: visit(i, base, width), self.base)
        if rest:
            base = lax.cond(longest > full * width, lambda base: visit(jnp.int32(full), base, rest), lambda x: x, base)
        return self.replace(base=base)


@dataclasses.dataclass(frozen=True)
class VerticalSlash(CacheConfig):
    """A `Sparsely` read cache.

    Attributes:
        vertical, slash: how many columns and diagonals a head keeps, at least the `first` and the `near` ones.
        heads: for each layer, for some of its heads, other sizes; see `read_sizes`.
        segment: tokens that are read at a time. last: so many of its last queries say what it reads.
        first: so many first columns are always kept. near: so many nearest diagonals; 1 or more.
        block: queries that read the same tiles, and keys of a tile.
        threshold: prompts of so many tokens or fewer read everything. name: what errors call it.
    """

    vertical: int = 1000
    slash: int = 6096
    heads: HeadSizes = ()
    segment: int = 32768
    last: int = 64
    first: int = 30
    near: int = 100
    block: int = 64
    threshold: int = 32768
    name: str = "minference"

    def __post_init__(self) -> None:
        for name in ("vertical", "slash", "segment", "last", "near", "block"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number from 1")
        if self.first < 0 or self.threshold < 0:
            raise ValueError(f"first, threshold: got {self.first} and {self.threshold}, takes 0 or more")
        if self.segment % self.block:
            raise ValueError(f"block: got {self.block}, takes a divisor of the segment of {self.segment}")

    def sizes(self, layer: int, heads: int) -> np.ndarray:
        """`i32[2, H]`: how many columns and diagonals each head of a layer keeps."""
        given = np.full((2, heads), [[self.vertical], [self.slash]], np.int32)
        for head, *sizes in self.heads[layer] if layer < len(self.heads) else ():
            given[:, head] = sizes
        return np.maximum(given, [[self.first], [self.near]]).astype(np.int32)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        if shapes and len(self.heads) > len(shapes):
            raise ValueError(f"heads: got {len(self.heads)} layers, the model has {len(shapes)}")
        for i, (heads, shape) in enumerate(zip(self.heads, shapes, strict=False)):
            for head, *_ in heads:
                if not 0 <= head < (shape.queries or head + 1):
                    raise ValueError(f"heads: got head {head} of layer {i}, which has {shape.queries}")
        return Sparsely(base=dense(shapes, batch, capacity, dtype, inputs), shapes=shapes, kind=self)
