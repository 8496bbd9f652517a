"""Nodes of a draft tree while it grows: the question to a source, its answer, and the candidates after a node."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, static, struct


@struct
class Answer(Struct):
    """The output of a source for `w` nodes.

    Attributes:
        logits: `f32[B, w, V]`, logits of the token after each node.
        hidden: `f[B, w, D]`, hidden states at the nodes, for predictors of acceptance; None if the source has none.
        chance: `f32[B, w]`, the source's own prediction of the probability that a draft after each node is accepted,
            made without knowing the draft; None if it makes none.
    """

    logits: Array
    hidden: Array | None = None
    chance: Array | None = None


@struct
class Level(Struct):
    """Tree nodes that a source scores together.

    Attributes:
        tokens: `i32[B, w]`, their tokens.
        positions: `i32[B, w]`, their positions in the text.
        parents: `i32[B, w]`, slot of each node's parent: 0 for the newest token, `i` for the `i`-th node expanded
            before.
        sees: `bool[B, w, room]`, True for ancestors among the nodes expanded before; entry 0 is the first of these.
        at: `i32[]`, number of nodes expanded before.
        chained: static; True if each node is the parent of the next, and so also attends to earlier nodes of the level.
    """

    tokens: Array
    positions: Array
    parents: Array
    sees: Array
    at: Array
    chained: bool = static(default=False)

    @property
    def inside(self) -> Array:
        """Attention mask among the `w` nodes of the level, `bool[1, w, w]`: each attends to itself, and in a chain also
        to the nodes before it."""
        w = self.tokens.shape[1]
        return (jnp.tri(w, dtype=bool) if self.chained else jnp.eye(w, dtype=bool))[None]


@struct
class Children(Struct):
    """Candidates for the tokens after `w` nodes.

    Attributes:
        tokens: `i32[B, w, R]`, in the order in which a verifier tries them.
        live: `bool[B, w, R]`, False for padding.
        log_p: `f32[B, w, R]`, the source's estimate of the log-probability that the candidate is the target's token.
        log_q: `f32[B, w, V]`, log of the distribution from which they were drawn; None if the verifier does not need
            it.
        log_all: `f32[B, w, V]`, the estimate of `log_p` for all tokens: log-probabilities at temperature 1, or for
            "coupled" drafts the log of each token's share of the race with the target's noise, which is a better
            estimate.
        log_own: `f32[B, w, V]`, the source's log-probabilities at temperature 1.
        hidden: `f[B, w, D]`, the source's hidden states at the nodes, or None.
        chance: `f32[B, w]`, see `Answer`, or None.
    """

    tokens: Array
    live: Array
    log_p: Array
    log_q: Array | None
    log_all: Array
    log_own: Array
    hidden: Array | None
    chance: Array | None = None

    @property
    def own(self) -> Array:
        """Log-probability of each candidate under the source's distribution at temperature 1, `f32[B, w, R]`."""
        return jnp.take_along_axis(self.log_own, self.tokens, -1)


@struct
class Growth(Struct):
    """A tree that is being grown: slot 0 is the newest token, and the expanded nodes follow.

    Attributes:
        tokens: `i32[B, 1 + room]`, token of each slot.
        sees: `bool[B, 1 + room, 1 + room]`, True for ancestors and the node itself.
        filled: `i32[]`, number of slots in use.
        source: the source's state.
        states: states of the policy's transforms after each slot (`Policy.drafted`), leaves `[B, 1 + room, ...]`.
    """

    tokens: Array
    sees: Array
    filled: Array
    source: Any
    states: Any
