"""Spec-Verification: accepts drafts that are among the most likely tokens and not much less likely than the best
("Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation", SpecDec, Xia et al.,
2023; GAD++, Ge et al., 2022). The output is approximate."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax import Array

from decodax.algorithms.speculative.tree import Drawn, Tree
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.relaxed import among
from decodax.core.state import State
from decodax.sampling.distribution import Distribution


@dataclasses.dataclass(frozen=True)
class SpecVerification(Verifier):
    """Accepts a draft if it is among the `beta` most likely tokens after its parent and its log-probability is at most
    `tau` below that of the most likely one.

    The token after the accepted drafts is the most likely one. Ranks and log-probabilities are those of the row's
    processed distribution; for greedy rows, those before the temperature. With `beta=1`, or `tau=0` and no ties, the
    rule is `Greedy`; otherwise it is approximate. Of equally long paths, the one with the smallest distance from the
    best tokens is taken.

    Raises:
        ValueError: `beta` is below 1 or `tau` below 0.
    """

    beta: int = 3
    tau: float = 1.0
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise ValueError(f"beta: got {self.beta}, takes at least 1")
        if not self.tau >= 0:
            raise ValueError(f"tau: got {self.tau}, takes at least 0")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return among(dist, tree, self.beta, self.tau)
