"""A lower bound on the tokens of a round ("Blockwise Parallel Decoding for Deep Autoregressive Models", Stern, Shazeer,
Uszkoreit, 2018, section 5.3)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.drafter import Drafter, Form
from decodax.algorithms.speculative.tree import Drawn, Tree, at_end, of_tokens
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.rejection import is_chain
from decodax.algorithms.speculative.verify.relaxed import before_temperature
from decodax.core.state import State
from decodax.sampling.distribution import Distribution


@dataclasses.dataclass(frozen=True)
class MinimumBlock(Verifier):
    """Accepts what another verifier accepts, and at least the first `tokens - 1` drafts, so that a round makes at least
    `tokens` tokens. For chains.

    Approximate if `tokens` is above 1: drafts that are accepted this way are guesses. A round makes fewer tokens if it
    has fewer drafts, or if the policy forbids one of them, or the target's distribution before it is broken.

    Attributes:
        verify: the other verifier.
        tokens: smallest number of tokens of a round, the target's own included.

    Raises:
        ValueError: `tokens` is below 1; or, before it is traced, the draft makes trees.
    """

    verify: Verifier
    tokens: int = 1
    refuses: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def check_draft(self, draft: Drafter, proposes: frozenset[Form]) -> None:
        super().check_draft(draft, proposes)
        self.verify.check_draft(draft, proposes)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens: got {self.tokens}, takes at least 1")

    @property
    def guarantee(self) -> Guarantee:       # type: ignore[override]
        return self.verify.guarantee if self.tokens == 1 else "approximate"

    @property
    def drawn(self) -> Drawn:
        return self.verify.drawn

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        if not is_chain(tree):
            raise ValueError(f"verify: MinimumBlock takes chains, got a tree of {tree.size - 1} drafts, {tree.longest} "
                             "deep")
        path, accepted, own = self.verify(dist, s, tree)
        drawn = dist.draw()
        allowed = of_tokens(tree, before_temperature(dist)) > -jnp.inf
        sound = jnp.cumprod((drawn[:, :-1] >= 0) & (allowed & tree.live)[:, 1:], 1)
        least = jnp.minimum(sound.sum(1, dtype=jnp.int32), self.tokens - 1)
        short = accepted < least
        path = jnp.where(short[:, None], jnp.arange(tree.size, dtype=jnp.int32), path)
        accepted = jnp.maximum(accepted, least)
        return path, accepted, jnp.where(short, at_end(drawn, path, accepted), own)
