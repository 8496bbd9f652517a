"""Sparse caches whose pages are in host memory; a round fetches the pages that its queries choose.

The rules are those of `decodax.caches.sparse.pages`, and so are all results, but the device holds only digests and the
latest tokens. A page is copied to the host once, when it is full. During prefill, pages are fetched block by block, so
that the whole prompt is never on the device. Some layers are stored on the device entirely: those in `skip`, those with
a sliding window, and all layers if the text is no longer than what a query attends to.

The latest tokens are a ring: the token at position `p` is in slot `p % R`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KVLayer
from decodax.caches.sparse.pages import PageCache, PageConfig
from decodax.common.struct import struct
from decodax.core.cache import Entries, Layout, PyTree
from decodax.core.host_memory import PAGES, empty_pages, fetch, permute_rows, run_of, store
from decodax.pallas_kernels.window_attention import merge, prefix_attention, window_attention_lse

AT_ONCE = 512
"""Number of tokens of a row that are fetched together during prefill."""


@struct
class HostPageCache(PageCache):
    """Full pages in host memory, with digests and the latest tokens on the device.

    Attributes:
        kv: for each layer `f[B, G, R, d + e]`, the ring of the latest tokens; if `pages` is None, `f[B, G, S, d + e]`,
            all tokens.
        pages: for each layer `f[B, G, N, P, d + e]` in host memory; None: the layer is stored in `kv`.
        length, given, shapes, kind, digests: see `PageCache`.
    """

    pages: tuple[Array | None, ...]

    @property
    def layout(self) -> Layout:
        return Layout(hosted=self.pages, specs=dict(pages=jax.tree.map(lambda x: PAGES, self.pages)))

    def select(self, rows: Array) -> HostPageCache:
        if rows.shape != self.length.shape:
            return super().select(rows)
        # rows move in place, as far as the longest one has pages, and not at all if each row goes on from itself
        stays = (rows == jnp.arange(rows.shape[0], dtype=rows.dtype)).all()
        full = jnp.where(stays, 0, self.length.max() // self.kind.page_size)
        rest = jax.tree.map(lambda x: x[rows], self.replace(pages=()))
        return rest.replace(pages=jax.tree.map(lambda x: permute_rows(x, rows, full), self.pages))

    def attend_all(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> Array:
        pages, P = self.pages[layer], self.kind.page_size
        if pages is None:
            return super().attend_all(layer, q, k, v, window, **options)
        given = q, k, v, window.visible(), window.positions
        full = self.length // P         # the tokens after full pages are in the ring alone

        def to(kv: Array, count: Array) -> tuple[Array, Array]:
            """Returns attention to the first `count` (`i32[B]`) of some tokens `f[B, G, n, d + e]`."""
            # memory that was not written may hold NaN, which a weight of 0 does not make 0
            kv = jnp.where((jnp.arange(kv.shape[2]) < count[:, None])[:, None, :, None], kv, 0)
            out, lse = prefix_attention(q, window.positions, kv, count, scale=options["scale"])
            return out.astype(jnp.float32), lse

        def block(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            kv = run_of(pages, i * part, part)
            kv = kv.reshape(*kv.shape[:2], part * P, -1)
            return merge(found, to(kv, jnp.clip((full - i * part) * P, 0, part * P)))

        part = run(P, pages.shape[2])
        out, lse = window_attention_lse(*given, key_positions=window.key_positions, **options)
        latest = to(self.latest(layer, full * P, P), self.length - full * P)
        found = merge((out.astype(jnp.float32), lse), latest)
        return lax.fori_loop(0, -(-full.max() // part), block, found)[0].astype(q.dtype)

    def pages_of(self, layer: int, pages: Array, found: Array) -> Array:
        held = self.pages[layer]
        assert held is not None
        some = fetch(held, jnp.where(found, pages, 0))
        some = jnp.where(found[..., None, None], some, 0)       # as above
        return some.reshape(*some.shape[:2], -1, some.shape[-1])

    def latest(self, layer: int, first: Array, count: int) -> Array:
        held = self.kv[layer]
        slots = (first[:, None] + jnp.arange(count, dtype=jnp.int32)) % held.shape[2]
        return jnp.take_along_axis(held, slots[:, None, :, None], 2)

    def commit(self, entries: Entries, slots: Array) -> HostPageCache:
        if not self.kv:
            return self
        length, full = self.filled(slots)
        pages: list[Array | None] = []
        held, digests = [], []
        for layer, (entry, old, ring) in enumerate(zip(entries, self.pages, self.kv, strict=True)):
            new = entry.both.astype(ring.dtype)
            if old is None:
                pages.append(None)
                held.append(write(ring, new, slots))
                digests.append(self.digests[layer])
                continue
            R = ring.shape[2]
            filled = self._page_tokens(ring, new, slots, full)
            pages.append(store(old, filled, full))
            digests.append(self.digested(layer, full, filled[..., :self.shapes[layer].width]))
            latest = (slots >= 0) & (slots >= length[:, None] - R)
            held.append(write(ring, new, jnp.where(latest, slots % R, -1)))
        return self.replace(pages=tuple(pages), kv=tuple(held), digests=tuple(digests), length=length)

    def _page_tokens(self, ring: Array, new: Array, slots: Array, full: Array) -> Array:
        """Returns the tokens of the pages `full` (`i32[B, n]`), `f[B, G, n, P, d + e]`. They come from the ring, and
        from the new tokens `f[B, W, G, d + e]` at positions `slots` (`i32[B, W]`)."""
        (B, W), P, R = slots.shape, self.kind.page_size, ring.shape[2]
        after = slots - self.length[:, None]
        node = jnp.zeros((B, W), jnp.int32).at[
            jnp.arange(B, dtype=jnp.int32)[:, None], jnp.where(after >= 0, after, W)].set(
            jnp.arange(W, dtype=jnp.int32), mode="drop")        # of each position after those in the ring
        at = (full[..., None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(B, -1)
        after = jnp.clip(at - self.length[:, None], 0, W - 1)
        place = jnp.where(at < self.length[:, None], at % R, R + jnp.take_along_axis(node, after, 1))
        both = jnp.concatenate([ring, new.swapaxes(1, 2)], 2)
        return jnp.take_along_axis(both, place[:, None, :, None], 2).reshape(B, ring.shape[1], -1, P, ring.shape[3])


def run(page: int, pages: int) -> int:
    """Returns the number of pages of a row that are fetched together during prefill. `page` is the number of tokens of
    a page, `pages` the maximum result."""
    return min(max(AT_ONCE // page, 1), pages)


def empty_host_pages(kind: PageConfig, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any,
                     inputs: PyTree) -> HostPageCache:
    """Returns an empty cache; see `PaperConfig.empty`."""
    size, P = kind.rounded(size), kind.page_size
    count = size // P
    count = -(-count // run(P, count)) * run(P, count) if count else 0
    pages: list[Array | None] = []
    held = []
    for layer, shape in enumerate(shapes):
        stays = kind.keeps_dense(layer, shape) or not kind.is_sparse(size)
        pages.append(None if stays else empty_pages(batch, shape.heads, count, P, shape.both, dtype=dtype))
        held.append(jnp.zeros((batch, shape.heads, size if stays else kind.recent + P, shape.both), dtype))
    return HostPageCache(kv=tuple(held), length=jnp.zeros(batch, jnp.int32), given=inputs, shapes=shapes, kind=kind,
                         digests=kind.digests(shapes, batch, size, dtype), pages=tuple(pages))
