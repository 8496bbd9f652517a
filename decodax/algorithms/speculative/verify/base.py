"""What a verification rule is."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

from jax import Array

from decodax.common.registry import Guarantee
from decodax.core.state import State
from decodax.sampling.base import Distribution

if TYPE_CHECKING:
    from decodax.algorithms.speculative.tree import Drawn, Tree


class Verifier(abc.ABC):
    """A verification rule: derive a frozen dataclass from this, static under jit.

    Attributes:
        guarantee: what holds of the output. drawn: how it wants sampled drafts, see `Drawn`.
    """

    guarantee: ClassVar[Guarantee]

    if TYPE_CHECKING:       # some say it once for all instances

        @property
        def drawn(self) -> Drawn: ...

    @abc.abstractmethod
    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        """What holds.

        Args:
            dist: the policy at each of the tree's nodes; node `i` gives the distribution of what follows it.

        Returns:
            path: `i32[B, longest + 1]` window nodes from the newest token down; accepted: `i32[B]` how many drafts of
            it hold; own: `i32[B]` the target's token after them (INVALID and DEAD_END as in `Decision`).
        """
