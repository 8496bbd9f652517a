"""Retrospective sparse attention: the pages that a token chooses are also used by the tokens before it ("Retrospective
Sparse Attention for Efficient Long-Context Generation", Choi et al., 2025).

Each query chooses pages as in Quest. The `window - 1` tokens before it attend to these pages, too, unless they have
done so already, and the result is merged into that of their earlier attention. This changes their outputs, and their
keys and values in later layers, which are written again. So for each new token the network runs on `window` tokens, the
newest one and those before it; the logits are those of the newest one.

A window of nodes is processed as rows: row `(n, v)` is the token `v` positions before node `n` on its path, as it is
recomputed together with `n`. Its attention is the merge of partial results, one for each step since its own, each with
the query and the keys of that step. So `(n, v)` merges the partial results of `(n, v)`, of its parent's `(., v - 1)`,
and so on down to its own step. All of these are computed in parallel and merged along paths; those of the latest
committed steps are stored. A key is final `window - 1` steps after its own. Until then, later rows attend to the
version that is among the rows.

The authors' repository (7804760) contains only a test. Pages are chosen by the newest token alone and are not revised
later; of a prompt only the newest token is recomputed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.cache.key_values import KVLayer
from decodax.caches.sparse.pages import PageCache, PageConfig, PageScore
from decodax.caches.sparse.quest import KeyBounds
from decodax.caches.sparse.reading import attention_to
from decodax.common.options import Range
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, struct
from decodax.core.around import Readout
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.loaded import Loaded
from decodax.core.types import LayeredModel, Model, Out
from decodax.core.window import Window, each_node, take
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse

NOTHING = -1e30
"""Logarithm of the softmax sum of attention to no keys."""


@struct
class Rows(Struct):
    """A window whose nodes are processed together with the tokens before them. Each node has `w` rows; row `v` is the
    token `v` positions before the node.

    Attributes:
        nodes: the rows as a window; the rows with `v = 0`, the nodes themselves, come first.
        ancestors: `i32[B, W, w]`, the node `v` positions before each node on its path; -1 if it is in the cache.
        seen: `bool[B, W, w W]`, the rows whose keys a node attends to.
    """

    nodes: Window
    ancestors: Array
    seen: Array


@struct
class RereadEntry(KVEntry):
    """Keys and values of all rows of a window, `f[B, W, w, G, d]`: each node, and the tokens before it, read again.

    Attributes:
        pieces: `f32[B, W, w - 1, H, e + 1]`, partial results of attention; see `RetroAttentionCache.found`.
        pages: `i32[B, W, G, n]`, the pages that each node chooses; None: the layer attends to all tokens.
        tokens: `i32[B, W]`, ids of the nodes.
    """

    pieces: Array
    pages: Array | None
    tokens: Array


@struct
class RetroAttentionCache(PageCache):
    """Pages with digests, and the partial results of attention of the latest tokens. `w` is the option `window`, `n`
    the number of pages that a token chooses. Rows and steps are those of the module's docstring.

    Attributes:
        found: for each layer `f32[B, H, (w - 1) (w - 1), e + 1]`: the partial result of row `v` at the step of the
            token at position `p` is at index `p % (w - 1) * (w - 1) + v`; its last channel is the logarithm of the
            softmax sum.
        chosen: for each layer `i32[B, G, w - 1, n]`, the pages that the token at `p` chose, at index `p % (w - 1)`; -1:
            none. None: the layer attends to all tokens.
        recent_tokens: `i32[B, w - 1]`, ids of these tokens.
        began: `i32[B]`, position of the first token that is recomputed.
        digests, kv, length, given, shapes, kind: see `PageCache`.
    """

    found: tuple[Array, ...]
    chosen: tuple[Array | None, ...]
    recent_tokens: Array
    began: Array

    if TYPE_CHECKING:
        kind: RetroAttentionConfig

    def check_drafts(self) -> None:
        raise ValueError("cache: retro-attention reads the last tokens again with each new one, but not the nodes of "
                         "earlier windows; takes a method that does not draft with this cache")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if not window.is_prefill and self.kind.is_sparse(self.capacity):
            raise ValueError("cache: retro-attention reads each token several times, so it takes the model that "
                             "answers: generate(..., cache=...)")
        return super().attend(layer, q, k, v, window, **options)

    def check_window(self, nodes: int) -> None:
        least = nodes + self.kind.window - 2
        if least > self.kind.recent and self.kind.is_sparse(self.capacity):
            raise ValueError(f"cache: retro-attention reads windows of {nodes} nodes with at least {least} recent "
                             f"tokens, got recent={self.kind.recent}")

    def rows(self, window: Window) -> Rows:
        """Returns the rows that are computed for a window: each node, and the `w - 1` tokens before it on its path."""
        at, seen, w = window.positions, window.visible(), self.kind.window
        (B, W), back = at.shape, jnp.arange(w, dtype=jnp.int32)
        self.check_window(W)
        if window.embeddings is not None:
            raise ValueError("cache: retro-attention reads tokens again by their ids; takes a method whose rounds are "
                             "of tokens")
        seen = jnp.broadcast_to(seen, (B, W, W))
        path = seen[:, :, None] & (at[:, None, None] == (at[:, :, None] - back)[..., None])        # [B, W, w, W]
        ancestors = jnp.where(path.any(-1), path.argmax(-1), -1).astype(jnp.int32)
        before = (at[:, :, None] - back).swapaxes(1, 2)         # [B, w, W]
        alive = window.live[:, None] & (before >= self.began[:, None, None])
        held = take(self.recent_tokens, before % (w - 1))
        node = ancestors.swapaxes(1, 2)
        tokens = jnp.where(node >= 0, take(window.tokens, jnp.maximum(node, 0)), held)
        # a node sees all rows of itself, and of nodes before it the last ones
        itself = jnp.eye(W, dtype=bool)
        sees = jnp.where((back == w - 1)[:, None], seen[:, :, None] | itself[:, None], itself[:, None])
        flat = lambda x: x.reshape(*x.shape[:-2], w * W)
        alive = flat(alive)
        return Rows(ancestors=ancestors, seen=flat(sees) & alive[:, None], nodes=Window(
            tokens=flat(tokens), positions=flat(jnp.maximum(before, 0)), live=alive,
            mask=jnp.eye(w * W, dtype=bool)[None]))

    def reread(self, layer: int, q: Array, k: Array, v: Array, window: Window, rows: Rows, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        """Computes attention of all rows of a window: the nodes, and the tokens before each of them, which now also
        attend to the pages that the node chooses.

        Args:
            layer, window, scale, sliding, softcap, bias, sinks: see `Cache.attend`.
            q, k, v: queries, keys and values of the rows, `f[B, w W, ...]`.
            rows: the rows of the window.

        Returns:
            The output `f[B, w W, H, e]`, and the layer's entry for `commit`.
        """
        (B, W), w, H = window.positions.shape, self.kind.window, q.shape[2]
        limit = jnp.maximum(self.began, self.length - w + 1)        # later tokens are read as they are among the rows
        split = lambda x: x.reshape(B, w, W, *x.shape[2:]).swapaxes(1, 2)
        whole = sliding is not None or self.kind.keeps_dense(layer, self.shapes[layer])
        out, lse = window_attention_lse(q[:, :W], k, v, rows.seen, window.positions,
                                        *((self.kv[layer], limit) if whole else ()), scale=scale, sliding=sliding,
                                        key_positions=rows.nodes.positions, sinks=sinks)
        own = jnp.concatenate([out, lse[..., None]], -1, dtype=jnp.float32)[:, :, None]
        if whole:
            none = jnp.zeros((B, W, w - 1, *own.shape[3:]), jnp.float32).at[..., -1].set(NOTHING)
            chosen, pieces = None, jnp.concatenate([own, none], 2)
        else:
            chosen, pieces = self._find(layer, split(q.astype(jnp.float32) * scale), window.positions, rows, limit)
            first = _joined(*merge(_parts(own), _parts(pieces[:, :, :1])))
            pieces = jnp.concatenate([first, pieces[:, :, 1:]], 2)
        entry = RereadEntry(split(k), split(v), pieces[:, :, :-1], chosen, window.tokens)
        piece = lambda back, row: _parts(self._piece(layer, pieces, window.positions, rows, back, row))
        merged = [merge(*(piece(j, row - j) for j in range(row + 1)))[0] for row in range(w)]
        return jnp.stack(merged, 1).reshape(B, w * W, H, -1).astype(v.dtype), entry

    def _find(self, layer: int, q: Array, at: Array, rows: Rows, limit: Array) -> tuple[Array, Array]:
        """Returns the pages that nodes at positions `at` (`i32[B, W]`) choose, `i32[B, W, G, n]` (-1: none), and the
        partial results of attention of their rows to these pages, `f32[B, W, w, H, e + 1]`. For the nodes themselves
        they include the latest tokens of the cache.

        Args:
            layer: number of the layer.
            q: `f32[B, W, w, H, d]`, scaled queries of the rows.
            at: positions of the nodes.
            rows: the rows.
            limit: `i32[B]`, cached tokens from this position on are not attended to.
        """
        shape, P, w = self.shapes[layer], self.kind.page_size, self.kind.window
        chosen = each_node(lambda q, at: jnp.where((x := self.choose(layer, q, at))[1], x[0], -1), q[:, :, 0], at)
        # a row reads a page only if its token has not read it at an earlier step
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
            # pages from here on were read by the token in any case
            own = jnp.where(at - j >= self.began[:, None], self.first_late_page(at - j), 0)
            fresh.append(there & (chosen < own[..., None, None]))

        def one(q: Array, at: Array, chosen: Array, seen: Array) -> Array:
            pages = self.pages_of(layer, jnp.maximum(chosen, 0), chosen >= 0)
            latest, late = self.always_read(layer, at, limit)
            some = jnp.concatenate([pages, latest], 2).astype(jnp.float32)
            late = jnp.concatenate([late[:, None], jnp.zeros((len(late), w - 1, *late.shape[1:]), bool)], 1)
            seen = jnp.concatenate([jnp.repeat(seen, P, 3), late], 3)       # [B, w, G, n]
            q = q.reshape(*q.shape[:2], shape.heads, -1, shape.width)
            each = jax.vmap(lambda q, some, seen: attention_to(q, some, seen, shape.width), in_axes=(0, None, 0))
            return _joined(*jax.vmap(each)(q, some, seen))

        return chosen, each_node(one, q, at, chosen, jnp.stack(fresh, 2))

    def _piece(self, layer: int, pieces: Array, at: Array, rows: Rows, back: int, row: int) -> Array:
        """Returns the partial result of row `row` at the step `back` before that of each node, `f32[B, W, H, e +
        1]`."""
        if back == 0:
            return pieces[:, :, row]
        node, w = rows.ancestors[:, :, back], self.kind.window
        held = take(self.found[layer].swapaxes(1, 2), (at - back) % (w - 1) * (w - 1) + row)
        return jnp.where((node >= 0)[..., None, None], take(pieces[:, :, row], jnp.maximum(node, 0)), held)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        if not isinstance(entries[0], RereadEntry):     # those of a prompt, which is not read again
            new = super().commit(entries, slots)
            return new.replace(began=jnp.where((slots >= 0).any(1), new.length, self.began))
        (B, W), w = slots.shape, self.kind.window
        back = jnp.arange(w, dtype=jnp.int32)
        own = slots[..., None] - back
        # of rows that the next round reads again, the newest token's alone are needed
        last = (back == w - 1) | (slots == slots.max(1, keepdims=True))[..., None]
        to = jnp.where((slots >= 0)[..., None] & last & (own >= self.began[:, None, None]), own, -1)
        flat = lambda x: x.reshape(B, W * w, *x.shape[3:])
        new = super().commit([KVEntry(flat(entry.keys), flat(entry.values)) for entry in entries], to.reshape(B, W * w))
        place = jnp.where((slots >= 0) & (slots > slots.max(1, keepdims=True) - (w - 1)), slots % (w - 1), w - 1)
        put = jax.vmap(lambda held, new, at: held.at[:, at].set(new.swapaxes(0, 1).astype(held.dtype), mode="drop"))
        found, chosen = [], []
        for old, kept, entry in zip(self.found, self.chosen, entries, strict=True):
            steps = old.reshape(*old.shape[:2], w - 1, w - 1, -1)
            found.append(put(steps, entry.pieces.swapaxes(2, 3), place).reshape(old.shape))
            chosen.append(None if kept is None else put(kept, entry.pages, place))
        latest = put(self.recent_tokens[:, None], entries[0].tokens[..., None], place)[:, 0]
        return new.replace(found=tuple(found), chosen=tuple(chosen), recent_tokens=latest)


def _parts(joined: Array) -> tuple[Array, Array]:
    return joined[..., :-1], joined[..., -1]


def _joined(out: Array, lse: Array) -> Array:
    return jnp.concatenate([out, lse[..., None]], -1)


@dataclasses.dataclass(frozen=True)
class _ReadsRows:
    """Replaces the cache while the network runs on the rows of a window."""

    cache: RetroAttentionCache
    window: Window
    rows: Rows

    @property
    def inputs(self) -> PyTree:
        return self.cache.inputs

    def attend(self, layer: int, q: Array, k: Array, v: Array, nodes: Window, **options: Any) -> tuple[Array, PyTree]:
        return self.cache.reread(layer, q, k, v, self.window, self.rows, **options)


@dataclasses.dataclass(frozen=True)
class Rereading(Readout):
    """The model `base`; with a `RetroAttentionCache`, it recomputes the latest tokens together with each new token."""

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        if window.is_prefill or not isinstance(cache, RetroAttentionCache) or not cache.kind.is_sparse(cache.capacity):
            return self.base.apply(params, window, cache)
        rows, first = cache.rows(window), lambda x: x[:, :window.width]
        out = self.base.apply(params, rows.nodes, _ReadsRows(cache, window, rows))      # type: ignore[arg-type]
        return dataclasses.replace(out, hidden=first(out.hidden),
                                   layers=None if out.layers is None else tuple(map(first, out.layers)),
                                   streams=None if out.streams is None else first(out.streams))


@CACHES.register("retro-attention", "Retrospective Sparse Attention for Efficient Long-Context Generation",
                 "Choi et al. 2025", family="sparse")
@dataclasses.dataclass(frozen=True)
class RetroAttentionConfig(PageConfig):
    """Keeps all tokens; each query attends to pages as in Quest, and the tokens before it attend to these pages, too,
    so that their keys and values in later layers are recomputed.

    For each new token the network runs on `window` tokens. In layers that attend to all tokens, earlier outputs do not
    change. Example: `cache="retro-attention:budget=512,window=3"`.

    Attributes:
        budget: number of tokens of the pages that a query attends to; raised to three pages if it
            is less.
        page_size: number of tokens of a page.
        recent: number of latest tokens that are always attended to.
        skip: numbers of layers that attend to all tokens; the first two, as in Quest.
        window: number of tokens that the network runs on for each new one, itself included.
    """

    window: Annotated[int, Range(2)] = 2

    name: ClassVar[str] = "retro-attention"
    score: ClassVar[PageScore] = KeyBounds()
    alone: ClassVar[bool] = True

    def wrap_model(self, lm: Loaded) -> tuple[Model, PyTree]:
        model = lm.model
        if not isinstance(model, LayeredModel) or model.config.shared or model.config.summing:
            raise ValueError(f"lm: got a {type(model).__name__}, and retro-attention takes a model each of whose "
                             "layers attends to keys and values of its own")
        return Rereading(model.with_cache(self.of_model(lm))), lm.params

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        parts, w = self.parts(shapes, batch, size, dtype, inputs), self.window
        found, chosen = [], []
        for layer, shape in enumerate(shapes):
            H, e = shape.queries or shape.heads, shape.both - shape.width
            found.append(jnp.zeros((batch, H, (w - 1) ** 2, e + 1), jnp.float32).at[..., -1].set(NOTHING))
            pages = min(self.pages, self.rounded(size) // self.page_size)
            chosen.append(None if self.keeps_dense(layer, shape) else
                          jnp.full((batch, shape.heads, w - 1, pages), -1, jnp.int32))
        return RetroAttentionCache(found=tuple(found), chosen=tuple(chosen),
                                   recent_tokens=jnp.zeros((batch, w - 1), jnp.int32),
                                   began=jnp.zeros(batch, jnp.int32), **parts)
