"""Packed windows: what of a network works on each token by itself does so on the live nodes alone.

A batch of windows is as wide as the widest of them, and rows have drafts, or parts of a prompt, of unequal number.
Dense layers need not see the nodes that fill up (EMS-SD: Ni et al., 2024, who put the rows' tokens side by side and
expand them for attention alone).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import DATA
from decodax.core.cache import Cache
from decodax.core.window import Window

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Packing:
    """A hint (`Window.hints`): how many of a window's nodes may be live, and where. A model may compute these alone, in
    the smallest of several sizes that holds them; or all of them, as one does that does not know the hint.

    Attributes:
        sizes: numbers of nodes, in ascending order; static. Each is a program of its own.
        bounded: whether never more nodes are live than the last of them. Else all are computed where more are.
        tail: `(count, rows)`: at most `rows` rows have live nodes after the first `count` ones. Such a row has no live
            node among the first, so its nodes attend to the cache and to each other alone; the other rows do not attend
            there at all. Static. None: any node may be live.
    """

    sizes: tuple[int, ...]
    bounded: bool = False
    tail: tuple[int, int] | None = None

    def run(self, live: Array, packed: Callable[[int], T], whole: Callable[[], T]) -> T:
        """What `packed` makes of the smallest size that holds the nodes of `live` (`bool[B, W]`), or `whole` of all. So
        also where rows lie on several devices, which packing would have exchange them."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.shape.get(DATA, 1) > 1 and DATA not in mesh.manual_axes:
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
    """The live nodes of a window side by side. It lives inside one trace.

    Attributes:
        window: of all nodes. count: how many of the first nodes any row may have live. rows: `i32[R]`, the rows with
            live nodes behind them, or None; those beyond the batch stand for none.
        nodes: `i32[T]`, which of the `B * count + R * (W - count)` nodes each is. places: where each of those stands;
            dead ones stand where some other does.
    """

    window: Window
    count: int
    rows: Array | None
    nodes: Array
    places: Array

    @classmethod
    def of(cls, window: Window, packing: Packing, size: int) -> PackedWindow:
        """That of `window`, of which at most `size` nodes are live."""
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
        """`[B, W, ...]` to `[1, T, ...]`."""
        return self._flat(x)[self.nodes][None]

    def unpack(self, x: Array) -> Array:
        """`[1, T, ...]` to `[B, W, ...]`; what stands at dead nodes means nothing."""
        return self._widen(*self._parts(x))

    def attend(self, cache: Cache) -> Callable[..., tuple[Array, Any]]:
        """`cache.attend` for queries, keys and values `[1, T, ...]`; entries are those of the whole window."""
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
        """`[B, W, ...]` to `[B * count + R * (W - count), ...]`, of which those of `behind` are kept."""
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        if self.rows is None:
            return flat(x)
        tail = x[jnp.minimum(self.rows, x.shape[0] - 1), self.count:]
        return jnp.concatenate([flat(x[:, :self.count]), flat(tail if behind is None else tail & behind)])

    def _parts(self, x: Array) -> list[Array]:
        """`[1, T, ...]` to `[B, count, ...]` and `[R, W - count, ...]`."""
        whole, (B, W) = x[0][self.places], self.window.tokens.shape
        end, rest = B * self.count, x.shape[2:]
        first = whole[:end].reshape(B, self.count, *rest)
        return [first] if self.rows is None else [first, whole[end:].reshape(-1, W - self.count, *rest)]

    def _widen(self, first: Array, tail: Array | None = None) -> Array:
        """`[B, count, ...]` and `[R, W - count, ...]` to `[B, W, ...]`."""
        if tail is None:
            return first
        empty = jnp.zeros((first.shape[0], *tail.shape[1:]), tail.dtype)
        return jnp.concatenate([first, empty.at[self.rows].set(tail, mode="drop")], 1)
