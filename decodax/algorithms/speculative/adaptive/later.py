"""Tells trained heads of rounds of plain decoding later, several rounds at once.

A head computes its keys and values from the target's hidden states of all verified tokens. While no drafts pay, a pass
of the head in each round would make plain decoding slower. So what heads read of the target's output is stored, and a
round before the next drafts, or one that finds the buffer full, passes it to them as a chunk of the prompt. Drafts do
not depend on it but for rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Out, Params
from decodax.core.window import causal

MOST = 32
"""Number of tokens of a row that are stored. One pass of a head over them costs a small part of as many rounds."""


@struct
class Untold(Struct):
    """The target's hidden states at the last tokens of each row that some drafts have not read yet.

    Attributes:
        read: for each of the drafts, hidden states `f[B, MOST, D]` and those of layers, as in `Drafter.unread`.
        start: `i32[B]`, position of the first token.
        count: `i32[B]`, number of tokens.
    """

    read: tuple[Any, ...]
    start: Array
    count: Array


def nothing_untold(forms: tuple[Any, ...], batch: int) -> Untold:
    """Returns an empty buffer for drafts with the given results of `Drafter.unread`."""
    read = jax.tree.map(lambda x: jnp.repeat(x, MOST, 1), forms)
    return Untold(read=read, start=jnp.zeros(batch, jnp.int32), count=jnp.zeros(batch, jnp.int32))


def with_round(untold: Untold, s: State, out: Out) -> Untold:
    """Returns the buffer with the output for the newest tokens, after a round of plain decoding. `s` is the state
    before the round."""
    at = s.length - 1
    count = jnp.clip(at - untold.start, 0, untold.count)        # of a row whose text was cut the rest is dropped
    start = jnp.where(count == 0, at, untold.start)
    slot = jnp.where(s.running, count, MOST)
    rows = jnp.arange(s.batch, dtype=jnp.int32)

    def put(held: Any) -> Any:
        hidden, layers = held
        write = lambda x, new: None if x is None else x.at[rows, slot].set(
            new[:, 0, :x.shape[-1]].astype(x.dtype), mode="drop")
        return write(hidden, out.hidden), None if layers is None else tuple(
            write(x, new) for x, new in zip(layers, out.layers or (), strict=False))

    return Untold(read=tuple(map(put, untold.read)), start=start, count=jnp.minimum(count + s.running, MOST))


def told(untold: Untold, index: int, drafter: Any, params: Params, s: State, out: Out, state: Any) -> Any:
    """Returns the state of a draft after it has read its part of the buffer.

    Args:
        untold: the buffer.
        index: index of its part.
        drafter: the draft.
        params: weights of the target and of the draft.
        s: the decoding state before the round.
        out: the target's output in the round, of which only the functions are used.
        state: the draft's state.
    """
    hidden, layers = untold.read[index]
    order = jnp.arange(MOST, dtype=jnp.int32)
    positions = untold.start[:, None] + order
    live = (order < untold.count[:, None]) & (positions < s.length[:, None] - 1) & s.running[:, None]
    tokens = jnp.take_along_axis(s.tokens, jnp.minimum(positions, s.tokens.shape[1] - 1), 1)
    past = dataclasses.replace(out, hidden=hidden, layers=layers, entries=())
    return drafter.observe(params, s, causal(tokens, untold.start, live), past, None, state)
