"""Arrays in the memory of the host: what a round reads of them travels to the device, and nothing else.

JAX says of each array in which memory it lies, `jax.memory.Space`, and a program may take one from the host's memory
and hand it on there. Operations are for arrays of the device. So a program slices an array of the host and sends the
slice to the device, writes a slice from the device into it, and carries it through its loops; XLA makes a transfer of
each slice. On a CPU both memories are the same one.

XLA's TPU compiler (libtpu 0.0.51) takes slices that are cut along one or two leading axes and whole behind them. It
does not take a gather of the host's memory. So an array of the host is pages, `f[B, G, N, P, D]`: of each row and head,
so many of `P` tokens. A page is fetched by a slice of its own, a few of them at once.
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
"""Pages that are under way together, and those of a head that move together where rows do."""


def to_host(x: Array) -> Array:
    """The same array in the host's memory."""
    return jax.device_put(x, memory.Space.Host)


def to_device(x: Array) -> Array:
    """The same array in the device's memory."""
    return jax.device_put(x, memory.Space.Device)


def empty_pages(*shape: int, dtype: jax.typing.DTypeLike) -> Array:
    """Pages `f[B, G, N, P, D]` of the host that nothing was written to: on a TPU what they hold may be anything."""
    # one write is enough for XLA to reserve the memory there; zeros as such would be made on the device first
    one = to_host(jnp.zeros((1, shape[1], 1, *shape[3:]), dtype))
    return lax.dynamic_update_slice(to_host(jnp.zeros(shape, dtype)), one, [0] * len(shape))


def fetch(pages: Array, at: Array) -> Array:
    """Of pages `f[B, G, N, P, D]` of the host those at `at` (`i32[B, G, n]`): `f[B, G, n, P, D]` on the device. No
    other page travels."""
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
    """Pages `f[B, G, N, P, D]` of the host with `new[b, :, i]` (`f[B, G, n, P, D]`) as page `at[b, i]` (`i32[B, n]`) of
    row `b`; -1 drops it. What is dropped does not travel."""
    return shardwise(_store, (PAGES, PAGES, ROWS), PAGES, pages, new, at)


def _store(pages: Array, new: Array, at: Array) -> Array:
    n, at, new = at.shape[1], at.reshape(-1), new.astype(pages.dtype)
    order = jnp.argsort(at < 0, stable=True).astype(jnp.int32)     # those that are written come first

    def put(i: Array, pages: Array) -> Array:
        row, page = order[i] // n, at[order[i]]
        return _update(pages, to_host(_slice(new, row, order[i] % n, 1)), row, page)

    return lax.fori_loop(0, (at >= 0).sum(dtype=jnp.int32), put, pages)


def run_of(pages: Array, start: Array, count: int) -> Array:
    """Of each row and head so many pages from `start` (`i32[]`) on, on the device: `f[B, G, count, P, D]`."""
    one = lambda pages, start: to_device(lax.dynamic_slice_in_dim(pages, start, count, 2))
    return shardwise(one, (PAGES, P()), PAGES, pages, start)


def take_rows(x: Array, rows: Array) -> Array:
    """`x[rows]`, of any array; of pages of the host new ones there, which travel through the device part by part."""
    if not on_host(x):
        return x[rows]
    empty = empty_pages(rows.shape[0], *x.shape[1:], dtype=x.dtype)
    return _moved(empty, x, rows.shape[0], lambda i: (rows[i], i))


def put_rows(x: Array, new: Array, rows: Array) -> Array:
    """Any array with the rows of `new` in the places `rows` (`i32[B']`); one whose place is beyond the end is left
    out."""
    if not on_host(x):
        return x.at[rows].set(new, mode="drop")
    order = jnp.argsort(rows >= x.shape[0], stable=True).astype(jnp.int32)
    return _moved(x, new, (rows < x.shape[0]).sum(dtype=jnp.int32), lambda i: (order[i], rows[order[i]]))


def choose_rows(mask: Array, new: Array, old: Array) -> Array:
    """The rows of `new` where `mask` (`bool[B]`) is true, and those of `old` elsewhere; of any arrays."""
    if on_host(old):
        return put_rows(old, new, jnp.where(mask, jnp.arange(len(mask), dtype=jnp.int32), len(mask)))
    return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def permute_rows(x: Array, rows: Array, count: Array) -> Array:
    """Pages of the host whose row `i` goes on from row `rows[i]` (`i32[B]`). They stay where they lie; of each head the
    first `count` (`i32[]`) are moved."""
    part = math.gcd(x.shape[2], AT_ONCE)

    def move(i: Array, x: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, to_host(run_of(x, i * part, part)[rows]), i * part, 2)

    return lax.fori_loop(0, -(-count // part), move, x)


def _moved(to: Array, of: Array, rows: Array | int, places: Callable[[Array], tuple[Array, Array]]) -> Array:
    """`to` with so many rows of `of`: the `i`-th is the first of `places(i)`, and goes to the second."""
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
