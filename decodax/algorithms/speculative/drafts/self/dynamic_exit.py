"""DEL: an early exit whose layer and draft length are chosen in each round ("DEL: Context-Aware Dynamic Exit Layer for
Efficient Self-Speculative Decoding", Entezari Zarch et al., 2025).

The token that layer `l` would have drafted is known without drafting: the target's norm and head, applied to the output
of this layer in the verification, give a *shadow token* at each node. Shadow tokens are compared with the target's
decisions at the newest token and the accepted drafts (after a rejected one the context is wrong). The acceptance of a
layer is the share of equal tokens, with exponential decay over rounds:

    a_l = sum_r decay^(R-r) matches_l(r) / sum_r decay^(R-r) nodes(r)

The next round drafts `d` tokens with the first `l` layers, the pair with the most tokens per executed layer,

    TPL(l, d) = (1 + a_l + ... + a_l^d) / (d l + L)

and ends earlier after a draft whose probability is below a threshold. The threshold adapts, too: it is the mean of the
average confidence of layer `l` in shadow tokens that were equal and in those that were not,

    h_l = (mean confidence of the former + mean confidence of the latter) / 2

with the same decay. The confidence of a shadow token is its probability.

Each row chooses for itself, so its drafts do not depend on the other rows of the batch. A draft step runs as many
layers, and drafting takes as many steps, as the row that needs most. An uncertain draft is verified, and only the
tokens after it are not drafted. So whether a position is drafted depends only on the tokens before it, and every
verifier keeps its guarantee. Shadow tokens cost an output head for each layer in `exits` and each decided node.

TPL and shadow tokens are the paper's. The running threshold for each layer, from the confidences of accepted and
rejected tokens, is from memory. The formula, `decay` 0.95 for acceptance and confidence, and the values before the
first observation are chosen here: layer `l` then counts as accepted `l` times in `L`, with the weight of one node and
no confidence, and no draft is uncertain. The verification runs all layers: exits differ by row and round, and only the
smallest could be shared with the drafts (see `LayerSkip`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.self_draft import SkipsLayers
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.threshold import grow_chain
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.capabilities import Draftable
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.sampling.draw import first_argmax


@struct
class Exits(Struct):
    """State of `DynamicExit`.

    Attributes:
        matched: `f32[B, E]`, number of equal shadow tokens of each exit, with decay.
        nodes: `f32[B]`, number of all compared nodes, with decay.
        sure: `f32[B, E, 2]`, sums of the confidence in equal and in other shadow tokens, with decay.
        layer: `i32[B]`, exit layer of the next round.
        length: `i32[B]`, draft length of the next round.
        least: `f32[B]`, probability below which a draft is the last of the round.
        buffer: within a round, keys and values of the tree's nodes.
    """

    matched: Array
    nodes: Array
    sure: Array
    layer: Array
    length: Array
    least: Array
    buffer: Draftable | None = None


@dataclasses.dataclass(frozen=True)
class DynamicExit(SkipsLayers):
    """Drafts with the target's first layers; the number of layers and of drafts adapts to the acceptance (DEL: Entezari
    Zarch et al., 2025).

    With a shape other than its own, `ChosenLength`, only the layer is chosen.

    Attributes:
        length: largest number of drafts in a round.
        exits: the layers after which drafting may stop; None: all but the last.
        decay: factor by which the weight of observations falls with each round.

    Raises:
        ValueError: a number out of range.
    """

    length: int = 8
    exits: tuple[int, ...] | None = None
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exits is not None:
            object.__setattr__(self, "exits", tuple(sorted(set(self.exits))))
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, takes at least 1")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay: got {self.decay}, takes 0 to 1")

    def for_target(self, model: Any) -> DynamicExit:
        new = super().for_target(model)
        L, exits = new.model.depth, new.after
        if not exits or exits[0] < 1 or exits[-1] > L:
            raise ValueError(f"exits: got {exits}, takes layers from 1 to {L}")
        return new

    @property
    def after(self) -> tuple[int, ...]:
        """The layers after which drafting may stop."""
        return tuple(range(1, max(self.model.depth, 2))) if self.exits is None else self.exits

    @property
    def shape(self) -> ChosenLength:
        """The default shape of the drafts: a chain of at most `length` drafts, whose number each row chooses in each
        round from the acceptance so far (`ChosenLength`)."""
        return ChosenLength(self.length)

    def init(self, params: Params, s: State) -> Exits:
        prior = jnp.asarray(self.after, jnp.float32) / self.model.depth
        matched = jnp.broadcast_to(prior, (s.batch, len(prior)))
        return self._choose(matched, jnp.ones(s.batch, jnp.float32), jnp.zeros((*matched.shape, 2), jnp.float32))

    def running(self, s: State, state: Exits) -> Array:
        # rows that have finished ask for nothing
        return jnp.arange(self.model.depth) < jnp.where(s.running, state.layer, 0)[:, None]

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Exits) -> Exits:
        state = state.replace(buffer=None)
        if decision is None or out.layers is None:      # no layers under guidance: the choice stays
            return state

        def shadow(x: Array) -> tuple[Array, Array]:
            logits = out.head(out.normed(x))
            return first_argmax(logits), jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1))

        # one head after the other: all of them together would hold E times the logits
        tokens, sure = jax.lax.map(shadow, jnp.stack([take(out.layers[i - 1], decision.source) for i in self.after]))
        valid = (jnp.arange(decision.tokens.shape[1]) < decision.count[:, None]) & s.running[:, None]
        agreed = tokens == decision.tokens                                          # bool[E, B, M]
        total = lambda x, where: jnp.where(where & valid, x, 0).sum(-1).T           # f32[B, E]
        fade = lambda old, new: old * self.decay + new
        return self._choose(fade(state.matched, total(1.0, agreed)), fade(state.nodes, valid.sum(-1)),
                            fade(state.sure, jnp.stack([total(sure, agreed), total(sure, ~agreed)], -1)))

    def _choose(self, matched: Array, nodes: Array, sure: Array) -> Exits:
        exits = jnp.asarray(self.after, jnp.int32)
        table = tokens_per_layer(matched / jnp.maximum(nodes, 1e-6)[:, None], exits, self.model.depth, self.length)
        best = jnp.argmax(table.reshape(table.shape[0], -1), 1).astype(jnp.int32)
        counts = jnp.stack([matched, nodes[:, None] - matched], -1)
        doubt = (sure / jnp.maximum(counts, 1e-6)).mean(-1)
        return Exits(matched=matched, nodes=nodes, sure=sure, layer=exits[best // self.length],
                     length=best % self.length + 1, least=take(doubt, best // self.length))


def tokens_per_layer(acceptance: Array, exits: Array, layers: int, most: int) -> Array:
    """Returns TPL, the expected number of tokens per executed layer, `f32[B, E, most]`, for drafting 1 to `most` tokens
    at each exit.

    Args:
        acceptance: `f32[B, E]`, acceptance rate of each exit.
        exits: `i32[E]`, numbers of layers.
        layers: `L`, number of layers of the model.
        most: largest number of drafts.

    >>> [f"{x:.3f}" for x in tokens_per_layer(jnp.array([[0.5]]), jnp.array([1]), 4, 2)[0, 0]]
    ['0.300', '0.292']
    """
    d = jnp.arange(1, most + 1)
    tokens = 1 + jnp.cumsum(acceptance[..., None] ** d, -1)
    return tokens / (d * exits[:, None] + layers)


@dataclasses.dataclass(frozen=True)
class ChosenLength(Shape):
    """A chain of at most `length` drafts. A row stops drafting at its own length (`length` in the state of
    `DynamicExit`), or earlier, after a draft with a probability below its threshold (`least` in that state)."""

    length: int
    branches = False

    def grow(self, grower: Grower, state: Exits) -> tuple[Proposal, Any, Array]:
        chance = lambda child, i: jnp.where(i + 1 < state.length, jnp.exp(child.own[:, 0, 0]), -1.0)
        return grow_chain(grower, state, self.length, chance, lambda f, all_of_them: f >= state.least)


@ALGORITHMS.register("del", "DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding",
                     "Entezari Zarch et al. 2025", family="speculative-self", guarantee="seed-exact")
def del_(length: Count = 6) -> Speculative:
    """Drafts with the target's first layers, with the exit layer and draft length that give the most expected tokens
    per layer.

    Like `layerskip`, without a layer to set: it adapts to the acceptance in the text.

    Args:
        length: largest number of drafts in a round.
    """
    return Speculative(DynamicExit(length))
