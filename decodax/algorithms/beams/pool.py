"""The pool of finished texts of a search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.record import Record
from decodax.core.state import State, Status


@struct
class Finished(Struct):
    """Finished texts of a search, one place for each row. The texts of a prompt are in its first places, the best one
    first.

    Attributes:
        tokens: `i32[B, N]`, prompt and text.
        length: `i32[B]`, number of tokens.
        status: `i32[B]`, the reason of its end; `RUNNING`: the place is empty.
        score: `f32[B]`, -inf for an empty place.
        log_prob: `f32[B]`, log-probability of the text.
        beams: `i32[B, N]`, the beam that each new token continued; -1 after the last token.
        record: log-probabilities of the tokens (`State.record`), or None.
    """

    tokens: Array
    length: Array
    status: Array
    score: Array
    log_prob: Array
    beams: Array
    record: Record | None

    @classmethod
    def empty(cls, s: State) -> Finished:
        """Returns a pool without texts, with arrays in the shapes of the state `s`."""
        zeros = lambda x: jax.tree.map(jnp.zeros_like, x)
        return cls(tokens=zeros(s.tokens), length=zeros(s.length), status=jnp.full_like(s.status, Status.RUNNING),
                   score=jnp.full(s.batch, -jnp.inf), log_prob=jnp.zeros(s.batch),
                   beams=jnp.full_like(s.tokens, -1), record=zeros(s.record))

    def select(self, rows: Array) -> Finished:
        """Returns the pool whose row `i` has the text of row `rows[i]` (`i32[B]`) of this one."""
        return jax.tree.map(lambda x: x[rows], self)


def append(buffer: Array, new: Array, start: Array, count: Array) -> Array:
    """Writes the first `count[b]` entries of `new` (`[B, M, ...]`) into `buffer` (`[B, N, ...]`) from `start[b]` on;
    entries beyond the end are dropped."""
    def row(buffer: Array, new: Array, start: Array, count: Array) -> Array:
        index = jnp.arange(new.shape[0], dtype=jnp.int32)
        return buffer.at[jnp.where(index < count, start + index, buffer.shape[0])].set(new, mode="drop")

    return jax.vmap(row)(buffer, new.astype(buffer.dtype), start, count)


