"""A cache of linear recurrences: one matrix for each head, layer and row, of the same size for every length of the
text.

The recurrence is `S <- exp(g) S + k v^T` with a decay `g <= 0` of each head, and the output is `q^T S` (Mamba-2,
retention, linear attention with a scalar gate). It is linear, so the nodes of a window need no states of their own.
With `G_i` the sum of `g` over node `i` and its ancestors in the window, and `S` the state before the window, the output
of a node is

    y_i = exp(G_i) q_i^T S + sum over j of exp(G_i - G_j) (q_i . k_j) v_j,        j: i and its ancestors

which is attention with a decay under the window's mask, for chains and trees alike (the dual form of Dao and Gu, 2024).
The entry of a node is `k`, `v` and `G`, and a commit adds those of the accepted path to the state. A state has `N P`
numbers, an entry `N + P`.

The gated delta rule (Yang, Kautz and Hatamizadeh, 2024) first removes the value that the state already has for a key:
`S <- exp(g) S + k u^T` with `u = b (v - exp(g) S^T k)` and a rate `b` of each head. The `u` of a window's nodes depend
on those of their ancestors. They are the solution of a unit triangular system, since ancestors come first:

    u_i + b_i sum over j of exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) S^T k_i),     j: ancestors of i

With `u` in place of `v` all the rest is the same, so a draft needs neither a state of each node nor a second pass over
the accepted nodes.

A decay may also differ from channel to channel of a key (Kimi Delta Attention): `exp(g)` then scales the rows of `S`,
and `exp(G_i - G_j)` the channels of the products of queries and keys.

Short convolutions are included: the inputs of a node are part of its entry, and the cache keeps the last few inputs of
the verified text.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.cache.tree_buffer import AttentionView
from decodax.common.axes import DATA, MODEL
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Entries, Feature, Layout, PyTree, Sized
from decodax.core.capabilities import Draftable, DraftBase
from decodax.core.window import Window, take

LEAST = -64.0
"""Smallest decay of a node. A product with `exp(-64)` is lost in the 24 bits of the numbers it is added to."""

GRID = 64.0
"""A sum of decays is stored as a multiple of `1 / GRID` and a remainder. Multiples add up exactly in float32 up to
`2**24 / GRID`, 4096 nodes with decay `LEAST`, so the difference of two large sums is exact."""


@struct
class ConvInputs(Struct):
    """The entry of a layer with a short convolution and no recurrence.

    Attributes:
        inputs: inputs of the convolution, a pytree of arrays `f[B, W, ...]`.
    """

    inputs: PyTree


@struct
class Factors(Struct):
    """The cache entry of a layer of linear recurrence, `S <- exp(g) S + k v^T`: what a commit needs to update the
    state.

    Attributes:
        inputs: inputs of the convolution, a pytree of arrays `f[B, W, ...]`.
        keys: `f32[B, W, G, N]`, the keys `k`.
        values: `f32[B, W, H, P]`, the values `v`, or with the delta rule the corrected values `u`; the number of heads
            `H` is a multiple of the number of groups `G`.
        total: `f32[B, W, H, 2]`, the sum of the decays `g` over a node and its ancestors in the window, as a multiple
            of `1 / GRID` and a remainder; `f32[B, W, H, N, 2]` if channels have decays of their own.
    """

    inputs: PyTree
    keys: Array
    values: Array
    total: Array


@struct
class LinearRecurrent(Sized, DraftBase):
    """The state of each linear recurrence after the verified text.

    Attributes:
        rings: for each layer the last `R` inputs of its convolution, oldest first, a pytree of arrays `f[B, R, ...]`
            with zeros before the text. Embeddings of n-grams also have tokens, `i32[B, R]` with another `R`, and the
            token that ends a text before it.
        states: for each layer `f32[B, H, N, P]`, the matrix `S` of each head; None for a layer that has a convolution
            alone.
        length: `i32[B]`, number of tokens of the verified text.
        size: static; maximum number of tokens of a text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        replicated: static; the layers whose rings are not divided over the heads of a mesh, as they have none.
    """

    supports: ClassVar[frozenset[Feature]] = frozenset(("trees",))

    rings: tuple[PyTree, ...]
    states: tuple[Array | None, ...]
    length: Array
    size: int = static()
    given: PyTree = None
    replicated: tuple[int, ...] = static(default=())

    @property
    def layout(self) -> Layout:
        # The axis of heads, groups or channels is the first after that of nodes.
        spec = lambda path, x: PartitionSpec(DATA, *(None, MODEL) * (x.ndim > 2 and path[0].idx not in self.replicated))
        return Layout(specs=dict(rings=jax.tree_util.tree_map_with_path(spec, self.rings)))

    def before(self, layer: int, x: PyTree, window: Window | AttentionView, apart: int = 1) -> PyTree:
        """Returns the convolution's inputs at the `R` nearest ancestors of each node, the farthest first: a pytree of
        arrays `f[B, W, R, ...]`. `x` has the inputs at the nodes themselves, `f[B, W, ...]`. `window` is the window, or
        a view of it with the entry of nodes of earlier windows in `before`. Only every `apart`-th of these ancestors is
        taken, beginning with the farthest."""
        if window.before is not None:
            x = jax.tree.map(lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], 1), window.before.inputs, x)
        return jax.tree.map(lambda ring, x: _latest(ring, self.length, x, window.key_positions, window.visible(),
                                                    window.positions, apart), self.rings[layer], x)

    def history(self, layer: int, x: PyTree, window: Window | AttentionView) -> tuple[PyTree, Array, Array]:
        """Returns the inputs of the last `R` tokens of the text and of all nodes, a pytree of arrays `f[B, R + K,
        ...]`, their positions `i32[B, R + K]`, negative before the text, and which of them each node of the window
        sees, `bool[B, W, R + K]`. `x` and `window` are those of `before`."""
        if window.before is not None:
            x = jax.tree.map(lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], 1), window.before.inputs, x)
        ring = self.rings[layer]
        (B, R), W = jax.tree.leaves(ring)[0].shape[:2], window.positions.shape[1]
        where = self.length[:, None] - R + jnp.arange(R, dtype=jnp.int32)
        seen = jnp.broadcast_to(window.visible(), (B, W, window.key_positions.shape[1]))
        return (jax.tree.map(lambda ring, x: jnp.concatenate([ring.astype(x.dtype), x], 1), ring, x),
                jnp.concatenate([where, window.key_positions], 1),
                jnp.concatenate([jnp.ones((B, W, R), bool), seen], 2))

    def recur(self, layer: int, q: Array, k: Array, v: Array, decay: Array, x: PyTree,
              window: Window | AttentionView, *, chunk: int = 256, rate: Array | None = None) -> tuple[Array, Factors]:
        """Runs the recurrence over a window. Each node starts from its parent's state.

        Args:
            layer: number of the layer.
            q, k: `f[B, W, G, N]`, queries and keys.
            v: `f[B, W, H, P]`, values.
            decay: `f[B, W, H]`, the decay `g` of each head, at most 0; or `f[B, W, H, N]`, of each channel of its keys.
            x: inputs of the convolution, a pytree of arrays `f[B, W, ...]`, which are stored in the entry.
            window: the window, or a view of it with the `Factors` of nodes of earlier windows in `before`.
            chunk: number of nodes of a prompt that are computed together; time and memory of a node grow with it.
            rate: `f[B, W, H]`, the rates `b` of the delta rule; None: a recurrence without it.

        Returns:
            The outputs `f32[B, W, H, P]`, and the layer's entry.
        """
        q, k, v, decay = (a.astype(jnp.float32) for a in (q, k, v, decay))
        rate = None if rate is None else rate.astype(jnp.float32)
        state, W = self.states[layer], k.shape[1]
        assert state is not None
        if isinstance(window, Window) and window.is_prefill and W > chunk:
            y, v, total, _ = _chunks(state, q, k, v, decay, rate, window.live, chunk)
            return y, Factors(inputs=x, keys=k, values=v, total=total)
        seen, old = window.visible(), window.before
        above, own = seen[..., :-W], seen[..., -W:]
        total = _totals(own, decay)
        if old is None:
            known, mine = Factors(inputs=(), keys=k[:, :0], values=v[:, :0], total=total[:, :0]), own
        else:
            # The nearest ancestor of an earlier window has the sum of all of those.
            nearest = jnp.argmax(jnp.where(above, window.key_positions[:, None, :-W], -1), -1)
            total = total + jnp.where(_over(above.any(-1), total), take(old.total, nearest), 0)
            known, mine = old, seen
        if rate is not None:
            v = _written(state, k, v, total, rate, known, above, own)
        join = lambda old, new: jnp.concatenate([old, new], 1)
        y = _read(state, q, join(known.keys, k), join(known.values, v), total, join(known.total, total), mine)
        return y, Factors(inputs=x, keys=k, values=v, total=total)

    def commit(self, entries: Entries, slots: Array) -> LinearRecurrent:
        length = jnp.maximum(self.length, slots.max(1) + 1)
        rings: list[PyTree] = []
        states: list[Array | None] = []
        for ring, state, own in zip(self.rings, self.states, entries, strict=True):
            rings.append(jax.tree.map(lambda ring, x: _latest(
                ring, self.length, x, slots, (slots >= 0)[:, None], length[:, None])[:, 0].astype(ring.dtype),
                ring, own.inputs))
            states.append(None if state is None else _after(state, own.keys, own.values, own.total, slots))
        return self.replace(rings=tuple(rings), states=tuple(states), length=length)

    def tree_buffer(self, entries: Entries, room: int) -> LinearTreeBuffer:
        zeros = lambda x: jnp.zeros((x.shape[0], room, *x.shape[2:]), x.dtype)
        return LinearTreeBuffer(base=self, nodes=jax.tree.map(zeros, tuple(entries)),
                                positions=jnp.zeros((self.length.shape[0], room), jnp.int32))


@struct
class LinearTreeBuffer(Draftable):
    """Entries of the nodes of a draft tree, and the cache of the verified text.

    Attributes:
        base: the `LinearRecurrent` cache of the verified text.
        nodes: for each layer the entry of the nodes, with arrays `[B, room, ...]`.
        positions: `i32[B, room]`, positions of the nodes.
        sees: `bool[B, W, room]`, the nodes of this buffer that are ancestors of a node of the next window; None before
            `seen_by`.
    """

    base: Any
    nodes: tuple[Factors | ConvInputs, ...]
    positions: Array
    sees: Array | None = None

    def seen_by(self, sees: Array) -> LinearTreeBuffer:
        return self.replace(sees=sees)

    def _view(self, layer: int, window: Window) -> AttentionView:
        assert self.sees is not None
        return AttentionView(positions=window.positions, seen=jnp.concatenate([self.sees, window.visible()], 2),
                             key_positions=jnp.concatenate([self.positions, window.positions], 1),
                             before=self.nodes[layer])

    def before(self, layer: int, x: PyTree, window: Window, apart: int = 1) -> PyTree:
        """Returns the inputs at ancestors, some of which may be in this buffer; see `LinearRecurrent.before`."""
        return self.base.before(layer, x, self._view(layer, window), apart)

    def history(self, layer: int, x: PyTree, window: Window) -> tuple[PyTree, Array, Array]:
        """Returns the inputs that nodes see, some of them in this buffer; see `LinearRecurrent.history`."""
        return self.base.history(layer, x, self._view(layer, window))

    def recur(self, layer: int, q: Array, k: Array, v: Array, decay: Array, x: PyTree, window: Window, *,
              chunk: int = 256, rate: Array | None = None) -> tuple[Array, Factors]:
        """Runs the recurrence over a window whose nodes may have ancestors in this buffer; see
        `LinearRecurrent.recur`."""
        return self.base.recur(layer, q, k, v, decay, x, self._view(layer, window), chunk=chunk, rate=rate)

    def append(self, entries: Entries, positions: Array, at: Array) -> LinearTreeBuffer:
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), at, 1)
        return self.replace(nodes=jax.tree.map(put, self.nodes, tuple(entries)),
                            positions=put(self.positions, positions), sees=None)

    def commit(self, slots: Array) -> Any:
        return self.base.commit(self.nodes, slots)


def _latest(ring: Array, length: Array, x: Array, positions: Array, seen: Array, at: Array, apart: int = 1) -> Array:
    """Returns the inputs at every `apart`-th of the `R` positions before `at` (`i32[B, n]`), beginning with the
    farthest, `f[B, n, R / apart, ...]`.

    They come from the nodes that are `seen` (`bool[B, n, K]`) among those at `positions` (`i32[B, K]`) with inputs `x`,
    or else from the ring, which ends before position `length`.
    """
    R = ring.shape[1]
    if not R:
        return jnp.zeros((*at.shape, 0, *x.shape[2:]), x.dtype)
    place = at[..., None] - jnp.arange(R, 0, -apart, dtype=at.dtype)
    here = seen[:, :, None] & (positions[:, None, None] == place[..., None])
    old = take(ring, jnp.clip(place - length[:, None, None] + R, 0, R - 1))
    return jnp.where(_over(here.any(-1), old), take(x, jnp.argmax(here, -1)), old.astype(x.dtype))


def _parts(decay: Array) -> Array:
    """Splits a decay into a multiple of `1 / GRID` and the remainder, `f32[..., 2]`."""
    decay = jnp.maximum(decay, LEAST)
    high = jnp.round(decay * GRID) / GRID
    return jnp.stack([high, decay - high], -1)


def _totals(seen: Array, decay: Array) -> Array:
    """Returns the sum of `decay` (`f32[B, W, H]` or `f32[B, W, H, N]`) over the nodes that each node sees, with a last
    axis of its two parts."""
    return jnp.einsum("bij,bj...->bi...", seen.astype(jnp.float32), _parts(decay), precision=lax.Precision.HIGHEST)


def _over(mask: Array, x: Array) -> Array:
    """Returns a mask with as many axes as `x`."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


def _grown(x: Array, groups: int) -> Array:
    """Splits the axis of heads, `[B, W, H, ...]`, into groups and the heads of each, `[B, W, groups, H / groups,
    ...]`."""
    return x.reshape(*x.shape[:2], groups, x.shape[2] // groups, *x.shape[3:])


def _read(state: Array, q: Array, k: Array, v: Array, mine: Array, theirs: Array, seen: Array) -> Array:
    """Returns the outputs of nodes, `f32[B, W, H, P]`, from the state and from the nodes with keys `k` and values `v`.

    Args:
        mine, theirs: sums of decays `G_i` of the reading nodes, and of the nodes with `k` and `v`, `f32[B, .., H, 2]`.
        seen: `bool[B, W, K]`, True if a node is an ancestor, or the node itself.
    """
    B, W, G, _ = q.shape
    near = jnp.einsum("bgrij,bjgrp->bigrp", _scores(q, k, mine, theirs, seen), _grown(v, G))
    grouped, left = state.reshape(B, G, -1, *state.shape[2:]), _grown(jnp.exp(mine.sum(-1)), G)
    if left.ndim == 5:
        far = jnp.einsum("bigrn,bgrnp->bigrp", q[:, :, :, None] * left, grouped)
        return (near + far).reshape(B, W, *v.shape[2:])
    far = jnp.einsum("bign,bgrnp->bigrp", q, grouped)
    return (near + far * left[..., None]).reshape(B, W, *v.shape[2:])


def _scores(q: Array, k: Array, mine: Array, theirs: Array, seen: Array) -> Array:
    """Returns the products of queries and keys after the decay from each key to each query, `f32[B, G, H / G, W, K]`, 0
    where it is not seen; the arguments are those of `_read`."""
    G = q.shape[2]
    # the difference of multiples is exact
    apart = (mine[:, :, None] - theirs[:, None]).sum(-1)                                # [B, W, K, H (, N)]
    decay = jnp.where(_over(seen, apart), jnp.exp(jnp.minimum(apart, 0)), 0)
    decay = decay.reshape(*decay.shape[:3], G, decay.shape[3] // G, *decay.shape[4:])
    if decay.ndim == 6:
        return jnp.einsum("bign,bjgn,bijgrn->bgrij", q, k, decay)
    return jnp.einsum("bign,bjgn->bgij", q, k)[:, :, None] * decay.transpose(0, 3, 4, 1, 2)


def _written(state: Array, k: Array, v: Array, total: Array, rate: Array, known: Factors, above: Array, seen: Array
             ) -> Array:
    """Returns the values `u` that the delta rule writes at nodes, `f32[B, W, H, P]`.

    Args:
        state, k, v, rate: see `LinearRecurrent.recur`.
        total: sums of decays of the nodes.
        known: nodes of earlier windows.
        above: `bool[B, W, K]`, nodes of earlier windows that are ancestors.
        seen: `bool[B, W, W]`, nodes of the window that are ancestors, or the node itself. Ancestors have lower indices.
    """
    (_, W, G, _), rate = k.shape, rate[..., None]
    told = rate * (v - _read(state, k, known.keys, known.values, total, known.total, above))
    if W == 1:
        return told
    overlaps = _scores(k, k, total, total, seen)
    system = jnp.tril(overlaps * _grown(rate, G).transpose(0, 2, 3, 1, 4), -1)          # [B, G, H / G, W, W]
    solved = jax.scipy.linalg.solve_triangular(system, _grown(told, G).transpose(0, 2, 3, 1, 4), lower=True,
                                               unit_diagonal=True)
    return solved.transpose(0, 3, 1, 2, 4).reshape(v.shape)


def _after(state: Array, k: Array, v: Array, total: Array, slots: Array) -> Array:
    """Returns the state after the nodes of a path, those whose position in `slots` (`i32[B, W]`) is not -1."""
    kept = slots >= 0
    end = take(total, jnp.argmax(slots, 1))
    end = jnp.where(_over(kept.any(1), end), end, 0)
    apart = (end[:, None] - total).sum(-1)
    weight = jnp.where(_over(kept, apart), jnp.exp(jnp.minimum(apart, 0)), 0)
    # nodes that are not kept may hold anything, even NaN
    v = jnp.where(kept[..., None, None], v, 0)
    k = jnp.where(kept[..., None, None], k, 0)
    if weight.ndim == 4:
        weight = k[:, :, :, None] * _grown(weight, k.shape[2])
        added = jnp.einsum("bwgrn,bwgrp->bgrnp", weight, _grown(v, k.shape[2])).reshape(state.shape)
        return state * jnp.exp(end.sum(-1))[..., None] + added
    v = v * weight[..., None]
    added = jnp.einsum("bwgn,bwgrp->bgrnp", k, _grown(v, k.shape[2])).reshape(state.shape)
    return state * jnp.exp(end.sum(-1))[..., None, None] + added


def chained(state: Array, q: Array, k: Array, v: Array, decay: Array, live: Array, chunk: int,
            rate: Array | None = None) -> tuple[Array, Array]:
    """Runs the recurrence over a chain, without a cache.

    Args:
        state: `f32[B, H, N, P]`, the state before the chain.
        q, k, v, decay, chunk, rate: see `LinearRecurrent.recur`.
        live: `bool[B, W]`, nodes that change the state.

    Returns:
        The outputs `f32[B, W, H, P]`, and the state after the live nodes.
    """
    y, _, _, state = _chunks(state, q, k, v, decay, rate, live, min(chunk, live.shape[1]))
    return y, state


def _chunks(state: Array, q: Array, k: Array, v: Array, decay: Array, rate: Array | None, live: Array, chunk: int
            ) -> tuple[Array, Array, Array, Array]:
    """Runs a chain, `chunk` nodes at a time. Returns outputs, values to be added to the state, sums of decays, and the
    state after the live nodes."""
    B, W = live.shape
    pad = -W % chunk
    cut = lambda a: jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2)).reshape(
        B, -1, chunk, *a.shape[2:]).swapaxes(0, 1)
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))

    def one(carry: tuple[Array, Array], part: Any) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        state, before = carry
        q, k, v, decay, rate, live = part
        seen = (causal & live[:, None]) | jnp.eye(chunk, dtype=bool)
        total = _totals(causal & live[:, None], decay)
        if rate is not None:
            none = Factors(inputs=(), keys=k[:, :0], values=v[:, :0], total=total[:, :0])
            v = _written(state, k, v, total, rate, none, seen[..., :0], seen)
        y = _read(state, q, k, v, total, total, seen)
        slots = jnp.where(live, jnp.arange(chunk, dtype=jnp.int32), -1)
        return (_after(state, k, v, total, slots), before + total[:, -1]), (y, v, before[:, None] + total)

    zero = jnp.zeros((B, *decay.shape[2:], 2), jnp.float32)
    given = jax.tree.map(cut, (q, k, v, decay, rate, live))
    (state, _), found = lax.scan(one, (state, zero), given)
    y, v, total = (a.swapaxes(0, 1).reshape(B, -1, *a.shape[3:])[:, :W] for a in found)
    return y, v, total, state
