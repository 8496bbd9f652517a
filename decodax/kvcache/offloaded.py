"""Pages in the memory of the host: on the device lie their digests and the latest tokens, and what a query reads.

The rule is that of `decodax.kvcache.retrieval`, and so are the tokens. A page goes to the host once it is whole; the
pages that a query chooses come back, one transfer a page and head, inside the compiled round. A page is a slice of an
array `[B, G N, P, d + e]`, since that is what XLA's TPU compiler takes from the host inside a loop: a dynamic slice in
at most two leading axes.

A prompt is read in chunks: each sees what lies on the host in blocks of pages, so that no more than a block of a layer
is on the device at a time. Layers that read everything (`Retrieval.skip`, and those with a sliding window) stay on the
device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.base import Cache, Entries, PyTree
from decodax.cache.dense import write
from decodax.cache.key_values import KVLayer, key_widths
from decodax.kvcache.retrieval import Retrieval, Retrieving
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, window_attention_lse
from decodax.struct import struct

BLOCK = 32
"""Pages of each head that a chunk of a prompt reads at once."""


@struct
class Offloaded(Retrieving):
    """A `Retrieving` cache whose pages lie in the memory of the host.

    Attributes:
        kv: of a layer whose pages are on the host the latest tokens, `f[B, G, R, d + e]`, the one at position `p` in
            slot `p % R`; of the others everything, `f[B, G, S, d + e]`.
        digests: of a layer whose pages are on the host `f[B, G, S / P, m]`; of the others None.
        pages: in the memory of the host, `f[B, G N, P, d + e]`: page `n` of head `g` is entry `g N + n`; or None.
        length, given, widths, shapes, kind: as in `Retrieving`.
    """

    pages: tuple[Any, ...]

    @property
    def capacity(self) -> int:
        return next((x.shape[2] * self.kind.page for x in self.digests if x is not None), 0)

    @property
    def host(self) -> PyTree:
        return self.pages

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if self.pages[layer] is None or not window.certain:
            return super().attend(layer, q, k, v, window, scale=scale, sliding=sliding, softcap=softcap, bias=bias)
        if bias is not None or softcap is not None:
            raise ValueError(f"cache: {self.kind.name} with offload=True takes a model without a soft cap or a bias of "
                             "its attention scores")
        near = window_attention_lse(q, k, v, window.visible(), window.positions, scale=scale,
                                    key_positions=window.key_positions)
        out, _ = merge(near, self._everything(layer, q, window.positions, scale))
        own = k.shape[1] - q.shape[1]
        return out, (k[:, own:], v[:, own:])

    def _everything(self, layer: int, q: Array, positions: Array, scale: float) -> tuple[Array, Array]:
        """Attention to all that is held, page by page from the host, as `prefix_attention` gives it."""
        P, G, pages = self.kind.page, self.kv[layer].shape[1], self.pages[layer]
        assert pages is not None
        each = min(BLOCK, pages.shape[1] // G)
        whole = self.length // P

        def add(i: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
            seen = jnp.clip((whole - i * each) * P, 0, each * P)
            return merge(part, prefix_attention(q, positions, read_block(pages, G, i * each, each), seen, scale=scale))

        rest = self._span(layer, whole * P, P)
        return lax.fori_loop(0, -(-whole.max() // each), add,
                             prefix_attention(q, positions, rest, self.length - whole * P, scale=scale))

    def _paged(self, layer: int, chosen: Array) -> Array:
        pages = self.pages[layer]
        return super()._paged(layer, chosen) if pages is None else read_pages(pages, chosen)

    def _span(self, layer: int, first: Array, count: int) -> Array:
        ring = self.kv[layer]
        at = (first[:, None] + jnp.arange(count, dtype=jnp.int32)) % ring.shape[2]
        return jnp.take_along_axis(ring, at[:, None, :, None], 2)

    def commit(self, entries: Entries, slots: Array) -> Offloaded:
        P, (B, W) = self.kind.page, slots.shape
        length = jnp.maximum(self.length, slots.max(1) + 1)
        first = self.length // P                    # the page that is being filled
        count = -(-(P - 1 + W) // P)                # pages that the entries may touch
        number = first[:, None] + jnp.arange(count, dtype=jnp.int32)
        number = jnp.where(number < (length // P)[:, None], number, -1)      # those that they make whole
        kv: list[Array] = []
        digests: list[Any] = []
        pages: list[Array | None] = []
        for i, (held, digest, store, entry) in enumerate(zip(self.kv, self.digests, self.pages, entries, strict=True)):
            new = jnp.concatenate(entry, -1)
            if store is None:
                kv.append(write(held, new, slots))
                digests.append(None)
                pages.append(None)
                continue
            R = held.shape[2]
            begun = jnp.pad(self._span(i, first * P, P), ((0, 0), (0, 0), (0, (count - 1) * P), (0, 0)))
            touched = write(begun, new, jnp.where(slots >= 0, slots - first[:, None] * P, -1))
            touched = touched.reshape(B, -1, count, P, touched.shape[-1])
            own = self.kind.score.digest(touched[..., :self.widths[i]])
            # of a long chunk the latest tokens alone: no two of them for one slot
            late = (slots >= 0) & (slots >= length[:, None] - R)
            kv.append(write(held, new, jnp.where(late, slots % R, -1)))
            digests.append(write(digest, own.swapaxes(1, 2), number))
            pages.append(write_pages(store, touched, number))
        return self.replace(kv=tuple(kv), digests=tuple(digests), pages=tuple(pages), length=length)

    def select(self, rows: Array) -> Offloaded:
        rest = jax.tree.map(lambda x: x[rows], self.replace(pages=()))
        every = jnp.arange(rows.shape[0], dtype=jnp.int32)
        moved = (None if x is None else copy_rows(empty((rows.shape[0], *x.shape[1:]), x.dtype), x, rows, every,
                                                  kv.shape[1]) for x, kv in zip(self.pages, self.kv, strict=True))
        return rest.replace(pages=tuple(moved))

    def put(self, new: Cache, rows: Array) -> Offloaded:
        assert isinstance(new, Offloaded)
        rest = super(Offloaded, self.replace(pages=())).put(new.replace(pages=()), rows)
        every = jnp.arange(rows.shape[0], dtype=jnp.int32)
        places = jnp.where(rows < self.length.shape[0], rows, -1)
        moved = (None if x is None or y is None else copy_rows(x, y, every, places, kv.shape[1])
                 for x, y, kv in zip(self.pages, new.pages, self.kv, strict=True))
        return rest.replace(pages=tuple(moved))


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of pages in the memory of the host, which no one has written to."""
    # with an update behind it, XLA's TPU compiler allocates it on the host; alone it is made on the device and copied
    page = jnp.zeros((1, 1, *shape[2:]), dtype)
    host = lambda x: jax.device_put(x, jax.memory.Space.Host)
    return lax.dynamic_update_slice(host(jnp.zeros(shape, dtype)), host(page), (0, 0, 0, 0))


def _to_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device)


def _beside(x: Array, store: Array) -> Array:
    # where shapes alone are asked for (`jax.eval_shape`), JAX does not know that pages lie on the host
    return jax.device_put(x, jax.typeof(store).memory_space)


@jax.jit
def read_pages(store: Array, chosen: Array) -> Array:
    """Pages `chosen` (`i32[B, G, n]`) of `store` (`f[B, G N, P, D]`, on the host), on the device: `f[B, G, n P, D]`."""
    B, G, n = chosen.shape
    P, D = store.shape[2:]
    at = (chosen + jnp.arange(G, dtype=jnp.int32)[:, None] * (store.shape[1] // G)).reshape(B, G * n)

    def one(t: Array, out: Array) -> Array:
        b, i = t // (G * n), t % (G * n)
        page = _to_device(lax.dynamic_slice(store, (b, at[b, i], 0, 0), (1, 1, P, D)))
        return lax.dynamic_update_slice(out, page, (b, i, 0, 0))

    return lax.fori_loop(0, B * G * n, one, jnp.zeros((B, G * n, P, D), store.dtype)).reshape(B, G, n * P, D)


def read_block(store: Array, heads: int, first: Array, count: int) -> Array:
    """Pages from `first` (`i32[]`) on of all heads, on the device: `f[B, G, count P, D]`."""
    B, each, P, D = store.shape[0], store.shape[1] // heads, *store.shape[2:]
    block = [_to_device(lax.dynamic_slice(store, (0, g * each + first, 0, 0), (B, count, P, D))) for g in range(heads)]
    return jnp.stack(block, 1).reshape(B, heads, count * P, D)


@jax.jit
def write_pages(store: Array, new: Array, number: Array) -> Array:
    """`store` with pages `new` (`f[B, G, C, P, D]`) as pages `number` (`i32[B, C]`) of each head; those below 0 are
    dropped, and cost no transfer."""
    _, G, C, P, D = new.shape
    new, wanted = new.astype(store.dtype), number.reshape(-1)
    order = jnp.argsort(wanted < 0, stable=True).astype(jnp.int32)

    def one(t: Array, store: Array) -> Array:
        i, g = order[t // G], t % G
        page = lax.dynamic_slice(new, (i // C, g, i % C, 0, 0), (1, 1, 1, P, D))[:, :, 0]
        return lax.dynamic_update_slice(store, _beside(page, store),
                                        (i // C, g * (store.shape[1] // G) + wanted[i], 0, 0))

    return lax.fori_loop(0, (wanted >= 0).sum(dtype=jnp.int32) * G, one, store)


def copy_rows(into: Array, store: Array, rows: Array, places: Array, heads: int) -> Array:
    """`into` with rows `rows` (`i32[n]`) of `store` as rows `places`; those below 0 are dropped. Through the device, a
    head of a row at a time."""
    each = store.shape[1] // heads
    order = jnp.argsort(places < 0, stable=True).astype(jnp.int32)

    def one(t: Array, into: Array) -> Array:
        i, g = order[t // heads], t % heads * each
        head = _to_device(lax.dynamic_slice(store, (rows[i], g, 0, 0), (1, each, *store.shape[2:])))
        return lax.dynamic_update_slice(into, _beside(head, into), (places[i], g, 0, 0))

    return lax.fori_loop(0, (places >= 0).sum(dtype=jnp.int32) * heads, one, into)


@dataclasses.dataclass(frozen=True)
class HostRetrieval(Retrieval):
    """An `Offloaded` cache; where a text has no more than is read of it, a `Retrieving` one."""

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        far = [i not in self.skip and shape.sliding is None for i, shape in enumerate(shapes)]
        size = -(-capacity // self.page) * self.page
        if not any(far) or not self.sparse(size):
            return super().__call__(layers, batch, capacity, dtype, inputs)
        if jax.sharding.get_abstract_mesh().size > 1:
            raise ValueError(f"offload: got a mesh of {jax.sharding.get_abstract_mesh().size} devices; {self.name} "
                             "takes offload=True on one device")
        number = size // self.page
        each = min(BLOCK, number)
        ring = (-(-self.recent // self.page) + 2) * self.page
        kv: list[Array] = []
        digests: list[Any] = []
        pages: list[Array | None] = []
        for shape, away in zip(shapes, far, strict=True):
            one = jax.eval_shape(self.score.digest, jax.ShapeDtypeStruct((self.page, shape.width), dtype))
            kv.append(jnp.zeros((batch, shape.heads, ring if away else size, shape.both), dtype))
            digests.append(jnp.zeros((batch, shape.heads, number, *one.shape), dtype) if away else None)
            many = shape.heads * -(-number // each) * each
            pages.append(empty((batch, many, self.page, shape.both), jnp.dtype(dtype)) if away else None)
        return Offloaded(kv=tuple(kv), digests=tuple(digests), pages=tuple(pages), length=jnp.zeros(batch, jnp.int32),
                         given=inputs, widths=key_widths(shapes), shapes=shapes, kind=self)
