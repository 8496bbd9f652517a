"""The window: the tokens that one model call scores, with a mask of which tokens attend to which.

Every decoding method proposes a window. A chain of drafts is a causal window, in a draft tree each node attends to its
ancestors, a diffusion canvas is bidirectional. A method chooses no other shape than the width `W`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.struct import Struct, static, struct

T = TypeVar("T")


@struct
class Window(Struct):
    """The tokens of one model call. A token of the window is called a node.

    Attributes:
        tokens: `i32[B, W]`, token ids.
        positions: `i32[B, W]`, absolute positions for the rotary embedding; nodes of a tree use their depth.
        mask: `bool[B or 1, W, W]`; True if node `i` attends to node `j` of the window. Every node attends to all cached
            entries, unless `cached` restricts them.
        live: `bool[B, W]`; False for padding nodes, to which no other node attends.
        cached: `bool[B, S]`, cache slots to which the nodes attend. None: all filled slots; `bool[B, 0]`: none. An
            algorithm that scores a position again must hide the position's old entry.
        embeddings: `f[B, W, D]`, vectors that replace the embedding of a node's token (soft prompts, images, latent
            thoughts). None: there are none.
        embedded: `bool[B, W]`, the nodes for which `embeddings` is used; None: no node.
        hints: structs that one part of a method passes to another part, to the model, or to a model wrapper; see
            `hint`. Code that does not know a hint ignores it.
        is_prefill: static; True if the nodes are a chain and every live node will be committed, as in a prefill. A
            recurrent layer then keeps the last state only.
        num_scored: static; number of leading nodes whose next-token distributions are needed. The leading nodes do not
            attend to the nodes after them. None: the distributions of all nodes may be needed.
    """

    tokens: Array
    positions: Array
    mask: Array
    live: Array
    cached: Array | None = None
    embeddings: Array | None = None
    embedded: Array | None = None
    hints: tuple[Any, ...] = ()
    is_prefill: bool = static(default=False)
    num_scored: int | None = static(default=None)

    def hint(self, kind: type[T]) -> T | None:
        """Returns the hint of the type `kind`, or None."""
        return next((hint for hint in self.hints if isinstance(hint, kind)), None)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def select(self, rows: Array) -> Window:
        """Returns the window whose row `i` is row `rows[i]` of this one (`i32[B']`)."""
        one = lambda x: x if x.shape[0] == 1 else x[rows]       # a mask may be one for all rows
        return jax.tree.map(one, self)

    def ordered(self, order: np.ndarray) -> Window:
        """Returns this window with its nodes in another order: node `order[i]` (`i32[W]`) is moved to index `i`.
        Embeddings are not moved."""
        some = lambda x: x[:, order]
        return self.replace(tokens=some(self.tokens), positions=some(self.positions), live=some(self.live),
                            mask=self.mask[:, order][:, :, order])

    def part(self, start: int, stop: int) -> Window:
        """Returns the nodes from `start` to `stop` as a window; they must not attend to the others. Embeddings are not
        cut."""
        some = lambda x: x[:, start:stop]
        return self.replace(tokens=some(self.tokens), positions=some(self.positions), live=some(self.live),
                            mask=self.mask[:, start:stop, start:stop])

    @property
    def key_positions(self) -> Array:
        """Positions of the keys to which the mask of `visible()` refers, `i32[B, W]`: the positions of the window's own
        nodes."""
        return self.positions

    @property
    def before(self) -> None:
        """Cache entries of nodes from earlier windows to which the nodes attend. Always None for a `Window`;
        `AttentionView` may have some."""
        return None

    def visible(self) -> Array:
        """Returns the attention mask among the window's nodes, `bool[B, W, W]`: `mask` without keys of dead nodes. Each
        node attends at least to itself, so no softmax is empty."""
        return (self.mask & self.live[:, None, :]) | jnp.eye(self.width, dtype=bool)


def causal(tokens: Array, start: Array, live: Array | None = None) -> Window:
    """Returns a window in which node `i` has position `start + i` (`start` is `i32[B]`) and attends to itself and the
    nodes before it. `live`: see `Window`; None: all."""
    width = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, width, width), bool))
    return _window(tokens, start, mask, live)


def bidirectional(tokens: Array, start: Array, live: Array | None = None) -> Window:
    """Returns a window in which node `i` has position `start + i` (`start` is `i32[B]`) and attends to all live
    nodes."""
    width = tokens.shape[1]
    return _window(tokens, start, jnp.ones((1, width, width), bool), live)


def _window(tokens: Array, start: Array, mask: Array, live: Array | None) -> Window:
    positions = start[:, None].astype(jnp.int32) + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    live = jnp.ones(tokens.shape, bool) if live is None else live
    return Window(tokens=tokens.astype(jnp.int32), positions=positions, mask=mask, live=live)


def parents(window: Window) -> Array:
    """Returns the index of each node's parent, `i32[B, W]`: the node one position before it to which it attends. -1:
    the parent is in the cache.

    >>> w = causal(jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32))
    >>> parents(w).tolist()
    [[-1, 0, 1]]
    """
    before = window.positions[:, :, None] - 1 == window.positions[:, None, :]
    seen = window.mask & before & ~jnp.eye(window.width, dtype=bool)
    return jnp.where(seen.any(-1), jnp.argmax(seen, -1), -1).astype(jnp.int32)


def take(x: Array, index: Array) -> Array:
    """Returns `x[b, index[b, ...]]` for each row `b`, a gather along the second axis."""
    return jax.vmap(lambda row, i: row[i])(x, index)


def each_node(one: Callable[..., Any], *nodes: Any) -> Any:
    """Applies a function of one node of each row, `one`: `[B, ...]` to `[B, ...]`, to all nodes of a window, one after
    the other: `[B, W, ...]` to `[B, W, ...]`."""
    moved = jax.tree.map(lambda x: x.swapaxes(0, 1), nodes)
    if jax.tree.leaves(moved)[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[:, None], one(*jax.tree.map(lambda x: x[0], moved)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), lax.map(lambda node: one(*node), moved))
