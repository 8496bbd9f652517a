"""The interface of controllers, which choose the arm of the next round."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, static, struct
from decodax.core.state import State

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arms:
    """The arms from which a controller chooses.

    Attributes:
        lengths: largest number of drafts on a path of each arm.
        families: a number for each arm; arms with the same draft have the same number.
        on_paper: for each arm, True if its drafts can be compared with plain decoding without a forward pass.
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
    """The result of a round, for a controller.

    Attributes:
        arm: index of the arm of the round. Each arm has a program of its own, so this is a Python integer.
        running: `bool[B]`, rows that took part.
        tokens: `i32[B]`, number of decided tokens.
        accepted: `i32[B]`, number of accepted drafts.
        tried: `bool[B, K]`, True if all drafts before depth 1 .. K were accepted; False in rows that are not running.
        held: `bool[B, K]`, True if the draft at this depth was accepted, too; False if the row had no draft there.
    """

    arm: int = static()
    running: Array
    tokens: Array
    accepted: Array
    tried: Array
    held: Array


class Controller(abc.ABC):
    """A rule that chooses arms: derive a frozen dataclass from this, static under jit.

    Attributes:
        notes: True if `note` has to be called for drafts that were compared without a forward pass.
    """

    notes: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, of: Arms, batch: int) -> Any:
        """Returns the first state.

        Every leaf has an explicit dtype and a leading batch axis, since decoding states are selected, repeated and
        sharded by rows. `for_rows` adds this axis to state that is common to the batch, and `of_batch` removes it. A
        new row in the place of a finished one gets this first state.

        Args:
            of: the arms.
            batch: number of rows.
        """

    @abc.abstractmethod
    def choose(self, of: Arms, state: Any, s: State) -> Array:
        """Returns the index of the next arm, `i32[]`."""

    @abc.abstractmethod
    def update(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """Returns the state after a round with the result `seen`."""

    def note(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """Returns the state after drafts were compared with plain decoding without a forward pass; `seen` has the
        result."""
        return state


def for_rows(state: T, batch: int) -> T:
    """Repeats state that is common to the batch for each of `batch` rows."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), state)


def of_batch(state: T, round: Array) -> T:
    """Returns the common state of a batch from its copies in each row: that of the row with the largest `round`
    (`i32[B]`), the number of updates. A new row has had no update, and an update renews the copies of all rows, so the
    state of the batch lasts as long as any of its rows."""
    return jax.tree.map(lambda x: x[jnp.argmax(round)], state)
