"""The interface of tree shapes: the rules by which a draft tree grows from the predictions of a source."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from jax import Array

from decodax.algorithms.speculative.tree import Drawn, Proposal

if TYPE_CHECKING:
    from decodax.algorithms.speculative.source import Grower, Source


class Shape(abc.ABC):
    """Base class of the rules by which a draft tree grows from a source's predictions. Derive a frozen dataclass,
    static under jit.

    Attributes:
        length: largest number of drafts on a path of the tree.
    """

    if TYPE_CHECKING:       # as in `Draft`

        @property
        def length(self) -> int: ...

    @property
    def is_chain(self) -> bool:
        """True if the tree is a chain of fixed length."""
        return False

    @property
    def branches(self) -> bool:
        """True if a node may have several children."""
        return not self.is_chain

    @property
    def least_nodes(self) -> int:
        """Smallest number of drafts that a proposal has, padding included."""
        return 1 if self.branches else self.length

    def check_source(self, source: Source) -> None:     # noqa: B027
        """Raises ValueError if the shape does not grow the trees of `source`."""

    def check_drawn(self, drawn: Drawn) -> None:        # noqa: B027
        """Raises ValueError if the shape cannot draw children as a verifier needs it, see `Drawn`."""

    @abc.abstractmethod
    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        """Grows the draft tree of a round.

        Args:
            grower: calls the source and draws children; see its `start` and `expand`.
            state: the source's state.

        Returns:
            The tree; the source's new state; and the window index of each node that was expanded, `i32[B or 1, room]`,
                -1 for those that are not in the tree.
        """


def distinct(shape: Shape, drawn: Drawn) -> None:
    """Raises ValueError if the verifier needs siblings that are drawn independently ("with replacement"). For
    `check_drawn` of shapes whose siblings are drawn without replacement; `shape` is named in the error."""
    if drawn == "independent":
        raise ValueError(f"verify: {type(shape).__name__} draws siblings without replacement; takes SeedExact or "
                         "MultiRound(replacement=False)")


class SharesBudget(Shape):
    """A shape whose trees share a budget of drafts of the whole batch."""

    @property
    @abc.abstractmethod
    def batch_budget(self) -> int:
        """Largest number of drafts that all rows of a batch have together in a round."""
