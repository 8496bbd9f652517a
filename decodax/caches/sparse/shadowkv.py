"""ShadowKV: keys are stored as low-rank matrices, and queries choose chunks by their mean keys ("ShadowKV: KV Cache in
Shadows for High-Throughput Long-Context LLM Inference", Sun et al., 2024).

After a prompt, the keys of a layer before rotation, of all heads together, are approximated by a matrix of low rank.
The prompt is cut into chunks. The chunks whose keys are farthest from their mean, the outliers, are stored exactly, and
so are the last chunks and all later tokens. Each query attends to these, and to the chunks whose mean keys, the
landmarks, it attends to most: their keys are computed from the low-rank matrices and rotated to their positions, and
their values are fetched.

The authors store values in host memory. `offload=True` does the same, chunk by chunk. Otherwise they are on the device,
and only the memory of keys is saved.

The tokens attended to are those of the authors' code (a21f5a9, its class for accuracy); keys agree to rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, write
from decodax.cache.entry import own_entry
from decodax.cache.key_values import FittedConfig, KVLayer, empty_kv
from decodax.caches.rotation import turned
from decodax.caches.sparse.reading import IndexedCache, SparseConfig, attention_to
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, Layout, PyTree
from decodax.core.host_memory import PAGES, empty_pages, fetch, to_host
from decodax.core.mesh import heads
from decodax.core.window import each_node
from decodax.models.rope import rotate
from decodax.pallas_kernels.window_attention import Bias, merge, whole_blocks, window_attention_lse


@struct
class Shadow(Struct):
    """The compressed prompt of a layer: `T` tokens in `C` chunks of `P`, with keys in a form of rank `R`.

    Attributes:
        codes: `f[B, T, R]`, coefficients of the keys of all heads. Token `t` of head `g` has the key `codes[b, t] @
            basis[b, g]` before rotation.
        basis: `f[B, G, R, d]`.
        values: `f[B, G, T, e]`; in host memory `f[B, G, C, P, e]`.
        landmarks: `f[B, G, C, d]`, mean rotated key of each chunk, by which queries choose chunks.
        far: `bool[B, G, C]`, True for chunks that queries can choose.
    """

    codes: Array
    basis: Array
    values: Array
    landmarks: Array
    far: Array


@struct
class ShadowKVCache(IndexedCache):
    """Tokens that are stored exactly, and a `Shadow` of the prompt.

    Attributes:
        kv: for each layer `f[B, G, S, d + e]`: outliers, the end of the prompt, and later tokens; all tokens in layers
            with a sliding window.
        shadows: the `Shadow` of each layer; None: the layer stores all tokens exactly.
        kept: `i32[B]`, number of tokens of the prompt in `kv`.
        began: `i32[B]`, number of prefilled tokens.
        size: static; maximum number of tokens of a text.
        length, given, shapes, kind: see `SparseCache`.
    """

    shadows: tuple[Shadow | None, ...]
    kept: Array
    began: Array
    size: int = static()

    if TYPE_CHECKING:
        kind: ShadowKVConfig

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def layout(self) -> Layout:
        if not self.kind.offload:
            return Layout()
        place = lambda shadow: None if shadow is None else heads(shadow).replace(values=PAGES)
        return Layout(hosted=[shadow.values for shadow in self.shadows if shadow is not None],
                      specs=dict(shadows=tuple(map(place, self.shadows))))

    def room(self, running: Array) -> Array | None:
        slots = [kv.shape[2] for kv, shadow in zip(self.kv, self.shadows, strict=True) if shadow is not None]
        return min(slots) - self._used if slots else None

    @property
    def _used(self) -> Array:
        return self.kept + self.length - self.began

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        entry, shadow = own_entry(q, k, v), self.shadows[layer]
        near = window_attention_lse(q, k, v, window.visible(), window.positions, self.kv[layer],
                                    self.length if shadow is None else self._used, scale=scale, sliding=sliding,
                                    softcap=softcap, key_positions=window.key_positions, bias=bias, sinks=sinks)
        if shadow is None:
            return near[0], entry
        read = functools.partial(self._read, self.shapes[layer], shadow)
        out, _ = merge(near, each_node(read, q.astype(jnp.float32) * scale))
        return out, entry

    def _read(self, shape: KVLayer, shadow: Shadow, q: Array) -> tuple[Array, Array]:
        """Returns attention of one query of each row, `f32[B, H, d]`, to the chunks that it chooses, and the logarithms
        of its softmax sums."""
        P, d = self.kind.chunk_size, shape.width
        q = q.reshape(len(q), shape.heads, -1, d)
        keys, chosen, found = jax.vmap(lambda *row: self._chosen(shape, *row))(shadow.replace(values=None), q)
        if self.kind.offload:
            # memory of the host that was not written may hold NaN
            values = jnp.where(found[..., None, None], fetch(shadow.values, jnp.where(found, chosen, 0)), 0)
            values = values.reshape(*values.shape[:2], -1, values.shape[-1])
        else:
            values = jnp.take_along_axis(shadow.values, _tokens(chosen, P)[..., None], 2)
        some = jnp.concatenate([keys, values.astype(jnp.float32)], -1)
        return jax.vmap(lambda q, some, seen: attention_to(q, some, seen, d))(q, some, jnp.repeat(found, P, 2))

    def _chosen(self, shape: KVLayer, shadow: Shadow, q: Array) -> tuple[Array, Array, Array]:
        """Returns, for the query `f32[G, r, d]` of one row, the keys of the chunks that it chooses, `f32[G, n * P, d]`,
        the numbers of these chunks, `i32[G, n]`, and a mask of those that exist, `bool[G, n]`."""
        kind, C = self.kind, shadow.landmarks.shape[1]
        scores = jnp.einsum("grd,gcd->grc", q, shadow.landmarks.astype(jnp.float32))
        weights = jax.nn.softmax(scores, axis=-1, where=shadow.far[:, None]).max(1)
        found, chosen = lax.top_k(jnp.where(shadow.far, weights, -1), min(kind.budget // kind.chunk_size, C))
        at = _tokens(chosen.astype(jnp.int32), kind.chunk_size)
        keys = jnp.einsum("gnr,grd->gnd", shadow.codes[at].astype(jnp.float32), shadow.basis.astype(jnp.float32))
        if shape.rope is not None:
            cos, sin = shape.rope.table(at, shape.context)
            keys = rotate(keys[:, :, None], cos, sin, shape.rope.interleaved)[:, :, 0]
        return keys, chosen.astype(jnp.int32), found >= 0

    def index(self, prompt: Dense) -> Self:
        kind = self.kind
        kv: list[Array] = []
        shadows: list[Shadow | None] = []
        for held, slots, shape, shadow in zip(prompt.kv, self.kv, self.shapes, self.shadows, strict=True):
            if shadow is None:
                kv.append(held)
                shadows.append(None)
                continue
            some, made = lax.map(lambda row, n=slots.shape[2], shape=shape: _shadow(kind, shape, n, *row),
                                 (held, prompt.length))
            if kind.offload:
                C, P = shadow.values.shape[2:4]
                whole = made.values[:, :, :C * P]
                whole = whole.reshape(*whole.shape[:2], C, P, whole.shape[-1])
                made = made.replace(values=lax.dynamic_update_slice(shadow.values, to_host(whole), (0,) * 5))
            kv.append(some)
            shadows.append(made)
        chunks = kind.chunks(prompt.length)
        kept = prompt.length - (chunks - jnp.minimum(chunks, kind.outlier_chunk)) * kind.chunk_size
        return self.replace(kv=tuple(kv), shadows=tuple(shadows), kept=kept, began=prompt.length, length=prompt.length)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        place = jnp.where(slots >= 0, slots - self.began[:, None] + self.kept[:, None], -1)
        kv = tuple(write(held, entry.both, slots if shadow is None else place)
                   for held, entry, shadow in zip(self.kv, entries, self.shadows, strict=True))
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))


def _tokens(chunks: Array, size: int) -> Array:
    """Returns the positions of the tokens of chunks `i32[..., n]`, `i32[..., n * size]`."""
    return (chunks[..., None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(*chunks.shape[:-1], -1)


def _shadow(kind: ShadowKVConfig, shape: KVLayer, slots: int, kv: Array, length: Array) -> tuple[Array, Shadow]:
    """Returns, for a layer of one row, the tokens that are stored exactly, in `slots` slots, and the `Shadow` of the
    others. `kv` is `f[G, T, d + e]`."""
    (G, T, _), d, P = kv.shape, shape.width, kind.chunk_size
    keys = jnp.where(jnp.arange(T)[:, None] < length, kv[..., :d].astype(jnp.float32), 0)
    cut = keys[:, :T // P * P].reshape(G, -1, P, d)
    means = cut.mean(2)
    chunks = kind.chunks(length)
    cosine = jnp.einsum("gcd,gcpd->gcp", means, cut) / jnp.maximum(
        jnp.linalg.norm(means, axis=-1)[..., None] * jnp.linalg.norm(cut, axis=-1), 1e-8)
    within = jnp.arange(T // P) < chunks
    order = jnp.argsort(jnp.where(within, cosine.min(-1), jnp.inf), axis=-1, stable=True)
    odd = (jnp.argsort(order, axis=-1) < kind.outlier_chunk) & within                     # [G, C]
    place = jnp.arange(T)
    stays = jnp.where(place < chunks * P, jnp.pad(jnp.repeat(odd, P, 1), ((0, 0), (0, T % P))), place < length)
    first = jnp.argsort(~stays, axis=-1, stable=True)
    first = first[:, :slots] if slots <= T else jnp.pad(first, ((0, 0), (0, slots - T)))
    some = jnp.take_along_axis(kv, first[..., None], 1)
    plain = turned(shape, keys.swapaxes(0, 1)[None], -place[None])[0].reshape(T, G * d)     # before their rotation
    _, vectors = jnp.linalg.eigh(plain.T @ plain)
    basis = vectors[:, ::-1][:, :min(kind.rank, G * d)]         # the directions of the largest singular values
    store = lambda x: x.astype(kv.dtype)
    return some, Shadow(codes=store(plain @ basis), basis=store(basis.reshape(G, d, -1).swapaxes(1, 2)),
                        values=kv[..., d:], landmarks=store(means), far=within & ~odd)


@CACHES.register("shadowkv", "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference",
                 "Sun et al. 2024", family="sparse")
@dataclasses.dataclass(frozen=True)
class ShadowKVConfig(FittedConfig, SparseConfig):
    """Keeps all tokens, with keys of low rank; each query attends to the chunks whose mean keys it attends to most, to
    outliers and to later tokens.

    It saves the memory of keys, and with `offload=True` that of values, too. Example: `cache="shadowkv:budget=1024"`.

    Attributes:
        budget: number of tokens of the chunks that a query attends to; at least one chunk.
        chunk_size: number of tokens of a chunk.
        rank: rank of the matrix of the keys of all heads of a layer.
        outlier_chunk: number of chunks of each head that are stored exactly.
        local_chunk: number of complete chunks at the end of the prompt that are stored exactly.
        offload: whether values are stored in host memory.
    """

    budget: Count = 2048
    chunk_size: Count = 8
    rank: Count = 160
    outlier_chunk: Whole = 48
    local_chunk: Whole = 4
    offload: bool = False

    name: ClassVar[str] = "shadowkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.chunk_size:
            raise ValueError(f"budget: got {self.budget}, takes the {self.chunk_size} tokens of a chunk or more")

    def chunks(self, length: Array) -> Array:
        """Returns the number of chunks of a prompt of `length` tokens that queries can choose or that are stored as
        outliers: all complete chunks except the last `local_chunk`. The tokens after these are stored exactly."""
        return jnp.maximum(length // self.chunk_size - self.local_chunk, 0)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        kept = self.outlier_chunk * self.chunk_size + (self.local_chunk + 1) * self.chunk_size - 1
        slots = whole_blocks(min(size, kept + self.new_tokens(size)))
        zeros = lambda *rest, dtype=dtype: jnp.zeros((batch, *rest), dtype)
        kv: list[Array] = []
        shadows: list[Shadow | None] = []
        for shape in shapes:
            whole, (G, d) = shape.sliding is not None, (shape.heads, shape.width)
            kv.append(empty_kv([shape], batch, size if whole else slots, dtype)[0])
            R, C, e = min(self.rank, G * d), size // self.chunk_size, shape.both - d
            values = lambda G=G, C=C, e=e: empty_pages(batch, G, C, self.chunk_size, e, dtype=dtype) if self.offload \
                else zeros(G, size, e)
            shadows.append(None if whole else Shadow(
                codes=zeros(size, R), basis=zeros(G, R, d), values=values(),
                landmarks=zeros(G, C, d), far=zeros(G, C, dtype=bool)))
        parts = self.parts((), batch, size, dtype, inputs) | dict(kv=tuple(kv), shapes=shapes)
        none = jnp.zeros(batch, jnp.int32)
        return ShadowKVCache(shadows=tuple(shadows), kept=none, began=none, size=size, **parts)
