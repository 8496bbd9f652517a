"""Caches that keep everything and read a part: each query chooses pages of tokens, and attention goes to these alone.

A page is described by a few numbers a head, its digest; a query's score of all digests says which pages it reads, and
nothing else of the cache is touched. Prompts are read whole. The page that is being filled and the latest `recent`
tokens are read in any case, so that it does not matter which of them a round has committed and which stand in its own
window: a round of drafts sees what plain decoding would see. No page is ever lost.

The pages may lie in the host's memory (`decodax.caches.sparse.offloaded`); digests and the latest tokens stay on the
device.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.cache.scratch import Scratch
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Draftable, Entries, PyTree
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention, window_attention_lse


class PageScore(abc.ABC):
    """What a page is described by, and how a query scores it: derive a frozen dataclass from this."""

    @abc.abstractmethod
    def digest(self, keys: Array) -> Array:
        """`f[..., m]` of a page's keys `f[..., P, d]`."""

    @abc.abstractmethod
    def __call__(self, q: Array, digests: Array) -> Array:
        """`f32[G, r, N]`: what queries `f[G, r, d]` may find in each of the pages `f[G, N, m]`."""


@dataclasses.dataclass(frozen=True)
class KeyBounds(PageScore):
    """The smallest and the largest value of each channel, which bound the product of a query with any key of the page
    ("Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", Tang et al., 2024)."""

    def digest(self, keys: Array) -> Array:
        return jnp.concatenate([keys.min(-2), keys.max(-2)], -1)

    def __call__(self, q: Array, digests: Array) -> Array:
        low, high = jnp.split(digests.astype(jnp.float32), 2, -1)
        # max(q low, q high) is q high where q is positive and q low elsewhere
        return (jnp.einsum("grd,gnd->grn", jnp.maximum(q, 0), high)
                + jnp.einsum("grd,gnd->grn", jnp.minimum(q, 0), low))


class Choosing(Cache):
    """What caches of pages have in common whose queries choose what they read, wherever the pages lie.

    Attributes:
        digests: a tuple of one `f[B, G, S / P, m]` a layer. length: `i32[B]`. shapes, kind: static.
        given: see `Cache.inputs`.
    """

    supports = frozenset({"trees"})

    if TYPE_CHECKING:       # each kind declares them, in the order of its fields
        digests: tuple[Array, ...]
        given: PyTree
        shapes: tuple[KVLayer, ...]
        kind: Retrieval

    @property
    def capacity(self) -> int:
        return self.digests[0].shape[2] * self.kind.page if self.digests else 0

    @property
    def inputs(self) -> PyTree:
        return self.given

    def scratch(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)

    @abc.abstractmethod
    def _whole(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> Array:
        """Attention to everything, as `window_attention`."""

    @abc.abstractmethod
    def _pages(self, layer: int, chosen: Array, found: Array) -> Array:
        """Of the pages `i32[B, G, n]` those that are `found` (`bool[B, G, n]`): `f[B, G, n * P, d + e]`."""

    @abc.abstractmethod
    def _latest(self, layer: int, first: Array, count: int) -> Array:
        """So many tokens from position `first` (`i32[B]`) on: `f[B, G, count, d + e]`; those that are none are any."""

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own = k.shape[1] - q.shape[1]
        entry = k[:, own:], v[:, own:]
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, key_positions=window.key_positions)
        if window.certain or layer in self.kind.skip or sliding is not None or not self.kind.sparse(self.capacity):
            return self._whole(layer, q, k, v, window, sliding=sliding, bias=bias, **options), entry
        self.kind.refuse(softcap, bias)
        if k.shape[1] > self.kind.recent:
            raise ValueError(f"cache: {self.kind.name} takes windows of at most its {self.kind.recent} recent tokens, "
                             f"got one of {k.shape[1]} nodes; takes recent={k.shape[1]} or more")
        near = window_attention_lse(q, k, v, window.visible(), window.positions, **options)
        out, _ = merge(near, self._read(layer, q.astype(jnp.float32) * scale, window.positions))
        return out, entry

    def _read(self, layer: int, q: Array, at: Array) -> tuple[Array, Array]:
        """Attention of queries `f32[B, W, H, d]` at positions `i32[B, W]` to the pages they choose and the latest
        tokens."""
        shape, P = self.shapes[layer], self.kind.page

        def one(q: Array, at: Array) -> tuple[Array, Array]:
            chosen, found = self._choose(layer, q, at)
            latest, late = self._always(layer, at, self.length)
            some = jnp.concatenate([self._pages(layer, chosen, found), latest], 2)
            seen = jnp.concatenate([jnp.repeat(found, P, 2), late], 2)
            attend = jax.vmap(lambda q, some, seen: attention_to(q, some, seen, shape.width))
            return attend(q.reshape(len(q), shape.heads, -1, shape.width), some.astype(jnp.float32), seen)

        return each_node(one, q, at)

    def _start(self, at: Array) -> Array:
        """For queries at positions `i32[...]`, in pages: where what is read in any case begins."""
        return jnp.maximum(at - self.kind.recent, 0) // self.kind.page

    def _choose(self, layer: int, q: Array, at: Array) -> tuple[Array, Array]:
        """The pages `i32[B, G, n]` that a query in each row chooses, `f32[B, H, d]` at `i32[B]`, and which of them are
        any, `bool[B, G, n]`."""
        digests, shape, score = self.digests[layer], self.shapes[layer], self.kind.score
        pages = min(self.kind.pages, digests.shape[2])

        def choose(q: Array, digests: Array, start: Array) -> tuple[Array, Array]:
            free = jnp.arange(digests.shape[1]) < start
            worth = jnp.where(free, score(q.reshape(shape.heads, -1, shape.width), digests).max(1), -jnp.inf)
            found, chosen = lax.top_k(worth, pages)                 # [G, pages]
            return chosen.astype(jnp.int32), found > -jnp.inf

        return jax.vmap(choose)(q, digests, self._start(at))

    def _always(self, layer: int, at: Array, length: Array) -> tuple[Array, Array]:
        """What a query in each row, at `i32[B]`, reads in any case of the first `length` (`i32[B]`) tokens: `f[B, G, n,
        d + e]`, and which of them it sees, `bool[B, G, n]`."""
        start, near = self._start(at) * self.kind.page, min(self.kind.recent + self.kind.page, self.capacity)
        first = jnp.minimum(start, self.capacity - near)
        late = first[:, None] + jnp.arange(near, dtype=jnp.int32)
        late = (late >= start[:, None]) & (late < length[:, None])
        latest = self._latest(layer, first, near)
        return latest, jnp.broadcast_to(late[:, None], latest.shape[:3])

    def _grown(self, slots: Array) -> tuple[Array, Array]:
        """The length `i32[B]` with tokens at `slots` (`i32[B, W]`), and which pages they may have filled, `i32[B, n]`;
        -1: it is not full."""
        P, W = self.kind.page, slots.shape[1]
        length = jnp.maximum(self.length, slots.max(1) + 1)
        first = jnp.where(slots >= 0, slots, self.capacity).min(1) // P
        pages = first[:, None] + jnp.arange(W // P + 2, dtype=jnp.int32)
        return length, jnp.where((pages + 1) * P <= length[:, None], pages, -1)

    def _digested(self, layer: int, pages: Array, keys: Array) -> Array:
        """The digests of a layer with those of `pages` (`i32[B, n]`), whose keys are `f[B, G, n, P, d]`."""
        return write(self.digests[layer], self.kind.score.digest(keys).swapaxes(1, 2), pages)


@struct
class Retrieving(Choosing, KeyValues):
    """Everything, in the order of positions, with a digest of each whole page.

    Attributes:
        kv, widths: see `KeyValues`. The others: see `Choosing`.
    """

    kv: tuple[Array, ...]
    digests: tuple[Array, ...]
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: Retrieval = static()

    def _whole(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> Array:
        return window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], self.length, **options)

    def _pages(self, layer: int, chosen: Array, found: Array) -> Array:
        P = self.kind.page
        slots = (chosen[..., None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(*chosen.shape[:2], -1)
        return jnp.take_along_axis(self.kv[layer], slots[..., None], 2)

    def _latest(self, layer: int, first: Array, count: int) -> Array:
        return jax.vmap(lambda kv, first: lax.dynamic_slice_in_dim(kv, first, count, 1))(self.kv[layer], first)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        P, B = self.kind.page, slots.shape[0]
        length, pages = self._grown(slots)
        kv, digests = [], []
        for layer, (held, entry, d) in enumerate(zip(self.kv, entries, self.widths, strict=True)):
            new = write(held, jnp.concatenate(entry, -1), slots)
            at = jnp.maximum(pages, 0)[:, :, None] * P + jnp.arange(P, dtype=jnp.int32)
            keys = jnp.take_along_axis(new, at.reshape(B, 1, -1, 1), 2)[..., :d]
            kv.append(new)
            digests.append(self._digested(layer, pages, keys.reshape(*keys.shape[:2], -1, P, d)))
        return self.replace(kv=tuple(kv), digests=tuple(digests), length=length)


def attention_to(q: Array, kv: Array, seen: Array, width: int) -> tuple[Array, Array]:
    """Of queries `f32[G, r, d]` to `f32[G, n, d + e]` where `seen` (`bool[G, n]`): `f32[H, e]`, and the logarithm of
    the sums, `f32[H]`; about -1e30 where nothing is seen."""
    scores = jnp.where(seen[:, None], jnp.einsum("grd,gnd->grn", q, kv[..., :width]), -1e30)
    top = scores.max(-1, keepdims=True)
    weights = jnp.where(seen[:, None], jnp.exp(scores - top), 0)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("grn,gne->gre", weights, kv[..., width:]) / jnp.maximum(total, 1e-30)
    lse = top + jnp.log(jnp.maximum(total, 1e-30))
    return out.reshape(-1, out.shape[-1]), lse.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Retrieval(CacheConfig):
    """A `Retrieving` cache.

    Attributes:
        score: what pages are chosen by. budget: tokens of the pages that a query reads; three pages at least.
        page: tokens of a page. recent: the latest tokens, which are read in any case.
        skip: layers that read everything. name: what errors call it.
    """

    score: PageScore
    budget: int
    page: int = 16
    recent: int = 64
    skip: tuple[int, ...] = ()
    name: str = "retrieval"

    def __post_init__(self) -> None:
        for name in ("budget", "page", "recent"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number of tokens from 1")

    @property
    def pages(self) -> int:
        """How many pages a query reads."""
        return max(3, self.budget // self.page)

    def sparse(self, capacity: int) -> bool:
        """Whether a text of so many tokens has more than is read of it."""
        return capacity > self.pages * self.page + self.recent

    def refuse(self, softcap: float | None, bias: Bias | None) -> None:
        """Raises ValueError where something is added to scores that pages are not chosen by."""
        if bias is not None or softcap is not None:
            raise ValueError(f"cache: {self.name} scores pages by queries and keys alone; takes a model without a "
                             "soft cap or a bias of its attention scores")

    def parts(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
              inputs: PyTree) -> tuple[int, dict[str, Any]]:
        """The positions of an empty cache, and what all kinds of it have, by name."""
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        size = -(-capacity // self.page) * self.page
        digests = []
        for shape in shapes:
            one = jax.eval_shape(self.score.digest, jax.ShapeDtypeStruct((self.page, shape.width), dtype))
            digests.append(jnp.zeros((batch, shape.heads, size // self.page, *one.shape), dtype))
        return size, dict(digests=tuple(digests), length=jnp.zeros(batch, jnp.int32), given=inputs, shapes=shapes,
                          kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        size, parts = self.parts(layers, batch, capacity, dtype, inputs)
        shapes = parts["shapes"]
        return Retrieving(kv=empty_kv(shapes, batch, size, dtype), widths=key_widths(shapes), **parts)
