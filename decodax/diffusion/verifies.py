"""Several canvases in one forward: which of their steps are true."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.diffusion.policies import Rule, View


@dataclasses.dataclass(frozen=True)
class Sequential(Rule):
    """One canvas, one step a forward."""

    branches = 1

    def pick(self, drafts: View, results: View) -> Array:
        return jnp.zeros(drafts.start.shape[0], jnp.int32)


@dataclasses.dataclass(frozen=True)
class BranchExact(Rule):
    """FreeDave (Wu and Zhang 2025): drafts are the canvas after 1 .. K - 1 more steps with the candidates at hand. One
    forward scores all of them; a draft that equals the true result of the one before it has the true next step.

    The output is that of one step a forward, token for token, in no more forwards.

    Attributes:
        branches: `K`, canvases a forward.
    """

    branches: int = 4

    def __post_init__(self) -> None:
        if self.branches < 1:
            raise ValueError(f"branches: got {self.branches}, takes 1 or more")

    def pick(self, drafts: View, results: View) -> Array:
        same = lambda a, b: (a[:, 1:] == b[:, :-1]).reshape(a.shape[0], a.shape[1] - 1, -1).all(-1)
        agree = same(drafts.tokens, results.tokens) & same(drafts.open, results.open) & same(drafts.end, results.end)
        left = (results.open & (results.positions < results.end[..., None])).any(-1)[:, :-1]
        return jnp.cumprod(agree & left, 1).sum(1).astype(jnp.int32)
