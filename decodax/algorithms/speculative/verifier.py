"""The interface of verifiers, which accept or reject drafts, and the default verifier, `SeedExact`."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jax import Array

from decodax.algorithms.speculative.drafter import Drafter, Form
from decodax.algorithms.speculative.tree import Drawn, Tree, at_end, at_parents, deepest
from decodax.common.registry import Guarantee
from decodax.core.state import State
from decodax.sampling.distribution import Distribution


class Verifier(abc.ABC):
    """A rule that accepts or rejects drafts: derive a frozen dataclass from this, static under jit.

    Attributes:
        guarantee: the guarantee about the output, see `Traits`.
        drawn: how sampled drafts have to be drawn, see `Drawn`.
        refuses: what proposals must not have (`Form`), "trees" or "mixtures".
    """

    guarantee: ClassVar[Guarantee]
    refuses: ClassVar[frozenset[Form]] = frozenset()

    if TYPE_CHECKING:       # some say it once for all instances

        @property
        def drawn(self) -> Drawn: ...

    def check_draft(self, draft: Drafter, proposes: frozenset[Form]) -> None:
        """Raises ValueError if the rule does not take drafts of `draft`, whose proposals have `proposes`."""
        name, refused = type(self).__name__, proposes & self.refuses
        if "trees" in refused:
            raise ValueError(f"verify: {name} takes chains, and {type(draft).__name__} drafts trees here; MultiRound "
                             "and SeedExact take trees")
        if "mixtures" in refused:
            raise ValueError(f"verify: {name} takes draws of one source, and {type(draft).__name__} mixes those of "
                             "several; takes MultiRound(replacement=True)")

    @abc.abstractmethod
    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        """Accepts a path of the tree.

        Args:
            dist: the policy's distribution of the token after each node of the tree.
            s: the decoding state.
            tree: the drafts.

        Returns:
            path: `i32[B, longest + 1]`, window nodes from the newest token down; accepted: `i32[B]`, number of accepted
                drafts on it; own: `i32[B]`, the target's token after them, or INVALID or DEAD_END.
        """


@dataclasses.dataclass(frozen=True)
class SeedExact(Verifier):
    """Draws the target's own token at each node, with the random key that plain sampling uses for its position, and
    accepts a draft if it is the token drawn at its parent.

    With the same seed, the output has exactly the tokens of plain sampling, for any draft and any tree. A deterministic
    draft `x` is accepted with probability p(x), as in rejection sampling. Greedy decoding is a special case.
    """

    guarantee: ClassVar[Guarantee] = "seed-exact"
    drawn: ClassVar[Drawn] = "coupled"

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        tokens = dist.draw()
        path, accepted = deepest(tree, at_parents(tree, tokens) == tree.tokens)
        return path, accepted, at_end(tokens, path, accepted)
