"""Pages in the memory of the host, of which a round fetches those that its queries choose.

This is a cache of `decodax.caches.sparse.retrieval` of which the device holds digests and the latest tokens alone.
Queries choose what they choose there, so all results are the same. A page travels to the host once, when it is full. A
prompt is read behind pages that come from the host block by block, so that no whole prompt ever lies on the device.
Layers that read everything in each round stay on the device: those that the policy skips, those that see a sliding
window, and all of them where the text is within what a query reads.

The latest tokens are a ring: the token at position `p` lies in slot `p % R`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KVLayer
from decodax.caches.sparse.retrieval import Choosing, Retrieval
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.host_memory import PAGES, empty_pages, fetch, permute_rows, run_of, store
from decodax.pallas_kernels.window_attention import merge, prefix_attention, window_attention_lse

AT_ONCE = 512
"""Tokens of a row that come from the host together while a prompt is read."""


@struct
class Offloaded(Choosing):
    """Everything: whole pages in the host's memory, digests and the latest tokens on the device.

    Attributes:
        pages: a tuple of one `f[B, G, N, P, d + e]` a layer in the host's memory; None where all of it is in `held`.
        held: a tuple of one `f[B, G, R, d + e]` a layer, the ring of the latest tokens; where `pages` is None,
            everything, `f[B, G, S, d + e]`.
        The others: see `Choosing`.
    """

    pages: tuple[Array | None, ...]
    held: tuple[Array, ...]
    digests: tuple[Array, ...]
    length: Array
    given: PyTree
    shapes: tuple[KVLayer, ...] = static()
    kind: Retrieval = static()

    @property
    def hosted(self) -> PyTree:
        return self.pages

    def specs(self) -> PyTree:
        return super().specs().replace(pages=jax.tree.map(lambda x: PAGES, self.pages))

    def succeed(self, rows: Array) -> Offloaded:
        # where they lie, as far as the longest row has pages, and not at all where each row goes on from itself
        stays = (rows == jnp.arange(rows.shape[0], dtype=rows.dtype)).all()
        full = jnp.where(stays, 0, self.length.max() // self.kind.page)
        rest = jax.tree.map(lambda x: x[rows], self.replace(pages=()))
        return rest.replace(pages=jax.tree.map(lambda x: permute_rows(x, rows, full), self.pages))

    def _whole(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> Array:
        pages, P = self.pages[layer], self.kind.page
        given = q, k, v, window.visible(), window.positions
        if pages is None:
            return window_attention_lse(*given, self.held[layer], self.length, **options)[0]
        self.kind.refuse(options["softcap"], options["bias"])
        full = self.length // P         # pages; what is behind them only the ring holds

        def to(kv: Array, count: Array) -> tuple[Array, Array]:
            """Attention to the first `count` (`i32[B]`) of some tokens `f[B, G, n, d + e]`."""
            # others may be anything, and no number times a weight of 0 is 0
            kv = jnp.where((jnp.arange(kv.shape[2]) < count[:, None])[:, None, :, None], kv, 0)
            out, lse = prefix_attention(q, window.positions, kv, count, scale=options["scale"])
            return out.astype(jnp.float32), lse

        def block(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            kv = run_of(pages, i * part, part)
            kv = kv.reshape(*kv.shape[:2], part * P, -1)
            return merge(found, to(kv, jnp.clip((full - i * part) * P, 0, part * P)))

        part = run(P, pages.shape[2])
        out, lse = window_attention_lse(*given, **options)
        latest = to(self._latest(layer, full * P, P), self.length - full * P)
        found = merge((out.astype(jnp.float32), lse), latest)
        return lax.fori_loop(0, -(-full.max() // part), block, found)[0].astype(q.dtype)

    def _pages(self, layer: int, chosen: Array, found: Array) -> Array:
        pages = self.pages[layer]
        assert pages is not None
        some = fetch(pages, jnp.where(found, chosen, 0))
        some = jnp.where(found[..., None, None], some, 0)       # as above
        return some.reshape(*some.shape[:2], -1, some.shape[-1])

    def _latest(self, layer: int, first: Array, count: int) -> Array:
        held = self.held[layer]
        slots = (first[:, None] + jnp.arange(count, dtype=jnp.int32)) % held.shape[2]
        return jnp.take_along_axis(held, slots[:, None, :, None], 2)

    def commit(self, entries: Entries, slots: Array) -> Offloaded:
        if not self.held:
            return self
        length, full = self._grown(slots)
        pages: list[Array | None] = []
        held, digests = [], []
        for layer, (entry, old, ring) in enumerate(zip(entries, self.pages, self.held, strict=True)):
            new = jnp.concatenate(entry, -1).astype(ring.dtype)
            if old is None:
                pages.append(None)
                held.append(write(ring, new, slots))
                digests.append(self.digests[layer])
                continue
            R = ring.shape[2]
            filled = self._filled(ring, new, slots, full)
            pages.append(store(old, filled, full))
            digests.append(self._digested(layer, full, filled[..., :self.shapes[layer].width]))
            latest = (slots >= 0) & (slots >= length[:, None] - R)
            held.append(write(ring, new, jnp.where(latest, slots % R, -1)))
        return self.replace(pages=tuple(pages), held=tuple(held), digests=tuple(digests), length=length)

    def _filled(self, ring: Array, new: Array, slots: Array, full: Array) -> Array:
        """The pages `full` (`i32[B, n]`), of what the ring held and what comes, `f[B, W, G, d + e]` at `slots`: `f[B,
        G, n, P, d + e]`."""
        (B, W), P, R = slots.shape, self.kind.page, ring.shape[2]
        behind = slots - self.length[:, None]
        node = jnp.zeros((B, W), jnp.int32).at[
            jnp.arange(B, dtype=jnp.int32)[:, None], jnp.where(behind >= 0, behind, W)].set(
            jnp.arange(W, dtype=jnp.int32), mode="drop")        # of each position behind what was held
        at = (full[..., None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(B, -1)
        behind = jnp.clip(at - self.length[:, None], 0, W - 1)
        place = jnp.where(at < self.length[:, None], at % R, R + jnp.take_along_axis(node, behind, 1))
        both = jnp.concatenate([ring, new.swapaxes(1, 2)], 2)
        return jnp.take_along_axis(both, place[:, None, :, None], 2).reshape(B, ring.shape[1], -1, P, ring.shape[3])


def run(page: int, pages: int) -> int:
    """How many of a row's pages, of so many tokens each, come together while a prompt is read."""
    return min(max(AT_ONCE // page, 1), pages)


@dataclasses.dataclass(frozen=True)
class OffloadedRetrieval(Retrieval):
    """An `Offloaded` cache; see `Retrieval`."""

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        size, parts = self.parts(layers, batch, capacity, dtype, inputs)
        count = size // self.page
        count = -(-count // run(self.page, count)) * run(self.page, count) if count else 0
        pages: list[Array | None] = []
        held = []
        for layer, shape in enumerate(parts["shapes"]):
            stays = layer in self.skip or shape.sliding is not None or not self.sparse(size)
            pages.append(None if stays else empty_pages(batch, shape.heads, count, self.page, shape.both, dtype=dtype))
            slots = size if stays else self.recent + self.page
            held.append(jnp.zeros((batch, shape.heads, slots, shape.both), dtype))
        return Offloaded(pages=tuple(pages), held=tuple(held), **parts)
