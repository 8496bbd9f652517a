"""The interface of controllers, the rules that pick the arm of the next round."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.state import State

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arms:
    """The arms that a controller picks from.

    Attributes:
        lengths: most drafts on a path of each arm.
        families: a number for each arm; arms with the same draft have the same.
        on_paper: for each arm, True if its drafts may be tried on paper, at no cost.
    """

    lengths: tuple[int, ...]
    families: tuple[int, ...]
    on_paper: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


@struct
class RoundOutcome(Struct):
    """The outcome of a round, for a controller.

    Attributes:
        arm: `i32[]` arm of the round. running: `bool[B]` rows that ran.
        tokens: `i32[B]` number of tokens decided. accepted: `i32[B]` number of drafts accepted.
        tried: `bool[B, K]` True if all drafts before depth 1 .. K held. held: `bool[B, K]` True if that draft held too;
            False in a row without such a draft. Both are False in rows that are not running.
    """

    arm: Array
    running: Array
    tokens: Array
    accepted: Array
    tried: Array
    held: Array


class Controller(abc.ABC):
    """A rule that picks arms: derive a frozen dataclass from this, static under jit.

    Attributes:
        notes: True if `note` has to be called for drafts that were tried on paper.
    """

    notes: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, of: Arms, batch: int) -> Any:
        """Returns its first state. Every leaf has an explicit dtype and a leading batch axis, since what a decoding
        state carries is selected, repeated and sharded by rows; `for_rows` gives that axis to what belongs to the
        batch. A row that begins in the place of another one gets this state; `of_batch` finds the batch's among
        them."""

    @abc.abstractmethod
    def choose(self, of: Arms, state: Any, s: State) -> Array:
        """Returns the next arm, `i32[]`."""

    @abc.abstractmethod
    def update(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """Returns the state after a round."""

    def note(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """Returns the state after drafts were tried on paper."""
        return state


def for_rows(state: T, batch: int) -> T:
    """Returns a copy for each row of a state that belongs to the batch."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), state)


def of_batch(state: T, round: Array) -> T:
    """Returns the batch's part of a state that has a copy of it for each row: the copy of the row with the largest
    `round` (`i32[B]`), the number of updates it has seen. A row that has just come in has seen none, and an update
    gives all rows the new copy, so the batch's memory lasts as long as any of its rows."""
    return jax.tree.map(lambda x: x[jnp.argmax(round)], state)
