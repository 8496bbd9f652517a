"""Constraints as links of the policy's chain: exact along drafts and trees, on beams and particles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.constraints.tokens import FAR, TokenDfa
from decodax.policy.base import Context, PyTree, Transform
from decodax.struct import Struct, static, struct


@struct
class TokenTable(Struct):
    """A `TokenDfa` on the device, shared by all rows. Sizes are powers of two, so that another automaton of about the
    same size does not retrace.

    Attributes:
        classes: `u16[V]` or `i32[V]`. next: `i16[S, C]` or `i32[S, C]`. distance, forced: `i32[S]`.
    """

    classes: Array
    next: Array
    distance: Array
    forced: Array

    @classmethod
    def of(cls, automaton: TokenDfa) -> TokenTable:
        states, columns = (_power(n, least) for n, least in zip(automaton.next.shape, (32, 64), strict=True))
        wide = ((0, states - automaton.next.shape[0]), (0, columns - automaton.next.shape[1]))
        following = np.pad(automaton.next, wide, constant_values=-1)
        distance = np.pad(automaton.distance, wide[0], constant_values=FAR)
        return cls(classes=jnp.asarray(automaton.classes, jnp.uint16 if columns <= 1 << 16 else jnp.int32),
                   next=jnp.asarray(following, jnp.int16 if states < 1 << 15 else jnp.int32),
                   distance=jnp.asarray(distance, jnp.int32),
                   forced=jnp.asarray(np.pad(automaton.forced, wide[0], constant_values=-1), jnp.int32))

    def move(self, state: Array, token: Array) -> Array:
        """The states after `token`, both `i32[...]`; -1 where it is not allowed."""
        return self.next[jnp.maximum(state, 0), self.classes[jnp.maximum(token, 0)].astype(jnp.int32)].astype(jnp.int32)


def _power(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())


@struct
class Constrained(Transform):
    """Lets only those tokens through with which the text can still become one of the language, and that with the tokens
    which are left: so a row ends with a whole text.

    Attributes:
        start: `i32[B]`, the state of the automaton in front of the text; -1: the row may write what it likes.
        end: `i32[B]`, the index behind the last token that the row may have, with the prompt.
        place: static; which of the policy's tables is the automaton.
        table: that table, where the chain is run.
    """

    start: Array
    end: Array
    place: int = static(default=0)
    table: Any = None

    by_token = True

    def bound(self, tables: tuple[Any, ...]) -> Constrained:
        return self.replace(table=tables[self.place])

    def init(self, ctx: Context) -> PyTree:
        return self.start

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        t: TokenTable = self.table
        following = t.next[jnp.maximum(state, 0)].astype(jnp.int32)
        left = self.end - ctx.length - 1                            # tokens behind this one
        fits = (following >= 0) & (t.distance[jnp.maximum(following, 0)] <= left)
        return jnp.where((state < 0) | fits[t.classes.astype(jnp.int32)], logits, -jnp.inf)

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        after = self.table.move(state, token)
        # a draft that is not allowed is never accepted; what follows it does not matter, but must be a state
        return jnp.where(state < 0, state, jnp.maximum(after, 0))
