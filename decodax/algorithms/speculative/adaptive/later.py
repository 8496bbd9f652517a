"""Lets trained heads read the target's output of plain decoding later, several rounds at once, or not at all.

A head computes its keys and values from the target's hidden states of all verified tokens. While no drafts pay, a pass
of the head in each round would make plain decoding slower. So what heads read of the target's output is stored, and a
round before the next drafts passes it to them as a chunk of the prompt. Drafts do not depend on it but for rounding.
If there were more such rounds than are stored, a head that `takes_gaps` reads the last ones alone, so that plain
decoding costs the same however long it lasts; others read when the store is full. Of a prompt, too, a head that
`takes_gaps` reads the last tokens alone if decoding begins without drafts (`Controller.first`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Out, Params
from decodax.core.window import Window, causal

MOST = 32
"""Number of tokens of a row that are stored. One pass of a head over them costs a small part of as many rounds."""


@struct
class Unread(Struct):
    """A buffer of the target's output at the last tokens of each row, up to `MOST` of them, that some drafts have not
    read yet (because the rounds were plain decoding).

    Attributes:
        read: for each of these drafts, `f[B, MOST, F]`, the hidden states and layer outputs that it reads
            (`Drafter.unread`), concatenated. That of the token at position `p` is at index `p % MOST`.
        start: `i32[B]`, position of the first stored token.
        count: `i32[B]`, number of stored tokens.
    """

    read: tuple[Array, ...]
    start: Array
    count: Array


def empty_unread(forms: tuple[Any, ...], batch: int) -> Unread:
    """Returns a buffer without tokens.

    Args:
        forms: for each draft that reads from the buffer, the arrays that `Drafter.unread` returned, which have the
            shapes and dtypes of what it reads for one token.
        batch: number of rows.
    """
    one = lambda form: jnp.concatenate(jax.tree.leaves(form), -1)
    return Unread(read=tuple(jnp.repeat(one(form), MOST, 1) for form in forms), start=jnp.zeros(batch, jnp.int32),
                  count=jnp.zeros(batch, jnp.int32))


def with_round(unread: Unread, forms: tuple[Any, ...], s: State, out: Out) -> Unread:
    """Returns the buffer with the target's output for the newest token of each row, after a round of plain decoding. In
    a full buffer the oldest token makes room.

    Args:
        unread: the buffer.
        forms: see `empty_unread`.
        s: the state before the round.
        out: the target's output in the round.
    """
    at = s.length - 1
    count = jnp.clip(at - unread.start, 0, unread.count)        # of a row whose text was cut the rest is dropped
    start = jnp.where(count == 0, at, unread.start)
    slot = jnp.where(s.running, at % MOST, MOST)[:, None]
    lost = s.running & (count == MOST)
    return Unread(read=_put(unread, forms, slot, out), start=start + lost, count=count + s.running - lost)


def with_chunk(unread: Unread, forms: tuple[Any, ...], window: Window, out: Out) -> Unread:
    """Returns the buffer with the target's output for the last tokens of a chunk of the prompts, at most `MOST` of each
    row. Older tokens make room, and those that do not end where the chunk begins are dropped.

    Args:
        unread: the buffer.
        forms: see `empty_unread`.
        window: the chunk.
        out: the target's output for it.
    """
    at, live = window.positions, window.live
    end = jnp.max(jnp.where(live, at, -1), 1) + 1
    new = live.sum(1, dtype=jnp.int32)
    before = jnp.where(unread.start + unread.count == end - new, unread.count, 0)
    slot = jnp.where(live & (at >= end[:, None] - MOST), at % MOST, MOST)
    count = jnp.where(new > 0, jnp.minimum(before + new, MOST), unread.count)
    return Unread(read=_put(unread, forms, slot, out), start=jnp.where(new > 0, end - count, unread.start), count=count)


def _put(unread: Unread, forms: tuple[Any, ...], slot: Array, out: Out) -> tuple[Array, ...]:
    """Returns `unread.read` with the target's output for the tokens of a window at the indices `slot`, `i32[B, W]`;
    those from `MOST` on are left out."""
    rows, width = jnp.arange(len(slot), dtype=jnp.int32)[:, None], slot.shape[1]

    def put(held: Array, form: Any) -> Array:
        hidden, layers = form
        parts = [] if hidden.shape[-1] == 0 else [out.hidden]
        parts += [new for x, new in zip(layers or (), out.states or (), strict=False) if x is not None]
        if not parts:
            return held
        new = jnp.concatenate([part[:, :width].astype(held.dtype) for part in parts], -1)
        return held.at[rows, slot].set(new, mode="drop")

    return tuple(map(put, unread.read, forms))


def after_reading(unread: Unread, index: int, form: Any, drafter: Any, params: Params, s: State, out: Out,
                  state: Any) -> Any:
    """Returns the state of a draft after it has read its part of the buffer.

    Args:
        unread: the buffer.
        index: index of its part.
        form: the result of its `Drafter.unread`.
        drafter: the draft.
        params: weights of the target and of the draft.
        s: the decoding state before the round.
        out: the target's output in the round, of which only the functions are used.
        state: the draft's state.
    """
    leaves, structure = jax.tree.flatten(form)
    order = jnp.arange(MOST, dtype=jnp.int32)
    positions = unread.start[:, None] + order
    held = jnp.take_along_axis(unread.read[index], (positions % MOST)[:, :, None], 1)
    ends = np.cumsum([x.shape[-1] for x in leaves])[:-1].tolist()
    hidden, layers = jax.tree.unflatten(structure, jnp.split(held, ends, -1))
    live = (order < unread.count[:, None]) & (positions < s.length[:, None] - 1) & s.running[:, None]
    tokens = jnp.take_along_axis(s.tokens, jnp.minimum(positions, s.tokens.shape[1] - 1), 1)
    past = dataclasses.replace(out, hidden=hidden, layers=layers, streams=None, entries=())
    return drafter.observe(params, s, causal(tokens, unread.start, live), past, None, state)
