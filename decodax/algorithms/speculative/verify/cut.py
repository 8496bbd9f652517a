"""The verifier for FastCoT's early cut (Zhang et al., 2023): in one round it accepts all drafts without a test."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.tree import Drawn, Tree, at_end, at_parents, deepest
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.rejection import is_chain
from decodax.core.state import State
from decodax.sampling.distribution import Distribution


@dataclasses.dataclass(frozen=True)
class Cut(Verifier):
    """`SeedExact`, except that each row accepts all its drafts in one round, the one after `rounds` rounds.

    Approximate: the tokens accepted in that round are guesses. Tokens before them are those of plain decoding, and
    tokens after them are those of plain decoding given this text. For chains; use it with a `FastCoT` draft with the
    same `cut`.

    Raises:
        ValueError: `rounds` is below 1; or, before it is traced, the draft makes trees.
    """

    rounds: int
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "coupled"
    refuses: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds: got {self.rounds}, takes at least 1")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        if not is_chain(tree):
            raise ValueError(f"verify: Cut takes chains, got a tree of {tree.size - 1} drafts, {tree.longest} deep")
        tokens = dist.draw()
        path, held = deepest(tree, at_parents(tree, tokens) == tree.tokens)
        whole = tree.live[:, 1:].sum(1, dtype=jnp.int32)
        now = s.stats.rounds == self.rounds
        path = jnp.where(now[:, None], jnp.arange(tree.size, dtype=jnp.int32), path)
        accepted = jnp.where(now, whole, held)
        return path, accepted, at_end(tokens, path, accepted)
