"""Where drafts come from: `Draft`, which proposes whole chains or trees, and `Source`, which is asked node by node.

A `Source` gives the distribution of what follows any node of a tree; a `Shape` decides which nodes are asked for, and
`Grown` joins the two into a `Draft`. So each tree rule is written once, for draft models, skipped layers and tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Window
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.policy.draw import draw
from decodax.speculative.tree import Proposal
from decodax.struct import Struct, struct

Drawn = Literal["coupled", "distinct", "independent"]
"""How a verifier wants sampled drafts: "coupled", the first child by the uniform that the target's own draw will take
and the others the most likely (q is not needed); "distinct", children of a node without replacement, q reported;
"independent", each child a draw of its own from q, reported."""


class Draft(Protocol):
    """A maker of chains or trees: a frozen dataclass, static under jit."""

    @property
    def length(self) -> int:
        """`K`, the most drafts on one path."""

    @property
    def weights(self) -> Any:
        """Weights that it was made with, a pytree: what becomes `Params.draft`."""

    def bare(self) -> Any:
        """The draft without its weights."""

    def init(self, params: Params, s: State) -> Any:
        """Its state for a prompt; every leaf with an explicit dtype."""

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        """What may follow each row's newest token. Deterministic drafts need not look at `drawn`."""

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        """Learns from a scored window and what was decided of it (None: a prefill chunk), whoever proposed it."""


class Source(Protocol):
    """A next-token distribution at any node of a draft tree: a frozen dataclass, static under jit.

    `weights`, `bare`, `init` and `observe` are those of `Draft`; `observe` sees the state that `extend` left.
    """

    @property
    def weights(self) -> Any: ...
    def bare(self) -> Any: ...
    def init(self, params: Params, s: State) -> Any: ...
    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any: ...

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Array]:
        """The state with room for so many tree nodes, and the logits `f32[B, 1, V]` after the newest token."""

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Array]:
        """Logits `f32[B, w, V]` after the nodes of a level."""

    def place(self, state: Any, slots: Array) -> Any:
        """Told where the tree nodes that it expanded stand in the window: `slots` `i32[B or 1, room]`, -1 nowhere."""


class Stateless:
    """What a draft or source without weights and state inherits."""

    weights: Any = None

    def bare(self) -> Any:
        return self

    def init(self, params: Params, s: State) -> Any:
        return None

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return state

    def place(self, state: Any, slots: Array) -> Any:
        return state


@struct
class Level(Struct):
    """Tree nodes that a source is asked about together.

    Attributes:
        tokens: `i32[B, w]`. positions: `i32[B, w]`.
        parents: `i32[B, w]`, the slot of each one's parent: 0 the newest token, `i` the `i`-th node expanded before.
        sees: `bool[B, w, room]`, which nodes expanded before are ancestors; entry 0 is the first.
        at: `i32[]`, how many nodes were expanded before.
    """

    tokens: Array
    positions: Array
    parents: Array
    sees: Array
    at: Array


@struct
class Children(Struct):
    """Candidates for what follows some nodes.

    Attributes:
        tokens: `i32[B, w, R]` in the order in which they are to be tried. live: `bool[B, w, R]`.
        log_p: `f32[B, w, R]` the source's log-probability of each, at temperature 1.
        log_q: `f32[B, w, V]` what they were drawn from, or None where nobody asks.
    """

    tokens: Array
    live: Array
    log_p: Array
    log_q: Array | None


@struct
class Growth(Struct):
    """A tree in the making: the newest token in slot 0, then the nodes expanded so far.

    Attributes:
        tokens: `i32[B, 1 + room]`. sees: `bool[B, 1 + room, 1 + room]`, ancestors and self.
        filled: `i32[]`, slots in use. source: the source's state.
    """

    tokens: Array
    sees: Array
    filled: Array
    source: Any


@dataclasses.dataclass(frozen=True)
class Grower:
    """What a shape grows its tree with, for one round. It lives inside one trace."""

    source: Source
    params: Params
    policy: Any
    s: State
    drawn: Drawn

    def start(self, state: Any, room: int, children: int) -> tuple[Growth, Children]:
        """An empty tree with room for so many nodes below the newest token, and candidates for the first level."""
        B = self.s.batch
        state, logits = self.source.start(self.params, self.s, state, room)
        tokens = jnp.zeros((B, 1 + room), jnp.int32).at[:, 0].set(self.s.newest)
        sees = jnp.broadcast_to(jnp.eye(1 + room, dtype=bool), (B, 1 + room, 1 + room))
        g = Growth(tokens=tokens, sees=sees, filled=jnp.ones((), jnp.int32), source=state)
        return g, self._children(g, logits, jnp.zeros((B, 1), jnp.int32), children)

    def expand(self, g: Growth, tokens: Array, parents: Array, children: int) -> tuple[Growth, Children]:
        """Puts nodes (`tokens` `i32[B, w]` below the slots `parents` `i32[B or 1, w]`) into the tree and asks what
        follows them."""
        B, w = tokens.shape
        parents = jnp.broadcast_to(parents, (B, w)).astype(jnp.int32)
        slots = g.filled + jnp.arange(w, dtype=jnp.int32)
        above = jnp.take_along_axis(g.sees, parents[:, :, None], 1)
        own = above | (slots[:, None] == jnp.arange(g.tokens.shape[1]))
        level = Level(tokens=tokens, positions=self.s.length[:, None] - 1 + above.sum(-1, dtype=jnp.int32),
                      parents=parents, sees=above[:, :, 1:], at=g.filled - 1)
        state, logits = self.source.extend(self.params, self.s, g.source, level)
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, g.filled, 1)
        g = Growth(tokens=put(g.tokens, tokens), sees=put(g.sees, own), filled=g.filled + w, source=state)
        return g, self._children(g, logits, jnp.broadcast_to(slots, (B, w)), children)

    def _children(self, g: Growth, logits: Array, nodes: Array, count: int) -> Children:
        V = logits.shape[-1]
        depth = g.sees.sum(-1, dtype=jnp.int32) - 1
        window = Window(tokens=g.tokens, positions=self.s.length[:, None] - 1 + depth, mask=g.sees,
                        live=jnp.ones(g.tokens.shape, bool))
        raw, warm = self.policy.on_draft(self.s, window, logits, nodes)
        log_p = jax.nn.log_softmax(raw)
        predicts = jnp.take_along_axis(window.positions, nodes, 1) + 1
        # where the policy leaves one token the draft ranks all: any q keeps the verifiers exact
        log_q = jnp.where(self.policy.greedy[:, None, None], log_p, jax.nn.log_softmax(warm))
        first = jnp.arange(count) == 0
        tokens = []
        left = log_q if self.drawn != "coupled" else log_p
        for i in range(count):
            if self.drawn == "coupled":
                best = jnp.argmax(left, -1).astype(jnp.int32)
                if i == 0:
                    own = draw(warm, keys.uniforms(self.s.key, predicts, Purpose.TOKEN))
                    best = jnp.where((own >= 0) & ~self.policy.greedy[:, None], own, best)
                token = best
            else:
                token = jnp.where(self.policy.greedy[:, None], jnp.argmax(left, -1).astype(jnp.int32),
                                  draw(left, self._uniforms(predicts, nodes * count + i)))
            tokens.append(token)
            if self.drawn != "independent":
                left = jnp.where(jnp.arange(V) == token[..., None], -jnp.inf, left)
        found = jnp.stack(tokens, -1)
        at = jnp.take_along_axis(log_p, jnp.maximum(found, 0), -1)
        live = (found >= 0) & (first | jnp.isfinite(at))
        return Children(tokens=jnp.maximum(found, 0), live=live, log_p=jnp.where(live, at, -jnp.inf),
                        log_q=None if self.drawn == "coupled" else log_q)

    def _uniforms(self, positions: Array, salt: Array) -> Array:
        """As `keys.uniforms` for drafts, salted node by node: nodes of one depth must not share their noise."""
        one = lambda key, position, salt: jax.random.uniform(
            keys.at(key, position, Purpose.DRAFT, salt), (2,), jnp.float32)
        return jax.vmap(jax.vmap(one, (None, 0, 0)))(self.s.key, positions, salt)


class Shape(Protocol):
    """How a tree grows: a frozen dataclass, static under jit."""

    @property
    def length(self) -> int:
        """The most drafts on one path."""

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        """A tree from the source's state: the proposal, the source's state after it, and for each node that was
        expanded its window node (`i32[B or 1, room]`, -1 where it was left out)."""


@dataclasses.dataclass(frozen=True)
class Grown:
    """A `Source` grown into trees by a `Shape`."""

    source: Any
    shape: Shape | None = None

    @property
    def form(self) -> Shape:
        from decodax.speculative.shapes import Chain      # a shape builds on this module
        return self.shape or getattr(self.source, "shape", None) or Chain()

    @property
    def length(self) -> int:
        return self.form.length

    @property
    def weights(self) -> Any:
        return self.source.weights

    def bare(self) -> Grown:
        return dataclasses.replace(self, source=self.source.bare())

    def init(self, params: Params, s: State) -> Any:
        return self.source.init(params, s)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        proposal, state, nodes = self.form.grow(Grower(self.source, params, policy, s, drawn), state)
        return proposal, self.source.place(state, nodes)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.source.observe(s, window, out, decision, state)
