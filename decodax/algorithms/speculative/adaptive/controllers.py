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
    """The arms (ways to draft, or none) from which a controller chooses in each round.

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
    """The result of a round, for a controller that chooses one of several arms (ways to draft) in each round.

    Attributes:
        arm: index of the arm of the round. Each arm has a program of its own, so this is a Python integer.
        running: `bool[B]`, rows that took part.
        tokens: `i32[B]`, number of new tokens.
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
    """Base class of the rules by which `Adaptive` chooses an arm, that is, one of several speculative methods, for each
    round. Derive a frozen dataclass, static under jit.

    Attributes:
        notes: True if `note` has to be called when drafts were compared with plain decoding without a forward pass.
    """

    notes: ClassVar[bool] = False

    def check_arms(self, count: int) -> None:       # noqa: B027
        """Raises ValueError if the options are not those for `count` arms."""

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

    def first(self, of: Arms) -> int | None:
        """Returns the index of the arm of the first round if it is known before the prompts are, else None. If this arm
        makes no drafts, trained heads read only the part of the prompts that later drafts need."""
        return None

    @abc.abstractmethod
    def choose(self, of: Arms, state: Any, s: State) -> Array:
        """Returns the index of the arm for the next round, `i32[]`, from the description `of` of the arms, the
        controller's `state` and the decoding state `s`."""

    @abc.abstractmethod
    def update(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """Returns the controller's state after a round; `seen` has the round's arm and the numbers of decided tokens
        and accepted drafts of each row."""

    def note(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """Returns the controller's state after drafts that no forward pass has verified were compared with the tokens
        of plain decoding; `seen` has the result. By default nothing is learned."""
        return state


def for_rows(state: T, batch: int) -> T:
    """Returns the pytree `state`, which is common to the batch, with a leading axis of `batch` equal rows on each
    leaf."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), state)


def of_batch(state: T, round: Array) -> T:
    """Returns the state that is common to the batch from `state`, a pytree of copies in each row (leaves `[B, ...]`):
    the copy of the row with the largest number of updates, `round` (`i32[B]`).

    Rows can be replaced at any time. A new row has had no update, and an update renews the copies of all rows, so the
    common state is kept as long as any of its rows is.
    """
    return jax.tree.map(lambda x: x[jnp.argmax(round)], state)
