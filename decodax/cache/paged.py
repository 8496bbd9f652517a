"""PagedAttention: keys and values in pages of a pool that all rows share ("Efficient Memory Management for Large
Language Model Serving with PagedAttention", Kwon et al., 2023).

Each row has a table of its pages. Short rows take few pages, and samples of one prompt share its full pages. `select`
copies only the tables, and the last page of a row while it is not full: the first row that holds it keeps it, and every
other row gets a copy. A page is free if it is in no table. If the pool has no free page left, a row ends with
`Status.CAPACITY` when it has used up its last page and its share of the free pages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import own_entry
from decodax.cache.key_values import KeyValues, KVConfig, KVLayer, empty_kv, key_widths
from decodax.cache.lanes import attend_padded, attend_padded_cache, pad, paddings, stored
from decodax.common.options import Count, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, Layout, PyTree
from decodax.core.capabilities import AttendsAlone
from decodax.pallas_kernels.window_attention import Bias


@struct
class PagedCache(KeyValues, AttendsAlone):
    """A pool of pages, and for each row a table of its pages. `S` is the capacity of a row, rounded up to whole pages.

    Attributes:
        kv: a tuple with one array `f[N, G, P, d + e]` for each layer: `N` pages of `P` positions, the key and then the
            value of each position, and on TPUs perhaps zeros (`decodax.cache.lanes`).
        table: `i32[B, S / P]`; entry `i` is the page with positions `i P` to `i P + P - 1` of a row; -1: no page yet.
        length: `i32[B]`, number of tokens of each row that have been committed (written to the cache).
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        padding: static; the number of zeros after an entry of each layer.
    """

    kv: tuple[Array, ...]
    table: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    padding: tuple[int, ...] = static(default=())

    supports = frozenset({"trees", "subsets"})
    layout = Layout(by_row=False)

    @property
    def pages(self) -> int:
        return self.kv[0].shape[0] if self.kv else 0

    @property
    def page(self) -> int:
        return self.kv[0].shape[2] if self.kv else 1

    @property
    def capacity(self) -> int:
        return self.table.shape[1] * self.page

    def free(self) -> tuple[Array, Array]:
        """Returns the numbers of all pages with the free ones first, `i32[N]`, and the number of free pages,
        `i32[]`."""
        used = jnp.zeros(self.pages, bool).at[jnp.where(self.table >= 0, self.table, self.pages)].set(True, mode="drop")
        return jnp.argsort(used, stable=True).astype(jnp.int32), (~used).sum(dtype=jnp.int32)

    def _claim(self, wanted: Array) -> PagedCache:
        """Assigns free pages to the entries `wanted` (`bool[B, S / P]`) of the table. If there are too few, the last
        entries get -1."""
        order, free = self.free()
        rank = (jnp.cumsum(wanted.ravel(), dtype=jnp.int32) - 1).reshape(wanted.shape)
        page = jnp.where(rank < free, order[jnp.clip(rank, 0, self.pages - 1)], -1)
        return self.replace(table=jnp.where(wanted, page, self.table))

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        out = attend_padded(q, k, v, window, self.kv[layer], self.length, table=self.table, scale=scale,
                            sliding=sliding, softcap=softcap, bias=bias, sinks=sinks)
        return out, own_entry(q, k, v)

    def attend_cached(self, layer: int, q: Array, window: Any, *, scale: float) -> tuple[Array, Array]:
        return attend_padded_cache(q, window.positions, self.kv[layer], self.length, self.padded(layer),
                                   table=self.table, scale=scale)

    def commit(self, entries: Entries, slots: Array) -> PagedCache:
        if not self.kv:
            return self
        place = slots // self.page                                      # of the table; -1 stays -1
        touched = (place[:, :, None] == jnp.arange(self.table.shape[1], dtype=jnp.int32)).any(1)
        new = self._claim(touched & (self.table < 0))
        page = jnp.take_along_axis(new.table, jnp.maximum(place, 0), 1)
        page = jnp.where((slots >= 0) & (page >= 0), page, self.pages)  # beyond the pool: dropped
        put = lambda pool, x: pool.at[page, :, slots % self.page].set(x.astype(pool.dtype), mode="drop")
        kv = tuple(put(pool, stored(entry, pool)) for pool, entry in zip(self.kv, entries, strict=True))
        return new.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def select(self, rows: Array) -> PagedCache:
        new = self.replace(table=self.table[rows], length=self.length[rows],
                           given=jax.tree.map(lambda x: x[rows], self.given))
        if not self.kv:
            return new
        begun = new.length % self.page > 0
        again = jnp.tril(rows[:, None] == rows, -1).any(1)              # an earlier row comes from the same one
        place = jnp.arange(self.table.shape[1], dtype=jnp.int32) == (new.length // self.page)[:, None]
        wanted = place & (again & begun)[:, None] & (new.table >= 0)
        copies = new._claim(wanted)
        # only the pages that are being filled move: one for each row
        which = jnp.argmax(wanted, 1)[:, None]
        one = lambda table: jnp.take_along_axis(table, which, 1)[:, 0]
        to = jnp.where(wanted.any(1) & (one(copies.table) >= 0), one(copies.table), self.pages)
        copy = lambda pool: pool.at[to].set(pool[jnp.maximum(one(new.table), 0)], mode="drop")
        return copies.replace(kv=tuple(map(copy, self.kv)))

    def room(self, running: Array) -> Array | None:
        if not self.kv:
            return None
        _, free = self.free()
        rows = jnp.maximum(running.sum(dtype=jnp.int32), 1)
        own = (self.table >= 0).sum(1, dtype=jnp.int32)
        more = (free + rows - jnp.cumsum(running, dtype=jnp.int32)) // rows      # all free pages, as evenly as they go
        lost = own * self.page < self.length                            # a page was wanted and there was none
        return jnp.where(lost, 0, (own + more) * self.page - self.length)


@CACHES.register("paged", "Efficient Memory Management for Large Language Model Serving with PagedAttention",
                 "Kwon et al. 2023", family="prefix", guarantee="exact")
@dataclasses.dataclass(frozen=True)
class PagedConfig(KVConfig):
    """Keeps all tokens, in pages of a pool that all rows share; samples of a prompt share its full pages.

    For batches of rows of very different lengths, and for beam search, where copies of rows cost little.

    Attributes:
        pages: number of pages of the pool.
        page: number of positions in a page.
    """

    pages: Count = 2048
    page: Count = 16

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    def takes_latents(self) -> bool:
        return True

    def takes_choices(self) -> bool:
        return True

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        padding = paddings(shapes)
        return PagedCache(kv=tuple(map(pad, empty_kv(shapes, self.pages, self.page, dtype), padding)), given=inputs,
                          table=jnp.full((batch, -(-size // self.page)), -1, jnp.int32),
                          length=jnp.zeros(batch, jnp.int32), widths=key_widths(shapes), padding=padding)
