"""A cache of recurrent states: one state for each layer and row, of the same size for every length of the text.

A recurrent state cannot leave out tokens later. Therefore the entry of a node is the state after it, and `commit` keeps
the state of the last accepted node. The state of a node is computed from that of its parent, in chains and trees. In a
prefill (`Window.is_prefill`) only the last state is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.cache.tree_buffer import AttentionView
from decodax.common.axes import DATA, MODEL
from decodax.common.struct import static, struct
from decodax.core.cache import Entries, Feature, Layout, PyTree, Sized
from decodax.core.capabilities import Draftable, DraftBase
from decodax.core.window import Window, take

Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""One step of a recurrence. Takes the state before a node and the node's input, and returns the state after it and its
output; all are pytrees of arrays `[B, ...]`."""

Along = Callable[[PyTree, PyTree, Array], tuple[PyTree, PyTree]]
"""The same recurrence over a chain. Takes the state before it, the inputs `[B, W, ...]`, and the live nodes, `bool[B,
W]`. Returns the state after the live nodes, and the outputs `[B, W, ...]`."""


@struct
class Recurrent(Sized, DraftBase):
    """The state of each recurrent layer after the verified text.

    Attributes:
        states: for each layer a pytree of arrays `[B, ...]`. A mesh divides them along the next axis, those named
            "ring", `[B, R, ...]`, along the one after it.
        length: `i32[B]`, number of tokens of the verified text.
        size: static; maximum number of tokens of a text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
    """

    supports: ClassVar[frozenset[Feature]] = frozenset(("trees",))

    states: tuple[PyTree, ...]
    length: Array
    size: int = static()
    given: PyTree = None

    @property
    def layout(self) -> Layout:
        return Layout(specs=dict(states=jax.tree_util.tree_map_with_path(_spec, self.states)))

    def walk(self, layer: int, step: Step, x: PyTree, window: Window | AttentionView, along: Along | None = None
             ) -> tuple[PyTree, PyTree]:
        """Runs a recurrence over a window. Each node starts from its parent's state.

        Args:
            layer: number of the layer.
            step: one step of the recurrence.
            x: inputs of the nodes, `[B, W, ...]`.
            window: the window, or an `AttentionView` of it with the states after nodes of earlier windows in `before`.
            along: computes all steps of a prefill together. None: `step` runs once for each node.

        Returns:
            The outputs of `step`, `[B, W, ...]`, and the layer's entry.
        """
        state = self.states[layer]
        if isinstance(window, AttentionView):
            W = window.positions.shape[1]
            sees, own = window.seen[:, :, :-W], window.seen[:, :, -W:]
            start = _start(state, window.before, sees, window.key_positions[:, :-W], window.positions)
            return _down(step, start, x, _above(own, window.positions))
        if window.is_prefill and along is not None:
            state, y = along(state, x, window.live)
            return y, jax.tree.map(lambda a: a[:, None], state)
        if window.is_prefill:
            return stepped(step, state, x, window.live)
        wide = jax.tree.map(lambda a: jnp.broadcast_to(a[:, None], (a.shape[0], window.width, *a.shape[1:])), state)
        return _down(step, wide, x, _above(window.visible(), window.positions))

    def commit(self, entries: Entries, slots: Array) -> Recurrent:
        last, some = jnp.argmax(slots, 1), (slots >= 0).any(1)

        def put(old: Array, new: Array) -> Array:
            new = new[:, 0] if new.shape[1] == 1 else take(new, last)
            return jnp.where(some.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)

        return self.replace(states=jax.tree.map(put, self.states, tuple(entries)),
                            length=jnp.maximum(self.length, slots.max(1) + 1))

    def tree_buffer(self, entries: Entries, room: int) -> RecurrentTreeBuffer:
        zeros = lambda x: jnp.zeros((x.shape[0], room, *x.shape[1:]), x.dtype)
        return RecurrentTreeBuffer(base=self, states=jax.tree.map(zeros, self.states),
                                   positions=jnp.zeros((self.length.shape[0], room), jnp.int32))


@struct
class RecurrentTreeBuffer(Draftable):
    """Recurrent states of the nodes of a draft tree, and the cache of the verified text.

    Attributes:
        base: the `Recurrent` cache of the verified text.
        states: for each layer the states after the nodes, `[B, room, ...]`.
        positions: `i32[B, room]`, positions of the nodes.
        sees: `bool[B, W, room]`, the nodes of this buffer that are ancestors of a node of the next window; None before
            `seen_by`.
    """

    base: Any
    states: tuple[PyTree, ...]
    positions: Array
    sees: Array | None = None

    def seen_by(self, sees: Array) -> RecurrentTreeBuffer:
        return self.replace(sees=sees)

    def walk(self, layer: int, step: Step, x: PyTree, window: Window, along: Along | None = None
             ) -> tuple[PyTree, PyTree]:
        """Runs a recurrence over a window whose nodes may have their parents in this buffer; see `Recurrent.walk`."""
        assert self.sees is not None
        start = _start(self.base.states[layer], self.states[layer], self.sees, self.positions, window.positions)
        return _down(step, start, x, _above(window.visible(), window.positions))

    def append(self, entries: Entries, positions: Array, at: Array) -> RecurrentTreeBuffer:
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), at, 1)
        return self.replace(states=jax.tree.map(put, self.states, tuple(entries)),
                            positions=put(self.positions, positions), sees=None)

    def commit(self, slots: Array) -> Any:
        return self.base.commit(self.states, slots)


def _spec(path: Any, x: Array) -> PartitionSpec:
    """Returns the layout of an array; "ring" has an axis of nodes before the one that a mesh divides."""
    return PartitionSpec(DATA, *[None] * (getattr(path[-1], "key", None) == "ring"), MODEL)


def _start(state: PyTree, kept: PyTree, sees: Array, at: Array, positions: Array) -> PyTree:
    """Returns the state from which each node starts, `[B, W, ...]`, unless its parent is in its own window.

    Args:
        state: the state after the verified text, `[B, ...]`.
        kept: states after the nodes of earlier windows, `[B, n, ...]`.
        sees: `bool[B, W, n]`, the nodes of earlier windows that are ancestors of a node.
        at: `i32[B, n]`, positions of the nodes of earlier windows.
        positions: `i32[B, W]`, positions of the nodes.
    """
    parent = sees & (at[:, None, :] == positions[:, :, None] - 1)
    found, node = parent.any(-1), jnp.argmax(parent, -1)
    pick = lambda kept, base: jnp.where(found.reshape(*found.shape, *[1] * (base.ndim - 1)), take(kept, node),
                                        base[:, None])
    return jax.tree.map(pick, kept, state)


def _above(seen: Array, positions: Array) -> Array:
    """Returns the index of each node's parent in its window, `i32[B, W]`; -1 if the parent is not in it. `seen`,
    `bool[B, W, W]`, and `positions`, `i32[B, W]`, are those of the window."""
    parent = seen & (positions[:, :, None] - 1 == positions[:, None, :])
    return jnp.where(parent.any(-1), jnp.argmax(parent, -1), -1).astype(jnp.int32)


def stepped(step: Step, state: PyTree, x: PyTree, live: Array) -> tuple[PyTree, PyTree]:
    """Runs `step` over a chain and keeps only the state after its last live node, as an entry `[B, 1, ...]`."""
    def visit(state: PyTree, node: Any) -> tuple[PyTree, PyTree]:
        x, live = node
        new, y = step(state, x)
        keep = lambda a, b: jnp.where(live.reshape(-1, *[1] * (a.ndim - 1)), a.astype(b.dtype), b)
        return jax.tree.map(keep, new, state), y

    first = lambda a: a.swapaxes(0, 1)
    state, y = lax.scan(visit, state, (jax.tree.map(first, x), live.T))
    return jax.tree.map(first, y), jax.tree.map(lambda a: a[:, None], state)


def _down(step: Step, start: PyTree, x: PyTree, parent: Array) -> tuple[PyTree, PyTree]:
    """Runs `step` over a tree, parents before children. A node whose parent is not in the window begins with its state
    in `start`, `[B, W, ...]`."""
    def visit(states: PyTree, node: Any) -> tuple[PyTree, PyTree]:
        i, x, up = node
        above = jax.tree.map(lambda a: take(a, jnp.where(up < 0, i, up)), states)      # its own place holds the start
        new, y = step(above, x)
        return jax.tree.map(lambda a, b: a.at[:, i].set(b.astype(a.dtype)), states, new), y

    first = lambda a: a.swapaxes(0, 1)
    nodes = (jnp.arange(parent.shape[1], dtype=jnp.int32), jax.tree.map(first, x), parent.T)
    states, y = lax.scan(visit, start, nodes)
    return jax.tree.map(first, y), states
