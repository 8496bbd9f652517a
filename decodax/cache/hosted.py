"""Arrays in the memory of the host: what a round reads of them travels to the device, and nothing else.

JAX says of each array in which memory it lies, `jax.memory.Space`, and a program may take one from the host's memory and
hand it on there. Operations are for arrays of the device, so a program does three things with one of the host: it slices
it and sends the slice to the device, writes a slice of the device's into it, and carries it through its loops. XLA makes
a transfer of each slice. On a CPU both memories are the same one.

A slice that XLA's TPU compiler takes (libtpu 0.0.51) is cut along one leading axis, or two of them, and whole in what is
behind; a gather of the host's memory does not compile there. So an array of the host is pages `[B, N, ...]`, and what is
wanted of it comes page by page, a few at once.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, memory
from jax.sharding import PartitionSpec as P

from decodax.axes import DATA, MODEL, shardwise

PAGES, HEADS = P(DATA, None, MODEL), P(DATA, MODEL)

AT_ONCE = 8
"""Pages that are under way together, and those of a row that move together where rows do."""


def on_host(x: Any) -> bool:
    """Whether an array, or one that is traced, lies in the host's memory."""
    return getattr(jax.typeof(x), "memory_space", None) == memory.Space.Host


def to_host(x: Array) -> Array:
    """The same array in the host's memory."""
    return jax.device_put(x, memory.Space.Host)


def to_device(x: Array) -> Array:
    """The same array in the device's memory."""
    return jax.device_put(x, memory.Space.Device)


def empty_pages(*shape: int, dtype: jax.typing.DTypeLike) -> Array:
    """Pages `f[B, N, ...]` of the host that nothing was written to: on a TPU what they hold may be anything."""
    # one write is enough for XLA to reserve the memory there; zeros as such would be made on the device first
    one = to_host(jnp.zeros((1, 1, *shape[2:]), dtype))
    return lax.dynamic_update_slice(to_host(jnp.zeros(shape, dtype)), one, [0] * len(shape))


def fetch(pages: Array, at: Array) -> Array:
    """Of pages `f[B, N, G, P, D]` of the host those at `at[b, g]` (`i32[B, G, n]`) of each row and head: `f[B, G, n, P,
    D]` on the device. Nothing else of them travels."""
    return shardwise(_fetch, (PAGES, HEADS), HEADS, pages, at)


def _fetch(pages: Array, at: Array) -> Array:
    B, N, G, *page = pages.shape
    flat = pages.reshape(B * N * G, *page)
    row, head = jnp.arange(B, dtype=jnp.int32)[:, None, None], jnp.arange(G, dtype=jnp.int32)[:, None]
    where = ((row * N + at) * G + head).reshape(-1)
    few = math.gcd(where.shape[0], AT_ONCE)

    def some(where: Array) -> Array:
        return jnp.concatenate([to_device(lax.dynamic_slice_in_dim(flat, i, 1)) for i in where])

    return lax.map(some, where.reshape(-1, few)).reshape(*at.shape, *page)


def store(pages: Array, new: Array, at: Array) -> Array:
    """Pages `f[B, N, G, P, D]` of the host with `new[b, i]` (`f[B, n, G, P, D]`) as page `at[b, i]` (`i32[B, n]`) of row
    `b`; -1 drops it, and what is dropped does not travel."""
    return shardwise(_store, (PAGES, PAGES, P(DATA)), PAGES, pages, new, at)


def _store(pages: Array, new: Array, at: Array) -> Array:
    B, n = at.shape
    at, new = at.reshape(-1), new.reshape(B * n, 1, 1, *new.shape[2:]).astype(pages.dtype)
    order = jnp.argsort(at < 0, stable=True).astype(jnp.int32)     # those that are written come first

    def put(i: Array, pages: Array) -> Array:
        one = order[i]
        page = to_host(lax.dynamic_index_in_dim(new, one, 0, keepdims=False))
        return lax.dynamic_update_slice(pages, page, (one // n, at[one], 0, 0, 0))

    return lax.fori_loop(0, (at >= 0).sum(dtype=jnp.int32), put, pages)


def run_of(pages: Array, start: Array, count: int) -> Array:
    """Of each row so many pages from `start` (`i32[]`) on, on the device: `f[B, count, ...]`."""
    one = lambda pages, start: to_device(lax.dynamic_slice_in_dim(pages, start, count, 1))
    return shardwise(one, (PAGES, P()), PAGES, pages, start)


def take_rows(x: Array, rows: Array) -> Array:
    """`x[rows]`, of an array in either memory; of one in the host's a new one there, through the device in parts."""
    if not on_host(x):
        return x[rows]
    part, n = _part(x), rows.shape[0]

    def move(i: Array, out: Array) -> Array:
        row, start = i // (x.shape[1] // part), i % (x.shape[1] // part) * part
        some = to_device(_slice(x, rows[row], start, part))
        return lax.dynamic_update_slice(out, to_host(some), (row, start, *[0] * (x.ndim - 2)))

    return lax.fori_loop(0, n * (x.shape[1] // part), move, empty_pages(n, *x.shape[1:], dtype=x.dtype))


def put_rows(x: Array, new: Array, rows: Array) -> Array:
    """`x` with the rows of `new` in the places `rows` (`i32[B']`); a row whose place is beyond the end is left out."""
    if not on_host(x):
        return x.at[rows].set(new, mode="drop")
    part = _part(x)
    parts = x.shape[1] // part
    order = jnp.argsort(rows >= x.shape[0], stable=True).astype(jnp.int32)

    def move(i: Array, x: Array) -> Array:
        row, start = order[i // parts], i % parts * part
        some = to_device(_slice(new, row, start, part))
        return lax.dynamic_update_slice(x, to_host(some), (rows[row], start, *[0] * (x.ndim - 2)))

    return lax.fori_loop(0, (rows < x.shape[0]).sum(dtype=jnp.int32) * parts, move, x)


def choose_rows(mask: Array, new: Array, old: Array) -> Array:
    """The rows of `new` where `mask` (`bool[B]`) is true, and those of `old` elsewhere."""
    if on_host(old):
        return put_rows(old, new, jnp.where(mask, jnp.arange(len(mask), dtype=jnp.int32), len(mask)))
    return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def permute_rows(x: Array, rows: Array, pages: Array) -> Array:
    """Row `i` of pages of the host goes on from row `rows[i]` (`i32[B]`), where the pages lie, of which the first `pages`
    (`i32[]`) are moved."""
    part = _part(x)

    def move(i: Array, x: Array) -> Array:
        some = run_of(x, i * part, part)[rows]
        return lax.dynamic_update_slice_in_dim(x, to_host(some), i * part, 1)

    return lax.fori_loop(0, -(-pages // part), move, x)


def _part(x: Array) -> int:
    return math.gcd(x.shape[1], AT_ONCE)


def _slice(x: Array, row: Array, start: Array, size: int) -> Array:
    return lax.dynamic_slice(x, (row, start, *[0] * (x.ndim - 2)), (1, size, *x.shape[2:]))
