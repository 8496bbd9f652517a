"""Packed windows: layers that work on each token by itself skip the padding nodes of a window.

All rows of a window have the width of the widest one, but their drafts or prompt parts differ in length. Only attention
needs the rectangular form (EMS-SD: Ni et al., 2024, who concatenate the tokens of all rows and expand them only for
attention).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import ROWS
from decodax.core.cache import Cache
from decodax.core.window import Window

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Packing:
    """A hint (`Window.hints`): bounds on the number of live nodes in a window. A model may then compute the live nodes
    alone, in the smallest of the given sizes that holds them. A model that does not know the hint computes all nodes.

    Attributes:
        sizes: static; numbers of nodes, in ascending order. Each gets a compiled branch of its own.
        bounded: True if there are never more live nodes than the last of `sizes`. If False, a window with more is
            computed in full.
        tail: static; `(count, rows)`: at most `rows` rows have live nodes after the first `count` ones. Such a row has
            no live node among the first `count`, so its nodes attend to the cache and to each other only; the other
            rows skip attention there. None: any node may be live.
    """

    sizes: tuple[int, ...]
    bounded: bool = False
    tail: tuple[int, int] | None = None

    def run(self, live: Array, packed: Callable[[int], T], whole: Callable[[], T]) -> T:
        """Returns `packed(size)` for the smallest size that holds the live nodes (`live` is `bool[B, W]`), or `whole()`
        if there is none. It also returns `whole()` if rows are split over several devices, since packing would move
        data between them."""
        mesh = jax.sharding.get_abstract_mesh()
        if any(mesh.shape.get(name, 1) > 1 and name not in mesh.manual_axes for name in ROWS):
            return whole()
        sizes = [size for size in self.sizes if size < live.size]
        ways: list[Callable[[], T]] = [functools.partial(packed, size) for size in sizes]
        if not (self.bounded and len(sizes) == len(self.sizes)):
            ways.append(whole)
        if len(ways) == 1:
            return ways[0]()
        which = (live.sum(dtype=jnp.int32) > jnp.array(sizes, jnp.int32)).sum(dtype=jnp.int32)
        return lax.switch(jnp.minimum(which, len(ways) - 1), ways)


jax.tree_util.register_dataclass(Packing, [], ["sizes", "bounded", "tail"])


@dataclasses.dataclass(frozen=True)
class PackedWindow:
    """The live nodes of all rows of a window, concatenated to one row of `T` nodes, so that the model computes only
    these. It exists only inside one trace.

    Attributes:
        window: the window with all nodes.
        count: number of first nodes of each row that may be live in any row.
        rows: `i32[R]`, the rows with live nodes after the first `count` ones, padded with indices beyond the batch;
            None: there are none.
        nodes: `i32[T]`, the index of each packed node among the `B * count + R * (W - count)` candidates: the first
            nodes of all rows, then the later nodes of `rows`.
        places: the index of each candidate among the packed nodes; arbitrary for dead nodes.
    """

    window: Window
    count: int
    rows: Array | None
    nodes: Array
    places: Array

    @classmethod
    def of(cls, window: Window, packing: Packing, size: int) -> PackedWindow:
        """Packs the live nodes of `window` into `size` places. `size` must be at least their number, as in
        `Packing.run`; `packing` is the hint of the window."""
        count, rows = window.width, None
        if packing.tail is not None:
            count, most = packing.tail
            reads = window.live[:, count:].any(1)
            rows = jnp.nonzero(reads, size=most, fill_value=len(reads))[0].astype(jnp.int32)
        self = cls(window, count, rows, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32))
        # a row that stands for none repeats the last one
        behind = None if rows is None else (rows < window.tokens.shape[0])[:, None]
        live = self._flat(window.live, behind)
        places = jnp.clip(jnp.cumsum(live, dtype=jnp.int32) - 1, 0, size - 1)
        nodes = jnp.nonzero(live, size=size, fill_value=0)[0].astype(jnp.int32)
        return dataclasses.replace(self, nodes=nodes, places=places)

    def pack(self, x: Array) -> Array:
        """Gathers the packed nodes: `[B, W, ...]` to `[1, T, ...]`."""
        return self._flat(x)[self.nodes][None]

    def unpack(self, x: Array) -> Array:
        """Moves packed values `[1, T, ...]` back to their places in the window, `[B, W, ...]`. Values at dead nodes are
        undefined."""
        return self._widen(*self._parts(x))

    def attend(self, cache: Cache) -> Callable[..., tuple[Array, Any]]:
        """Returns a function that replaces `cache.attend`: it takes packed queries, keys and values `[1, T, ...]`, and
        returns the packed output and the unpacked entries of the window."""
        first = self.window.part(0, self.count)
        if self.rows is not None:
            at = jnp.minimum(self.rows, len(first.tokens) - 1)
            some, tail = cache.select(at), self.window.select(at).part(self.count, self.window.width)

        def attend(layer: int, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
            qs, ks, vs = map(self._parts, (q, k, v))
            out, entry = cache.attend(layer, qs[0], ks[0], vs[0], first, **options)
            if self.rows is None:
                return out.reshape(-1, *out.shape[2:])[self.nodes][None], entry
            more, others = some.attend(layer, qs[1], ks[1], vs[1], tail, **options)
            flat = jnp.concatenate([x.reshape(-1, *x.shape[2:]) for x in (out, more)])
            return flat[self.nodes][None], jax.tree.map(self._widen, entry, others)

        return attend

    def _flat(self, x: Array, behind: Array | None = None) -> Array:
        """Flattens `[B, W, ...]` to the candidates `[B * count + R * (W - count), ...]`. `behind` (`bool[R, 1]`) masks
        the values of padding rows."""
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        if self.rows is None:
            return flat(x)
        tail = x[jnp.minimum(self.rows, x.shape[0] - 1), self.count:]
        return jnp.concatenate([flat(x[:, :self.count]), flat(tail if behind is None else tail & behind)])

    def _parts(self, x: Array) -> list[Array]:
        """Moves packed values `[1, T, ...]` to `[B, count, ...]` and `[R, W - count, ...]`."""
        whole, (B, W) = x[0][self.places], self.window.tokens.shape
        end, rest = B * self.count, x.shape[2:]
        first = whole[:end].reshape(B, self.count, *rest)
        return [first] if self.rows is None else [first, whole[end:].reshape(-1, W - self.count, *rest)]

    def _widen(self, first: Array, tail: Array | None = None) -> Array:
        """Joins `[B, count, ...]` and `[R, W - count, ...]` to `[B, W, ...]`; the other rows get zeros after the first
        `count`."""
        if tail is None:
            return first
        empty = jnp.zeros((first.shape[0], *tail.shape[1:]), tail.dtype)
        return jnp.concatenate([first, empty.at[self.rows].set(tail, mode="drop")], 1)
