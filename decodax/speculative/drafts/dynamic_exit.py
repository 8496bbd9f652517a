"""Early exit whose layer and draft length are chosen anew for each round.

DEL (Entezari Zarch et al. 2025). What layer `l` would have drafted is known without drafting: its state in the
verification, put through the target's norm and head, gives a *shadow token* at each node. Shadow tokens are compared
with what the target decided there, at the newest token and the accepted drafts (behind a rejected one the context is
wrong), and the acceptance of each layer is the share that agreed, older rounds fading:

    a_l = sum_r decay^(R-r) matches_l(r) / sum_r decay^(R-r) nodes(r)

The next round drafts `d` tokens with the first `l` layers, the pair with the most tokens per layer run,

    TPL(l, d) = (1 + a_l + ... + a_l^d) / (d l + L)

Each row chooses for itself, so its drafts do not depend on its batch mates; a draft step runs as deep, and drafting
goes on as long, as the row that asks for most. The chain may also end after a draft below a confidence (`least`), the
paper's exit within a round, here with a fixed threshold.

Where the paper leaves it open: `decay` is 0.95; before any evidence layer `l` counts as accepted `l` times in `L`, with
the weight of one node. Shadow tokens cost a head for each layer of `exits` and each decided node.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Scratch, Window, take
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.policy.draw import first_argmax
from decodax.speculative.drafts.layer_skip import depth, draft_level, draft_root, network_of
from decodax.speculative.shapes.threshold import grow_chain
from decodax.speculative.source import Grower, Level, Stateless
from decodax.speculative.tree import Proposal
from decodax.struct import Struct, struct


@struct
class Exits(Struct):
    """What `DynamicExit` carries.

    Attributes:
        matched: `f32[B, E]` faded count of shadow tokens that agreed, for each exit; nodes: `f32[B]` of all.
        layer, length: `i32[B]`, what the next round drafts with.
        scratch: the tree's keys within a round.
    """

    matched: Array
    nodes: Array
    layer: Array
    length: Array
    scratch: Scratch | None = None


@dataclasses.dataclass(frozen=True)
class DynamicExit(Stateless):
    """Drafts from the first layers of the target, as many of both as pay (DEL).

    Under a shape other than its own, `ChosenLength`, only the layer is chosen.

    Attributes:
        model: the target: a `Transformer`, or what `decodax.load` gave. Weights are `Params.target`.
        most: the longest draft.
        exits: the layers after which drafting may stop; default every one but the last.
        decay: what a round's evidence weighs after one more round.
        least: a chain ends after a draft that is less likely than this.

    Raises:
        ValueError: a number out of range, or exits that the model does not have.
    """

    model: Any
    most: int = 8
    exits: tuple[int, ...] | None = None
    decay: float = 0.95
    least: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", network_of(self.model))
        L = depth(self.model)
        exits = tuple(range(1, max(L, 2))) if self.exits is None else tuple(sorted(set(self.exits)))
        object.__setattr__(self, "exits", exits)
        if not exits or exits[0] < 1 or exits[-1] > L:
            raise ValueError(f"exits: got {exits}, takes layers from 1 to {L}")
        if self.most < 1:
            raise ValueError(f"most: got {self.most}, takes at least 1")
        for name, value in (("decay", self.decay), ("least", self.least)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: got {value}, takes 0 to 1")

    @property
    def shape(self) -> ChosenLength:
        """How its tree grows unless another shape is asked for."""
        return ChosenLength(self.most, self.least)

    def init(self, params: Params, s: State) -> Exits:
        assert self.exits is not None
        prior = jnp.asarray(self.exits, jnp.float32) / depth(self.model)
        return self._choose(jnp.broadcast_to(prior, (s.batch, len(self.exits))), jnp.ones(s.batch, jnp.float32))

    def start(self, params: Params, s: State, state: Exits, room: int) -> tuple[Exits, Array]:
        scratch, out = draft_root(self.model, params, s, room, self._keep(s, state))
        return state.replace(scratch=scratch), out.logits()

    def extend(self, params: Params, s: State, state: Exits, level: Level) -> tuple[Exits, Array]:
        assert state.scratch is not None
        scratch, out = draft_level(self.model, params, s, state.scratch, level, self._keep(s, state))
        return state.replace(scratch=scratch), out.logits()

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Exits) -> Exits:
        state = state.replace(scratch=None)
        if decision is None or out.layers is None or out.norm is None:      # no layers under guidance: the choice stays
            return state
        assert self.exits is not None
        norm, head = out.norm, out.head
        # one head after the other: all of them together would hold E times the logits
        states = jnp.stack([take(out.layers[layer - 1], decision.source) for layer in self.exits])
        shadow = jax.lax.map(lambda x: first_argmax(head(norm(x))), states)      # i32[E, B, M]
        valid = (jnp.arange(decision.tokens.shape[1]) < decision.count[:, None]) & s.running[:, None]
        matches = ((shadow == decision.tokens) & valid).sum(-1).T
        return self._choose(state.matched * self.decay + matches, state.nodes * self.decay + valid.sum(-1))

    def _choose(self, matched: Array, nodes: Array) -> Exits:
        exits = jnp.asarray(self.exits, jnp.int32)
        table = tokens_per_layer(matched / jnp.maximum(nodes, 1e-6)[:, None], exits, depth(self.model), self.most)
        best = jnp.argmax(table.reshape(table.shape[0], -1), 1).astype(jnp.int32)
        return Exits(matched=matched, nodes=nodes, layer=exits[best // self.most], length=best % self.most + 1)

    def _keep(self, s: State, state: Exits) -> Array:
        # rows that have finished ask for nothing
        return jnp.arange(depth(self.model)) < jnp.where(s.running, state.layer, 0)[:, None]


def tokens_per_layer(acceptance: Array, exits: Array, layers: int, most: int) -> Array:
    """TPL `f32[B, E, most]` of drafting 1 .. `most` tokens at each exit.

    Args:
        acceptance: `f32[B, E]`. exits: `i32[E]`. layers: `L`.

    >>> [f"{x:.3f}" for x in tokens_per_layer(jnp.array([[0.5]]), jnp.array([1]), 4, 2)[0, 0]]
    ['0.300', '0.292']
    """
    d = jnp.arange(1, most + 1)
    tokens = 1 + jnp.cumsum(acceptance[..., None] ** d, -1)
    return tokens / (d * exits[:, None] + layers)


@dataclasses.dataclass(frozen=True)
class ChosenLength:
    """A chain as long as each row's source says (`state.length`), at most `length`, that ends early after a draft
    below `least`."""

    length: int
    least: float = 0.0

    def grow(self, grower: Grower, state: Exits) -> tuple[Proposal, Any, Array]:
        chance = lambda log_p, entropy, i: jnp.where(i + 1 < state.length, jnp.exp(log_p), -1.0)
        return grow_chain(grower, state, self.length, chance, lambda f, all_of_them: f >= self.least)
