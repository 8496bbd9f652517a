"""Rules that say which drafts hold, each with the guarantee it keeps.

A rule sees the policy lifted over the window (node `i` gives the distribution of what follows `i` drafts) and returns
the round's tokens: the accepted drafts and one token of the target's own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import jax.numpy as jnp
from jax import Array

from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.policy.draw import draw

if TYPE_CHECKING:
    from decodax.speculative.algorithm import Proposal

Guarantee = Literal["seed-exact", "distribution-exact", "approximate"]


class Verifier(Protocol):
    """A verification rule: a frozen dataclass, static under jit."""

    guarantee: ClassVar[Guarantee]

    def __call__(self, policy: Any, s: State, proposal: Proposal) -> tuple[Array, Array]:
        """Tokens `i32[B, K + 1]` and the number of accepted drafts `i32[B]`; entries beyond accepted + 1 are unread."""


@dataclasses.dataclass(frozen=True)
class SeedExact:
    """Draws the target's own token at each position, with the key that plain sampling uses there, and accepts a draft
    while it is that token.

    With one seed the output is token-identical to plain sampling for any draft. A draft `x` is accepted with
    probability p(x), as much as rejection sampling gives a deterministic draft.
    """

    guarantee: ClassVar[Guarantee] = "seed-exact"

    def __call__(self, policy: Any, s: State, proposal: Proposal) -> tuple[Array, Array]:
        tokens = policy.draw()
        return tokens, _prefix((tokens[:, :-1] == proposal.tokens) & _real(proposal))


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accepts a draft `x` with probability min(1, p(x) / q(x)); at the first rejection draws from the normalised
    positive part of p - q, and after the last draft from p (Leviathan et al. 2023, Chen et al. 2023).

    The distribution of the output is the target's; the tokens differ from plain sampling's. Accept, residual and bonus
    draws have keys of their own, apart from the draft's.
    """

    guarantee: ClassVar[Guarantee] = "distribution-exact"

    def __call__(self, policy: Any, s: State, proposal: Proposal) -> tuple[Array, Array]:
        log_p = policy.log_probs()
        drafts, V = proposal.tokens, log_p.shape[-1]
        K = drafts.shape[1]
        at = lambda x: jnp.take_along_axis(x, drafts[..., None], -1)[..., 0]
        log_q = jnp.zeros(drafts.shape) if proposal.log_q is None else at(proposal.log_q)
        u = keys.uniforms(s.key, policy.predicts[:, :K], Purpose.ACCEPT)[..., 0]
        # u < p/q, written so that q = 0 (a draft that cannot have been drawn) never divides
        holds = (u * jnp.exp(log_q) < jnp.exp(at(log_p[:, :K]))) & _real(proposal)
        accepted = _prefix(holds)

        p = jnp.exp(log_p)
        q = (drafts[..., None] == jnp.arange(V)).astype(p.dtype) if proposal.log_q is None else jnp.exp(proposal.log_q)
        residual = jnp.where(_real(proposal)[..., None], jnp.maximum(p[:, :K] - q, 0), p[:, :K])
        # p = q leaves no residual, and no rejection but by rounding: p itself is then the right limit
        residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p[:, :K])
        last = jnp.concatenate([jnp.log(residual), log_p[:, K:]], 1)
        own = draw(last, keys.uniforms(s.key, policy.predicts, Purpose.RESIDUAL))
        # broken logits reach the row's status: no draft behind them is accepted, since no comparison with NaN holds
        nodes = jnp.arange(K + 1)
        chosen = jnp.concatenate([drafts, drafts[:, :1]], 1)
        return jnp.where(nodes < accepted[:, None], chosen, own), accepted


def _real(proposal: Proposal) -> Array:
    return jnp.arange(proposal.tokens.shape[1]) < proposal.count[:, None]


def _prefix(holds: Array) -> Array:
    """The length of the leading run of true entries: `i32[B]` from `bool[B, K]`."""
    return jnp.cumprod(holds.astype(jnp.int32), 1).sum(1)
