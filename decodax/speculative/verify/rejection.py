"""Rejection sampling of a chain."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.policy.draw import draw
from decodax.speculative.tree import Drawn, Tree
from decodax.speculative.verify.base import Guarantee


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accepts a draft `x` with probability min(1, p(x) / q(x)); at the first rejection draws from the normalised
    positive part of p - q, and after the last draft from p (Leviathan et al. 2023, Chen et al. 2023).

    The distribution of the output is the target's; the tokens differ from plain sampling's. Accept, residual and bonus
    draws have keys of their own, apart from the draft's. For chains; `MultiRound` is the rule for trees.
    """

    guarantee: ClassVar[Guarantee] = "distribution-exact"
    drawn: ClassVar[Drawn] = "independent"

    def __call__(self, policy: Any, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        chain_only(self, tree)
        log_p = policy.log_probs()
        drafts, live, V = tree.tokens[:, 1:], tree.live[:, 1:], log_p.shape[-1]
        K = drafts.shape[1]
        at = lambda x: jnp.take_along_axis(x, drafts[..., None], -1)[..., 0]
        log_q = jnp.zeros(drafts.shape) if tree.log_q is None else at(tree.log_q)
        u = keys.uniforms(s.key, policy.predicts[:, :K], Purpose.ACCEPT)[..., 0]
        # u < p/q, written so that q = 0 (a draft that cannot have been drawn) never divides
        holds = (u * jnp.exp(log_q) < jnp.exp(at(log_p[:, :K]))) & live
        accepted = jnp.cumprod(holds.astype(jnp.int32), 1).sum(1)

        p = jnp.exp(log_p)
        q = (drafts[..., None] == jnp.arange(V)).astype(p.dtype) if tree.log_q is None else jnp.exp(tree.log_q)
        residual = jnp.where(live[..., None], jnp.maximum(p[:, :K] - q, 0), p[:, :K])
        # p = q leaves no residual, and no rejection but by rounding: p itself is then the right limit
        residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p[:, :K])
        last = jnp.concatenate([jnp.log(residual), log_p[:, K:]], 1)
        # broken logits reach the row's status: no draft behind them is accepted, since no comparison with NaN holds
        own = draw(last, keys.uniforms(s.key, policy.predicts, Purpose.RESIDUAL))
        path = jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32), own.shape)
        return path, accepted, jnp.take_along_axis(own, accepted[:, None], 1)[:, 0]


def chain_only(rule: Any, tree: Tree) -> None:
    """Raises ValueError unless the tree is a chain."""
    chain = np.arange(-1, tree.size - 1)
    if not (isinstance(tree.parents, np.ndarray) and (tree.parents == chain).all()):
        raise ValueError(f"verify: {type(rule).__name__} takes chains, got a tree of {tree.size - 1} drafts, "
                         f"{tree.longest} deep; MultiRound and SeedExact take trees")
