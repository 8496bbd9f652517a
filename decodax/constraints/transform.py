"""Constraints as transforms of the policy's logits. They are exact along drafts and trees, on beams and particles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import Struct, static, struct
from decodax.constraints.tokens import FAR, TokenDfa
from decodax.core.stops import StopTable
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.distribution import Policy


@struct
class TokenTable(Struct):
    """A `TokenDfa` on the device, shared by all rows. Sizes are padded to powers of two, so that another automaton of
    about the same size does not cause a new compilation.

    Attributes:
        classes: `u16[V]` or `i32[V]`, the class of each token.
        next: `i16[S, C]` or `i32[S, C]`, the next state for each class; -1 where it is not allowed.
        distance: `i32[S]`, the smallest number of tokens that complete the text.
        forced: `i32[S]`, the longest token that begins a unique continuation; -1 elsewhere.
    """

    classes: Array
    next: Array
    distance: Array
    forced: Array

    @classmethod
    def of(cls, automaton: TokenDfa) -> TokenTable:
        """Copies an automaton to the device."""
        states, columns = (_power(n, least) for n, least in zip(automaton.next.shape, (32, 64), strict=True))
        wide = ((0, states - automaton.next.shape[0]), (0, columns - automaton.next.shape[1]))
        following = np.pad(automaton.next, wide, constant_values=-1)
        distance = np.pad(automaton.distance, wide[0], constant_values=FAR)
        return cls(classes=jnp.asarray(automaton.classes, jnp.uint16 if columns <= 1 << 16 else jnp.int32),
                   next=jnp.asarray(following, jnp.int16 if states < 1 << 15 else jnp.int32),
                   distance=jnp.asarray(distance, jnp.int32),
                   forced=jnp.asarray(np.pad(automaton.forced, wide[0], constant_values=-1), jnp.int32))

    def move(self, state: Array, token: Array) -> Array:
        """Returns the state of the automaton after `token` (`i32[...]`) was added to a text in `state` (`i32[...]`):
        `i32[...]`; -1 where the token is not allowed."""
        return self.next[jnp.maximum(state, 0), self.classes[jnp.maximum(token, 0)].astype(jnp.int32)].astype(jnp.int32)


def _power(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())


@struct
class Constrained(Transform):
    """Allows only tokens after which the text can still be completed to a text of the language within the row's maximum
    length.

    A row therefore always ends with a complete text.

    Attributes:
        start: `i32[B]`, the automaton's state before the text; -1 for a row without a constraint.
        end: `i32[B]`, the index after the last token that the row may have, including the prompt.
        place: static; index of the automaton in the policy's tables.
        table: that table, set while the transforms are applied.
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
        left = self.end - ctx.length - 1                            # tokens after this one
        fits = (following >= 0) & (t.distance[jnp.maximum(following, 0)] <= left)
        return jnp.where((state < 0) | fits[t.classes.astype(jnp.int32)], logits, -jnp.inf)

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        after = self.table.move(state, token)
        # A draft that is not allowed is never accepted. What follows it is irrelevant, but it must be a state.
        return jnp.where(state < 0, state, jnp.maximum(after, 0))


@struct
class Closing(Struct):
    """A stop rule for models without an end-of-sequence token: it ends a row at a stop string, or when its constrained
    text is complete and no longer text fits into its maximum length.

    It replaces a `StopTable`, and combines that table's state with the state of the constraint's automaton.

    Attributes:
        strings: the automaton of stop strings, or None.
        table: the automaton of the constraint.
        onwards: `i32[S]`, the smallest number of tokens that complete a longer text.
    """

    strings: StopTable | None
    table: TokenTable
    onwards: Array

    @classmethod
    def of(cls, strings: StopTable | None, table: TokenTable) -> Closing:
        """Returns the rule for stop strings and a constraint. It is needed for models without an end-of-sequence token,
        where nothing else ends a constrained text.

        Args:
            strings: the automaton of stop strings; None if there are no stop strings.
            table: the token automaton of the constraint.

        Raises:
            ValueError: the product of both numbers of states does not fit in an int32.
        """
        if strings is not None and strings.next.shape[0] * (table.next.shape[0] + 1) >= 1 << 31:
            raise ValueError("stop: got stop strings and a constraint without an end of sequence that have too many "
                             "states together; takes shorter strings")
        ahead = jnp.where(table.next >= 0, table.distance[jnp.maximum(table.next, 0).astype(jnp.int32)], FAR)
        return cls(strings, table, ahead.min(1) + 1)

    def begin(self, tokens: Array, length: Array, policy: Policy) -> Array:
        """Returns the combined state of each row after its prompt, `i32[B]`: that of the stop strings, and the start
        state of the constraint.

        Args:
            tokens: `i32[B, T]`, the prompts.
            length: `i32[B]`, their lengths.
            policy: the sampling policy, whose `Constrained` transform has the start states.
        """
        front = jnp.zeros_like(length) if self.strings is None else self.strings.begin(tokens, length, policy)
        link = next(t for t in policy.transforms if isinstance(t, Constrained))
        return front * self._states + link.start + 1

    def advance(self, state: Array, token: Array, left: Array | int = FAR) -> tuple[Array, Array]:
        """Returns the combined states after one more token, `i32[...]`, and True for rows that end with it,
        `bool[...]`.

        Args:
            state: `i32[...]`, the combined states before.
            token: `i32[...]`, the token of each row.
            left: number of tokens that may still follow. A complete text ends if no longer one fits.
        """
        front, here = state // self._states, state % self._states - 1
        hit: Array = jnp.zeros(jnp.broadcast_shapes(state.shape, token.shape), bool)
        if self.strings is not None:
            front, hit = self.strings.advance(front, token)
        after = self.table.move(here, token)
        now = jnp.maximum(after, 0)
        # An unconstrained row stays so; a token that is not allowed is never taken.
        closes = (here >= 0) & (after >= 0) & (self.table.distance[now] == 0) & (self.onwards[now] > left)
        return front * self._states + jnp.where(here < 0, -1, now) + 1, hit | closes

    @property
    def _states(self) -> int:
        return self.table.next.shape[0] + 1
