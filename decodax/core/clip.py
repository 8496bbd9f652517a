"""Cuts the tokens of a round at an end of sequence, a stop string, the token budget, the capacity or invalid logits. No
other module does so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.state import State, Status
from decodax.core.types import DEAD_END, INVALID, Decision


def clip(d: Decision, s: State, policy: Any) -> tuple[Array, Array, Array]:
    """Returns the number of decided tokens that are appended to each row, and the row's status after them.

    Args:
        d: the decision of the round.
        s: the state before the round.
        policy: the sampling policy, which has the end tokens and the stop strings.

    Returns:
        Count `i32[B]`, status `i32[B]` and the stop automaton's state `i32[B]`. Rows that are not running get no token.
        A token that ends a sequence or completes a stop string is appended; one for invalid logits is not.
    """
    M = d.tokens.shape[1]
    index = jnp.arange(M, dtype=jnp.int32)
    offered = index < jnp.where(s.running, d.count, 0)[:, None]
    made = (s.length - s.prompt_length)[:, None] + index          # new tokens before this one
    ripe = made >= s.min_new[:, None]

    ends = (d.tokens[:, :, None] == policy.eos[:, None, :]).any(-1) & (d.tokens >= 0) & ripe
    stop, stops = _stops(policy.stops, d.tokens, s.stop, (s.max_length - s.length)[:, None] - index - 1)
    # a round commits as many entries as it appends tokens: the newest one before it, all but the newest one behind it
    most = jnp.full_like(s.length, s.tokens.shape[1] - M) if (left := s.cache.room(s.running)) is None else jnp.minimum(
        s.tokens.shape[1] - M, s.length + left)
    room = jnp.minimum(s.max_length, most) - s.length
    full = jnp.where(s.max_length <= most, Status.LENGTH, Status.CAPACITY)
    first = lambda hit: jnp.where((hit & offered).any(1), jnp.argmax(hit & offered, 1) + 1, M + 1)
    invalid, dead = first(d.tokens == INVALID), first(d.tokens == DEAD_END)
    end, match = first(ends), first(stops & ripe)
    # how many tokens a cause needs to be reached, and how many it lets through; where two meet the first named holds
    causes = [(invalid, invalid - 1, Status.INVALID), (dead, dead - 1, Status.DEAD_END), (end, end, Status.EOS),
              (match, match, Status.STOP), (room, room, full)]
    count = offered.sum(1, dtype=jnp.int32)
    if (horizon := s.cache.max_commit()) is not None:      # the row goes on in the next round
        count = jnp.minimum(count, horizon)
    status = s.status
    for reached, limit, reason in reversed(causes):
        cuts = s.running & (reached <= count)
        status = jnp.where(cuts, jnp.asarray(reason, jnp.int32), status)
        count = jnp.where(cuts, jnp.maximum(limit, 0).astype(jnp.int32), count)
    stop = jnp.take_along_axis(jnp.concatenate([s.stop[:, None], stop], 1), count[:, None], 1)[:, 0]
    if d.status is not None:
        status = jnp.where(s.running & (status == Status.RUNNING), d.status, status)
    return count, status, stop


def _stops(table: Any, tokens: Array, state: Array, left: Array) -> tuple[Array, Array]:
    """Runs the stop automaton over `tokens`, `i32[B, M]`.

    Args:
        table: the automaton; None if there are no stop strings.
        tokens: tokens of the round.
        state: `i32[B]`, state before them.
        left: `i32[B, M]`, number of tokens that may still follow each token.

    Returns:
        The state after each token, `i32[B, M]`, and whether the token completed a match, `bool[B, M]`.
    """
    if table is None:
        return jnp.broadcast_to(state[:, None], tokens.shape), jnp.zeros(tokens.shape, bool)

    def visit(state: Array, x: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        token, left = x
        state, hit = table.advance(state, jnp.maximum(token, 0), left)
        return state, (state, hit)

    states, hits = jax.lax.scan(visit, state, (tokens.T, left.T))[1]
    return states.T, hits.T
