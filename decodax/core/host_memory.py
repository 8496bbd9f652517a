"""Arrays in host memory, of which a program copies to the device only the parts that it needs.

JAX records the memory of each array (`jax.memory.Space`). A program may take an array in host memory as an argument and
return it there, but operations need arrays on the device. So a program slices a host array and sends the slice to the
device, or writes a slice from the device into it. XLA makes a transfer of each slice. On a CPU both memories are the
same.

XLA's TPU compiler (libtpu 0.0.51) accepts slices of host memory that are cut along one or two leading axes and complete
along the others; it accepts no gather. So a host array consists of pages, `f[B, G, N, P, D]`: `N` pages of `P` tokens
for each row and head. Each page is fetched by a slice of its own, a few of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax, memory
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from decodax.common.axes import DATA, MODEL, on_host, shardwise

PAGES, ROWS = P(DATA, MODEL), P(DATA)

AT_ONCE = 8
"""Number of pages that are transferred together."""


def to_host(x: Array) -> Array:
    """Moves an array to host memory."""
    return jax.device_put(x, memory.Space.Host)


def to_device(x: Array) -> Array:
    """Moves an array to device memory."""
    return jax.device_put(x, memory.Space.Device)


def empty_pages(*shape: int, dtype: jax.typing.DTypeLike) -> Array:
    """Allocates pages of the shape `shape`, `f[B, G, N, P, D]`, in host memory: `N` pages of `P` tokens for each row
    and head. They are zeros, except on a TPU, where their values are undefined."""
    # one write is enough for XLA to reserve the memory there; zeros as such would be made on the device first
    one = to_host(jnp.zeros((1, shape[1], 1, *shape[3:]), dtype))
    return lax.dynamic_update_slice(to_host(jnp.zeros(shape, dtype)), one, [0] * len(shape))


def fetch(pages: Array, at: Array) -> Array:
    """Copies the pages at indices `at` (`i32[B, G, n]`) of `pages` (`f[B, G, N, P, D]`, in host memory) to the device:
    `f[B, G, n, P, D]`. No other page is transferred."""
    return shardwise(_fetch, (PAGES, PAGES), PAGES, pages, at)


def _fetch(pages: Array, at: Array) -> Array:
    B, G, N, *page = pages.shape
    flat = pages.reshape(B * G * N, *page)
    where = (at.reshape(B * G, -1) + N * jnp.arange(B * G, dtype=jnp.int32)[:, None]).reshape(-1)
    few = math.gcd(where.shape[0], AT_ONCE)

    def some(where: Array) -> Array:
        # a consumer that wants another layout would have the compiler cut the pages in that one
        whole = Layout(major_to_minor=tuple(range(1 + len(page))))
        return with_layout_constraint(jnp.concatenate(
            [to_device(lax.dynamic_slice_in_dim(flat, i, 1)) for i in where]), whole)

    return lax.map(some, where.reshape(-1, few)).reshape(*at.shape, *page)


def store(pages: Array, new: Array, at: Array) -> Array:
    """Writes `new[b, :, i]` (`f[B, G, n, P, D]`, on the device) as page `at[b, i]` (`i32[B, n]`) of row `b` into
    `pages`, `f[B, G, N, P, D]`, in host memory. -1 drops a page without a transfer."""
    return shardwise(_store, (PAGES, PAGES, ROWS), PAGES, pages, new, at)


def _store(pages: Array, new: Array, at: Array) -> Array:
    n, at, new = at.shape[1], at.reshape(-1), new.astype(pages.dtype)
    order = jnp.argsort(at < 0, stable=True).astype(jnp.int32)     # those that are written come first

    def put(i: Array, pages: Array) -> Array:
        row, page = order[i] // n, at[order[i]]
        return _update(pages, to_host(_slice(new, row, order[i] % n, 1)), row, page)

    return lax.fori_loop(0, (at >= 0).sum(dtype=jnp.int32), put, pages)


def run_of(pages: Array, start: Array, count: int) -> Array:
    """Copies `count` consecutive pages of each row and head, from index `start` (`i32[]`) on, to the device: `f[B, G,
    count, P, D]`."""
    one = lambda pages, start: to_device(lax.dynamic_slice_in_dim(pages, start, count, 2))
    return shardwise(one, (PAGES, P()), PAGES, pages, start)


def take_rows(x: Array, rows: Array) -> Array:
    """Returns `x[rows]` for any array. For pages in host memory the result is new pages there, copied through the
    device part by part."""
    if not on_host(x):
        return x[rows]
    empty = empty_pages(rows.shape[0], *x.shape[1:], dtype=x.dtype)
    return _moved(empty, x, rows.shape[0], lambda i: (rows[i], i))


def put_rows(x: Array, new: Array, rows: Array) -> Array:
    """Returns `x` with the rows of `new` at the places `rows` (`i32[B']`), for any array. A row whose place is beyond
    the end is dropped."""
    if not on_host(x):
        return x.at[rows].set(new, mode="drop")
    order = jnp.argsort(rows >= x.shape[0], stable=True).astype(jnp.int32)
    return _moved(x, new, (rows < x.shape[0]).sum(dtype=jnp.int32), lambda i: (order[i], rows[order[i]]))


def choose_rows(mask: Array, new: Array, old: Array) -> Array:
    """Returns the rows of `new` where `mask` (`bool[B]`) is True, and those of `old` elsewhere, for any arrays."""
    if on_host(old):
        return put_rows(old, new, jnp.where(mask, jnp.arange(len(mask), dtype=jnp.int32), len(mask)))
    return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def permute_rows(x: Array, rows: Array, count: Array) -> Array:
    """Returns pages in host memory whose row `i` is the former row `rows[i]` (`i32[B]`), in the same buffer. Of each
    head, only the first `count` (`i32[]`) pages are moved."""
    part = math.gcd(x.shape[2], AT_ONCE)

    def move(i: Array, x: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, to_host(run_of(x, i * part, part)[rows]), i * part, 2)

    return lax.fori_loop(0, -(-count // part), move, x)


def _moved(to: Array, of: Array, rows: Array | int, places: Callable[[Array], tuple[Array, Array]]) -> Array:
    """Returns `to` with `rows` rows of `of` copied into it; `places(i)` gives the source and target index of the
    `i`-th."""
    part = math.gcd(of.shape[2], AT_ONCE)
    parts = of.shape[2] // part

    def move(i: Array, to: Array) -> Array:
        row, place = places(i // parts)
        return _update(to, to_host(to_device(_slice(of, row, i % parts * part, part))), place, i % parts * part)

    return lax.fori_loop(0, rows * parts, move, to)


def _slice(pages: Array, row: Array, start: Array, count: int) -> Array:
    size = (1, pages.shape[1], count, *pages.shape[3:])
    return lax.dynamic_slice(pages, (row, 0, start, *[0] * (pages.ndim - 3)), size)


def _update(pages: Array, new: Array, row: Array, start: Array) -> Array:
    return lax.dynamic_update_slice(pages, new, (row, 0, start, *[0] * (pages.ndim - 3)))
