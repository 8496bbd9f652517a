"""Rejection sampling of a chain of drafts (Leviathan et al., 2023; Chen et al., 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.tree import Drawn, Tree
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.walk import residual
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.sampling.distribution import Distribution
from decodax.sampling.draw import draw


@dataclasses.dataclass(frozen=True)
class Rejection(Verifier):
    """Rejection sampling of a chain (Leviathan et al. 2023, Chen et al. 2023). A draft `x` is accepted with probability
    min(1, p(x) / q(x)). After the first rejection, the token is drawn from the normalised positive part of p - q, and
    after the last draft from p.

    The output has the target's distribution; its tokens differ from those of plain sampling. The draws of acceptance,
    residual and drafts have separate keys. For chains; `MultiRound` is the rule for trees.
    """

    guarantee: ClassVar[Guarantee] = "distribution-exact"
    drawn: ClassVar[Drawn] = "independent"
    refuses: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        log_p = dist.log_probs()
        live, p, q, own_p, own_q = chain_drafts(self, tree, log_p)
        K = live.shape[1]
        u = keys.uniforms(s.key, dist.predicts[:, :K], Purpose.ACCEPT)[..., 0]
        # u < p/q, written so that q = 0 (a draft that cannot have been drawn) never divides
        accepted = jnp.cumprod(((u * own_q < own_p) & live).astype(jnp.int32), 1).sum(1)
        left = jnp.where(live[..., None], residual(p - q, p), p)
        last = jnp.concatenate([jnp.log(left), log_p[:, K:]], 1)
        # broken logits reach the row's status: no draft after them is accepted, since no comparison with NaN holds
        own = draw(last, keys.addresses(s.key, dist.predicts, Purpose.RESIDUAL))
        path = jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32), own.shape)
        return path, accepted, jnp.take_along_axis(own, accepted[:, None], 1)[:, 0]


def chain_drafts(rule: Any, tree: Tree, log_p: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Returns, for the K drafts of a chain: `bool[B, K]`, False for padding; the target's distribution at each and the
    one from which it was drawn, `f32[B, K, V]`, one-hot for deterministic drafts; and the probabilities of the draft in
    both, `f32[B, K]`.

    Args:
        rule: the verifier, for the error.
        tree: the drafts.
        log_p: `f32[B, 1 + K, V]`, the target's log-probabilities after each node.

    Raises:
        ValueError: the tree is not a chain.
    """
    if not is_chain(tree):
        raise ValueError(f"verify: {type(rule).__name__} takes chains, got a tree of {tree.size - 1} drafts, "
                         f"{tree.longest} deep; MultiRound and SeedExact take trees")
    drafts, log_q = tree.tokens[:, 1:], tree.log_q
    K = drafts.shape[1]
    p = jnp.exp(log_p[:, :K])
    q = jax.nn.one_hot(drafts, log_p.shape[-1], dtype=jnp.float32) if log_q is None else jnp.exp(log_q[:, :K])
    at = lambda x: jnp.take_along_axis(x, drafts[..., None], -1)[..., 0]
    return tree.live[:, 1:], p, q, at(p), at(q)


def is_chain(tree: Tree) -> bool:
    """Returns True if every node is the parent of the next one, in all rows."""
    return isinstance(tree.parents, np.ndarray) and bool((tree.parents == np.arange(-1, tree.size - 1)).all())
