"""k-SEQ: tests independent siblings one after the other against p divided by a common factor ("SpecTr: Fast Speculative
Decoding via Optimal Transport", Sun et al., 2023). The output has the target's distribution.

Each of k independent draws from q passes with probability min(1, p(x) / (rho q(x))), and the first that passes is
accepted. Let beta(rho) = sum_x min(q(x), p(x) / rho), the probability that one draw passes. Then one of the k is
accepted with probability 1 - (1 - beta)^k, and is distributed as min(q, p / rho) / beta. So the output is exactly p if
the token after k rejections is drawn from the normalised

    p(x) - min(q(x), p(x) / rho) * (1 - (1 - beta)^k) / beta.

This is a distribution if 1 - (1 - beta)^k <= rho * beta. The left side falls with rho and the right side grows. The
smallest valid rho, for which both are equal, has the largest acceptance: at least 1 - 1/e times that of the best
coupling. It is between 1 and k; for k = 1 it is 1, and the rule is plain rejection sampling.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.tree import Drawn
from decodax.algorithms.speculative.verifier import Guarantee
from decodax.algorithms.speculative.verify.walk import SiblingVerifier, certain, residual
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS

HALVINGS = 12


@dataclasses.dataclass(frozen=True)
class KSeq(SiblingVerifier):
    """The k-SEQ rule at each node of a tree, where k is the number of its live children (Sun et al., 2023). The output
    has the target's distribution.

    Deterministic drafts are no draws from a common q. They are tested as in `MultiRound`, against what earlier siblings
    have left of p.

    Attributes:
        rho: "auto": the smallest exact factor, found by bisection at each node. A number of at least 1: a lower bound
            on the factor.

    Raises:
        ValueError: a number below 1.
    """

    rho: float | Literal["auto"] = "auto"
    guarantee: ClassVar[Guarantee] = "distribution-exact"
    drawn: ClassVar[Drawn] = "independent"
    refuses: ClassVar[frozenset[Form]] = frozenset(("mixtures",))

    def __post_init__(self) -> None:
        if self.rho != "auto" and not (isinstance(self.rho, (int, float)) and self.rho >= 1):
            raise ValueError(f"rho: got {self.rho!r}, takes 'auto' or a number of at least 1")

    def siblings(self, p: Array, q: Any, tokens: Array, children: Array, dead: Array,
                 u: Array) -> tuple[Array, Array, Array]:
        if q is None:
            return certain(p, tokens, children, u)
        if callable(q):
            raise ValueError("verify: KSeq takes draws of one source; takes MultiRound(replacement=True) for several")
        k = children.sum()
        rho = smallest(p, q, k)
        if self.rho != "auto":
            rho = jnp.maximum(rho, self.rho)
        holds = children & (u * rho * q[tokens] < p[tokens])
        common, beta = overlap(p, q, rho)
        taken = common * (some(beta, k) / jnp.where(beta > 0, beta, 1))
        return jnp.argmax(holds), holds.any(), jnp.where(k > 0, residual(p - taken, p), p)


def overlap(p: Array, q: Array, rho: Array) -> tuple[Array, Array]:
    """Returns the part of the draft distribution `q` (`f32[V]`) that K-SEQ accepts for the target distribution `p`
    (`f32[V]`) and the factor `rho` (`f32[]`), `min(q, p / rho)`, `f32[V]`, and its sum beta, `f32[]`, the probability
    that one draw from q is accepted."""
    common = jnp.minimum(q, p / rho)
    return common, jnp.minimum(common.sum(), 1)


def some(beta: Array, k: Array) -> Array:
    """Returns the probability that at least one of `k` independent draws is accepted, `1 - (1 - beta)^k`, if each is
    with probability `beta`; precise also for a small beta."""
    return -jnp.expm1(jnp.maximum(k, 1) * jnp.log1p(-beta))


def smallest(p: Array, q: Array, k: Array) -> Array:
    """Returns the smallest factor rho in [1, k] with `1 - (1 - beta)^k <= rho * beta`, up to k / 4096 too large; `beta`
    is the acceptance probability for rho (see `overlap`), `k` (`i32[]`) the number of drafts. K-SEQ keeps the target's
    distribution `p` for any such rho, and accepts most often for the smallest."""
    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        rho = (low + high) / 2
        beta = overlap(p, q, rho)[1]
        enough = some(beta, k) <= rho * beta
        return jnp.where(enough, low, rho), jnp.where(enough, rho, high)

    top = jnp.maximum(k, 1).astype(p.dtype)
    return lax.fori_loop(0, HALVINGS, halve, (jnp.ones_like(top), top))[1]


@ALGORITHMS.register("spectr", "SpecTr: Fast Speculative Decoding via Optimal Transport", "Sun et al. 2023",
                     family="speculative-theory", needs="a draft model", guarantee="distribution-exact")
def spectr(draft: Any, num_drafts: Count = 3, length: Count = 3) -> Speculative:
    """Drafts several independent chains with a draft model and accepts one with k-SEQ, an approximate optimal
    transport.

    If the draft model is often wrong about the first token, more drafts are accepted than with one chain.

    Args:
        draft: the draft model.
        num_drafts: number of chains.
        length: number of drafts in each chain.
    """
    return Speculative(DraftModel(draft), KSeq(), Fixed.balanced(num_drafts, *(1,) * (length - 1)))
