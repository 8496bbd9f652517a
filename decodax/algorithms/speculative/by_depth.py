"""Logits of drafters that predict several tokens in one pass, so that those of a node depend on its depth."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.nodes import Answer, Level
from decodax.core.state import State
from decodax.core.window import take


def answer_by_depth(hidden: Array, s: State, level: Level, logits: Callable[[Array], Array]) -> Answer:
    """Returns the answer for nodes whose hidden states `f[B, W, h]` and logits `f32[B, W, V]` depend on their depth
    alone.

    Nodes of one level have one depth, and its logits are then computed once.

    Args:
        hidden: `f[B, K, h]`, the hidden state of each depth; deeper nodes take the last one.
        s: the decoding state.
        level: the nodes.
        logits: maps hidden states to logits.
    """
    depth = level.positions - s.length[:, None] + 1
    own = take(hidden, jnp.minimum(depth, hidden.shape[1] - 1))
    return Answer(of_depths(depth, logits, own), own)


def of_depths(depth: Array, logits: Callable[..., Array], *nodes: Array) -> Array:
    """Returns the logits `f32[B, W, V]` of nodes that depend on their depth `i32[B, W]` alone: computed once if that is
    one for all, as it is for nodes of one level. `logits` maps `nodes`, arrays `[B, W, ...]`, to them."""
    one = lambda: jnp.broadcast_to(first := logits(*(x[:, :1] for x in nodes)), (*depth.shape, first.shape[-1]))
    return lax.cond((depth == depth[:, :1]).all(), one, lambda: logits(*nodes))


def spread(logits: Array, ids: Array | None, size: int | None) -> Array:
    """Returns a draft head's logits, `f32[B, W, Vd]`, over the target's vocabulary: `f32[B, W, size]`, -inf for tokens
    that the head does not have.

    Args:
        logits: the head's logits.
        ids: `i32[Vd]`, the target's token id of each of the head's tokens; None: both count from 0 alike.
        size: number of the target's logits; None: `Vd`.
    """
    size = size or logits.shape[-1]
    if ids is not None:
        return jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype).at[..., ids].set(logits, mode="drop")
    if logits.shape[-1] == size:
        return logits
    spare = [(0, 0), (0, 0), (0, max(size - logits.shape[-1], 0))]
    return jnp.pad(logits, spare, constant_values=-jnp.inf)[..., :size]
