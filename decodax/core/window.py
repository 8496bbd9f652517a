"""The window: the tokens that one model call scores, and who sees whom among them.

Every decoding method proposes a window. A chain of drafts is a causal window, a draft tree shows each node its
ancestors, a diffusion canvas is bidirectional. `W` is the only shape a method chooses.
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
    """The tokens of one model call.

    Attributes:
        tokens: `i32[B, W]`, token ids.
        positions: `i32[B, W]`, absolute positions for the rotary embedding; nodes of a tree use their depth.
        mask: `bool[B or 1, W, W]`; `mask[b, i, j]` says whether node `i` sees node `j` of the window. Every node sees
            all cached entries, unless `cached` restricts them.
        live: `bool[B, W]`; dead nodes only fill up the shape, and no node sees them.
        cached: `bool[B, S]`, cache slots that the nodes see. None: all slots that are filled; `bool[B, 0]`: none. An
            algorithm that scores a position again must hide the position's old entry.
        embeddings, embedded: `f[B, W, D]` and `bool[B, W]`; nodes where `embedded` is set read `embeddings` instead of
            the embedding of their token (soft prompts, images, latent thoughts). None: no node does.
        hints: structs that one part of a method passes to another part, to the model, or to a model wrapper; see
            `hint`. Code that does not know a hint ignores it.
        is_prefill: static; True if the nodes are a chain and every live node will be committed, as in a prefill. A
            recurrent layer then keeps the last state only.
        num_scored: static; number of leading nodes whose next-token distributions are needed; the nodes after them are
            only read, and the leading nodes do not see them. None: any node may be scored.
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
        """The hint of this type, or None."""
        return next((hint for hint in self.hints if isinstance(hint, kind)), None)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def select(self, rows: Array) -> Window:
        """The window whose row `i` is this one's row `rows[i]` (`i32[B']`)."""
        one = lambda x: x if x.shape[0] == 1 else x[rows]       # a mask may be one for all rows
        return jax.tree.map(one, self)

    def ordered(self, order: np.ndarray) -> Window:
        """The same nodes, node `order[i]` at place `i` (`i32[W]`); without embeddings."""
        some = lambda x: x[:, order]
        return self.replace(tokens=some(self.tokens), positions=some(self.positions), live=some(self.live),
                            mask=self.mask[:, order][:, :, order])

    def part(self, start: int, stop: int) -> Window:
        """Nodes `start` to `stop`, which see none of the others; without embeddings."""
        some = lambda x: x[:, start:stop]
        return self.replace(tokens=some(self.tokens), positions=some(self.positions), live=some(self.live),
                            mask=self.mask[:, start:stop, start:stop])

    @property
    def key_positions(self) -> Array:
        """`i32[B, K]`: positions of the keys that `visible` is about."""
        return self.positions

    @property
    def before(self) -> None:
        """The entries of nodes of earlier windows (`AttentionView`): there are none."""
        return None

    def visible(self) -> Array:
        """`bool[B, W, W]`: the mask without dead keys; each node sees at least itself, so no softmax is empty."""
        return (self.mask & self.live[:, None, :]) | jnp.eye(self.width, dtype=bool)


def causal(tokens: Array, start: Array, live: Array | None = None) -> Window:
    """A chain: node `i` stands at position `start + i` and sees the nodes before it. `start`: `i32[B]`."""
    width = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, width, width), bool))
    return _window(tokens, start, mask, live)


def bidirectional(tokens: Array, start: Array, live: Array | None = None) -> Window:
    """A canvas: node `i` stands at position `start + i`, every live node sees every live node."""
    width = tokens.shape[1]
    return _window(tokens, start, jnp.ones((1, width, width), bool), live)


def block_causal(tokens: Array, start: Array, block: int, live: Array | None = None) -> Window:
    """Blocks of `block` positions, counted from position 0: a node sees all of its own block and of those before it.

    >>> w = block_causal(jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32), 2)
    >>> w.mask[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    window = bidirectional(tokens, start, live)
    number = window.positions // block
    return window.replace(mask=number[:, None, :] <= number[:, :, None])


def causal_prefix(tokens: Array, start: Array, prefix: Array, live: Array | None = None) -> Window:
    """A chain that ends in a canvas: nodes at positions below `prefix` (`i32[B]`) see those before them; the others see
    those and one another.

    >>> w = causal_prefix(jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, 2))
    >>> w.mask[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    window = causal(tokens, start, live)
    canvas = window.positions >= prefix[:, None]
    return window.replace(mask=window.mask | (canvas[:, :, None] & canvas[:, None, :]))


def _window(tokens: Array, start: Array, mask: Array, live: Array | None) -> Window:
    positions = start[:, None].astype(jnp.int32) + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    live = jnp.ones(tokens.shape, bool) if live is None else live
    return Window(tokens=tokens.astype(jnp.int32), positions=positions, mask=mask, live=live)


def parents(window: Window) -> Array:
    """`i32[B, W]`: for each node the window node one position before it that it sees, or -1 where that is cached.

    >>> w = causal(jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32))
    >>> parents(w).tolist()
    [[-1, 0, 1]]
    """
    before = window.positions[:, :, None] - 1 == window.positions[:, None, :]
    seen = window.mask & before & ~jnp.eye(window.width, dtype=bool)
    return jnp.where(seen.any(-1), jnp.argmax(seen, -1), -1).astype(jnp.int32)


def take(x: Array, index: Array) -> Array:
    """`x[b, index[b, ...]]` for each row `b`: the gather along the window (or any second) axis."""
    return jax.vmap(lambda row, i: row[i])(x, index)


def each_node(one: Callable[..., Any], *nodes: Any) -> Any:
    """What a function gives for one node of each row after the other, arrays `[B, ...]` of arrays `[B, ...]`, for all
    nodes of a window: arrays `[B, W, ...]` of arrays `[B, W, ...]`."""
    moved = jax.tree.map(lambda x: x.swapaxes(0, 1), nodes)
    if jax.tree.leaves(moved)[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[:, None], one(*jax.tree.map(lambda x: x[0], moved)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), lax.map(lambda node: one(*node), moved))
