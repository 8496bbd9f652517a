"""Pages that a token chooses for those before it, too ("Retrospective Sparse Attention for Efficient Long-Context
Generation", Choi et al., 2025).

Each query chooses pages as Quest has it. What a token loads so, the `window - 1` tokens before it read as well, as far
as they have not seen it: what they find is merged into what their attention has found so far. So their outputs change,
and in the layers behind, their keys and values, which are written anew. With each token the network thus reads
`window` tokens, the newest one and those before it, and what it says follows the newest one.

A window of nodes is read in rows: row `(n, v)` is the token `v` positions before node `n` on its path, as it is read
anew when `n` is. Its attention is what it found at each step since its own, by the query and the keys of that step, so
`(n, v)` merges the finds of `(n, v)`, of its parent's `(., v - 1)`, and so on down to its own step. All of these are
computed side by side, and merged by who descends from whom; those of the latest committed steps are kept. A key is as
it should be `window - 1` steps after its own; until then, later rows read it as they have it themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import empty_kv, key_widths
from decodax.caches.sparse.retrieval import Retrieval, Retrieving, attention_to
from decodax.common.struct import Struct, static, struct
from decodax.core.around import Readout
from decodax.core.cache import Cache, Draftable, Entries, PyTree
from decodax.core.types import LayeredModel, Out
from decodax.core.window import Window, each_node, take
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse

NOTHING = -1e30
"""The logarithm of the sums of attention to nothing."""


@struct
class Rows(Struct):
    """A window whose nodes are read together with the tokens before them, `w` rows a node.

    Attributes:
        nodes: the rows as a window, those of `v = 0` in front, which are the nodes themselves.
        ancestors: `i32[B, W, w]`, the node so many positions before each one on its path; -1: it is in the cache.
        seen: `bool[B, W, w W]`, which rows' keys a node sees.
    """

    nodes: Window
    ancestors: Array
    seen: Array


@struct
class Retrospective(Retrieving):
    """Pages with digests, and what the latest tokens have found so far.

    Attributes:
        kv, digests, length, given, widths, shapes: see `Retrieving`.
        found: a tuple of one `f32[B, H, (w - 1) (w - 1), e + 1]` a layer: what row `v` found at the step of the token
            at position `p`, in place `p % (w - 1) * (w - 1) + v`, and behind it the logarithm of the sum.
        chosen: a tuple of one `i32[B, G, w - 1, n]` a layer, the pages that the token at `p` chose, in place
            `p % (w - 1)`; -1: none. None where a layer reads everything.
        latest: `i32[B, w - 1]`, the tokens themselves.
        began: `i32[B]`, the position of the first token that is read anew. kind: static.
    """

    found: tuple[Array, ...]
    chosen: tuple[Array | None, ...]
    latest: Array
    began: Array
    kind: Retrospection = static()

    def scratch(self, entries: Entries, room: int) -> Draftable:
        raise ValueError("cache: retro-attention reads tokens anew with each one behind them, which nodes of earlier "
                         "windows are not; takes a method that does not draft on this cache")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if not window.certain and self.kind.sparse(self.capacity):
            raise ValueError("cache: retro-attention reads each token several times, so it takes the model that "
                             "answers: generate(..., cache=kv(...))")
        return super().attend(layer, q, k, v, window, **options)

    def rows(self, window: Window) -> Rows:
        """A window's nodes and the tokens before them."""
        at, seen, w = window.positions, window.visible(), self.kind.window
        (B, W), back = at.shape, jnp.arange(w, dtype=jnp.int32)
        if W + w - 2 > self.kind.recent:
            raise ValueError(f"cache: retro-attention reads windows of {W} nodes with at least {W + w - 2} recent "
                             f"tokens, got recent={self.kind.recent}")
        if window.embeddings is not None:
            raise ValueError("cache: retro-attention reads tokens anew by their ids; takes a method whose rounds are "
                             "of tokens")
        seen = jnp.broadcast_to(seen, (B, W, W))
        path = seen[:, :, None] & (at[:, None, None] == (at[:, :, None] - back)[..., None])        # [B, W, w, W]
        ancestors = jnp.where(path.any(-1), path.argmax(-1), -1).astype(jnp.int32)
        before = (at[:, :, None] - back).swapaxes(1, 2)         # [B, w, W]
        alive = window.live[:, None] & (before >= self.began[:, None, None])
        held = take(self.latest, before % (w - 1))
        node = ancestors.swapaxes(1, 2)
        tokens = jnp.where(node >= 0, take(window.tokens, jnp.maximum(node, 0)), held)
        # of itself all rows, of those before it what they were read as last
        itself = jnp.eye(W, dtype=bool)
        sees = jnp.where((back == w - 1)[:, None], seen[:, :, None] | itself[:, None], itself[:, None])
        flat = lambda x: x.reshape(*x.shape[:-2], w * W)
        alive = flat(alive)
        return Rows(ancestors=ancestors, seen=flat(sees) & alive[:, None], nodes=Window(
            tokens=flat(tokens), positions=flat(jnp.maximum(before, 0)), live=alive,
            mask=jnp.eye(w * W, dtype=bool)[None]))

    def reread(self, layer: int, q: Array, k: Array, v: Array, window: Window, rows: Rows, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        """As `attend`, of all rows of a window: queries `f[B, w W, H, d]`, and so keys and values."""
        self.kind.refuse(softcap, bias)
        (B, W), w, H = window.positions.shape, self.kind.window, q.shape[2]
        limit = jnp.maximum(self.began, self.length - w + 1)        # what stands behind is read as the rows have it
        split = lambda x: x.reshape(B, w, W, *x.shape[2:]).swapaxes(1, 2)
        whole = layer in self.kind.skip or sliding is not None
        out, lse = window_attention_lse(q[:, :W], k, v, rows.seen, window.positions,
                                        *((self.kv[layer], limit) if whole else ()), scale=scale, sliding=sliding,
                                        key_positions=rows.nodes.positions)
        own = jnp.concatenate([out, lse[..., None]], -1, dtype=jnp.float32)[:, :, None]
        if whole:
            none = jnp.zeros((B, W, w - 1, *own.shape[3:]), jnp.float32).at[..., -1].set(NOTHING)
            chosen, pieces = None, jnp.concatenate([own, none], 2)
        else:
            chosen, pieces = self._find(layer, split(q.astype(jnp.float32) * scale), window.positions, rows, limit)
            first = _joined(*merge(_parts(own), _parts(pieces[:, :, :1])))
            pieces = jnp.concatenate([first, pieces[:, :, 1:]], 2)
        entry = split(k), split(v), pieces[:, :, :-1], chosen, window.tokens
        piece = lambda back, row: _parts(self._piece(layer, pieces, window.positions, rows, back, row))
        merged = [merge(*(piece(j, row - j) for j in range(row + 1)))[0] for row in range(w)]
        return jnp.stack(merged, 1).reshape(B, w * W, H, -1).astype(v.dtype), entry

    def _find(self, layer: int, q: Array, at: Array, rows: Rows, limit: Array) -> tuple[Array, Array]:
        """What nodes at `at` (`i32[B, W]`) choose, `i32[B, W, G, n]`, -1 where there is no more; and what their rows
        find there, queries `f32[B, W, w, H, d]`, the nodes themselves among the latest tokens of the cache as well:
        `f32[B, W, w, H, e + 1]`."""
        shape, P, w = self.shapes[layer], self.kind.page, self.kind.window
        chosen = each_node(lambda q, at: jnp.where((x := self._choose(layer, q, at))[1], x[0], -1), q[:, :, 0], at)
        # of each step so many before each node's: what was chosen there
        held = self.chosen[layer]
        assert held is not None
        held = held.swapaxes(1, 2)
        there = chosen >= 0
        fresh = [there]
        for j in range(1, w):
            node = rows.ancestors[:, :, j]
            earlier = jnp.where((node >= 0)[..., None, None], take(chosen, jnp.maximum(node, 0)),
                                take(held, (at - j) % (w - 1)))
            there &= ~(chosen[..., None] == earlier[..., None, :]).any(-1)
            # behind these are those that the token read in any case
            own = jnp.where(at - j >= self.began[:, None], self._start(at - j), 0)
            fresh.append(there & (chosen < own[..., None, None]))

        def one(q: Array, at: Array, chosen: Array, seen: Array) -> Array:
            pages = self._pages(layer, jnp.maximum(chosen, 0), chosen >= 0)
            latest, late = self._always(layer, at, limit)
            some = jnp.concatenate([pages, latest], 2).astype(jnp.float32)
            late = jnp.concatenate([late[:, None], jnp.zeros((len(late), w - 1, *late.shape[1:]), bool)], 1)
            seen = jnp.concatenate([jnp.repeat(seen, P, 3), late], 3)       # [B, w, G, n]
            q = q.reshape(*q.shape[:2], shape.heads, -1, shape.width)
            each = jax.vmap(lambda q, some, seen: attention_to(q, some, seen, shape.width), in_axes=(0, None, 0))
            return _joined(*jax.vmap(each)(q, some, seen))

        return chosen, each_node(one, q, at, chosen, jnp.stack(fresh, 2))

    def _piece(self, layer: int, pieces: Array, at: Array, rows: Rows, back: int, row: int) -> Array:
        """What `row` of the step so many before each node's found, `f32[B, W, H, e + 1]`."""
        if back == 0:
            return pieces[:, :, row]
        node, w = rows.ancestors[:, :, back], self.kind.window
        held = take(self.found[layer].swapaxes(1, 2), (at - back) % (w - 1) * (w - 1) + row)
        return jnp.where((node >= 0)[..., None, None], take(pieces[:, :, row], jnp.maximum(node, 0)), held)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        if len(entries[0]) == 2:        # a prompt's, which is not read anew
            new = super().commit(entries, slots)
            return new.replace(began=jnp.where((slots >= 0).any(1), new.length, self.began))
        (B, W), w = slots.shape, self.kind.window
        back = jnp.arange(w, dtype=jnp.int32)
        own = slots[..., None] - back
        # rows that are read once more behind the round are needed of its newest token alone
        last = (back == w - 1) | (slots == slots.max(1, keepdims=True))[..., None]
        to = jnp.where((slots >= 0)[..., None] & last & (own >= self.began[:, None, None]), own, -1)
        flat = lambda x: x.reshape(B, W * w, *x.shape[3:])
        new = super().commit([(flat(k), flat(v)) for k, v, *_ in entries], to.reshape(B, W * w))
        place = jnp.where((slots >= 0) & (slots > slots.max(1, keepdims=True) - (w - 1)), slots % (w - 1), w - 1)
        put = jax.vmap(lambda held, new, at: held.at[:, at].set(new.swapaxes(0, 1).astype(held.dtype), mode="drop"))
        found, chosen = [], []
        for old, kept, (_, _, pieces, pages, _) in zip(self.found, self.chosen, entries, strict=True):
            steps = old.reshape(*old.shape[:2], w - 1, w - 1, -1)
            found.append(put(steps, pieces.swapaxes(2, 3), place).reshape(old.shape))
            chosen.append(None if kept is None else put(kept, pages, place))
        latest = put(self.latest[:, None], entries[0][-1][..., None], place)[:, 0]
        return new.replace(found=tuple(found), chosen=tuple(chosen), latest=latest)


def _parts(joined: Array) -> tuple[Array, Array]:
    return joined[..., :-1], joined[..., -1]


def _joined(out: Array, lse: Array) -> Array:
    return jnp.concatenate([out, lse[..., None]], -1)


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What the network reads in a cache's place: the rows of a window."""

    cache: Retrospective
    window: Window
    rows: Rows

    @property
    def inputs(self) -> PyTree:
        return self.cache.inputs

    def attend(self, layer: int, q: Array, k: Array, v: Array, nodes: Window, **options: Any) -> tuple[Array, PyTree]:
        return self.cache.reread(layer, q, k, v, self.window, self.rows, **options)


@dataclasses.dataclass(frozen=True)
class Rereading(Readout):
    """`base`, which reads the latest tokens anew with each one that follows them, if its cache asks for that."""

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        if window.certain or not isinstance(cache, Retrospective) or not cache.kind.sparse(cache.capacity):
            return self.base.apply(params, window, cache)
        rows, first = cache.rows(window), lambda x: x[:, :window.width]
        out = self.base.apply(params, rows.nodes, _Reading(cache, window, rows))      # type: ignore[arg-type]
        return dataclasses.replace(out, hidden=first(out.hidden),
                                   layers=None if out.layers is None else tuple(map(first, out.layers)))


@dataclasses.dataclass(frozen=True)
class Retrospection(Retrieval):
    """A `Retrospective` cache.

    Attributes:
        window: how many tokens are read with each one, itself included; 2 or more. score, budget, page, recent, skip,
            name: see `Retrieval`. Layers that read everything have nothing to add to earlier outputs.
    """

    window: int = 2
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.window, int) or self.window < 2:
            raise ValueError(f"window: got {self.window!r}, takes a number of tokens from 2")

    def put_on(self, lm: Any) -> Any:
        model = lm.model
        if not isinstance(model, LayeredModel) or any(getattr(model.config, x, False) for x in ("shared", "summing")):
            raise ValueError(f"lm: got a {type(model).__name__}, and retro-attention takes a model each of whose "
                             "layers attends to keys and values of its own")
        return dataclasses.replace(lm, model=Rereading(model.with_cache(self.of_model(lm))))

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        size, parts = self.parts(layers, batch, capacity, dtype, inputs)
        shapes, w = parts["shapes"], self.window
        found, chosen = [], []
        for layer, shape in enumerate(shapes):
            H, e = shape.queries or shape.heads, shape.both - shape.width
            found.append(jnp.zeros((batch, H, (w - 1) ** 2, e + 1), jnp.float32).at[..., -1].set(NOTHING))
            whole = layer in self.skip or shape.sliding is not None
            chosen.append(None if whole else jnp.full((batch, shape.heads, w - 1, min(self.pages, size // self.page)),
                                                      -1, jnp.int32))
        return Retrospective(kv=empty_kv(shapes, batch, size, dtype), widths=key_widths(shapes), found=tuple(found),
                             chosen=tuple(chosen), latest=jnp.zeros((batch, w - 1), jnp.int32),
                             began=jnp.zeros(batch, jnp.int32), **parts)
