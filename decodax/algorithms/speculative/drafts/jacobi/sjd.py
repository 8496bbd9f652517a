"""Speculative Jacobi decoding (SJD): Jacobi iteration with a probabilistic test in place of the fixed point
("Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding", Teng et al.,
2024).

The window's tokens are draws from the conditionals `p_{j-1}` of the previous iteration, which are the draft
distribution of this one. Under `Rejection`, token `x_i` is accepted with probability min(1, p_j(x_i) / p_{j-1}(x_i)).
After the first rejection the token is drawn from the positive part of p_j - p_{j-1}, the tokens after it are drawn
again from `p_j`, and new tokens enter at the end. Under `SeedExact` the draws use the noise of the target's own draws,
and the window is a coupled Jacobi iteration.

To carry `p_{j-1}` would need an array of vocabulary size for each position. Only its `top` most likely tokens are kept,
renormalised, and tokens are drawn from exactly this distribution. So the reported q is the sampled q, and the output
has the target's distribution for any `top`. If the policy leaves at most `top` tokens (top-k, the paper's setting), q
is `p_{j-1}` itself. A new token is a deterministic draft (q has all probability on it), as in the authors' code. The
refinements of SJD++ and MC-SJD are not implemented.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS, Form
from decodax.algorithms.speculative.drafts.jacobi.jacobi import Fill, check_fill, filling, nodes_after
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import Verifier
from decodax.algorithms.speculative.verify.rejection import Rejection
from decodax.common.arguments import check_counts
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.cache import Feature
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.draw import draw


@struct
class Conditionals(Struct):
    """State of `SJD`: conditionals of the previous iteration for the tokens after the newest one.

    Attributes:
        tokens: `i32[B, K, top]`, the most likely tokens.
        log_p: `f32[B, K, top]`, their log-probabilities, not renormalised; all -inf if there are none yet.
        policy: within a round, the sampling policy for `p_j`.
    """

    tokens: Array
    log_p: Array
    policy: Any = None


@dataclasses.dataclass(frozen=True)
class SJD(Draft):
    """Drafts a window of draws from the target's own conditionals in the previous iteration (Teng et al., 2024).

    Attributes:
        vocab_size: number of the target's logits.
        length: number of tokens in the window.
        top: number of most likely tokens of a conditional that are kept.
        fill: the token that enters the window; the paper draws it from the text or at random, or repeats a neighbour.

    Raises:
        ValueError: a number below 1, or an invalid fill; or, while it is traced, logits of another size.
    """

    vocab_size: int
    length: int = 16
    top: int = 64
    fill: Fill = "text"
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS
    proposes: ClassVar[frozenset[Form]] = frozenset(("draws",))

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "length", "top")
        check_fill(self.fill)

    def init(self, params: Params, s: State) -> Conditionals:
        shape = (s.batch, self.length, min(self.top, self.vocab_size))
        return Conditionals(tokens=jnp.zeros(shape, jnp.int32), log_p=jnp.full(shape, -jnp.inf, jnp.float32))

    def propose(self, params: Params, policy: Any, s: State, state: Conditionals,
                drawn: Drawn) -> tuple[Proposal, Conditionals]:
        log_q = self._log_q(s, state)
        positions = s.length[:, None] + jnp.arange(self.length, dtype=jnp.int32)
        if drawn in ("coupled", "ranked"):
            at = keys.addresses(s.key, positions, Purpose.TOKEN)
        else:       # a position is drawn anew in every round that does not reach it
            at = keys.addresses(s.key, positions, Purpose.DRAFT, s.stats.rounds)
        tokens = draw(log_q, at)
        count = jnp.full(s.batch, self.length, jnp.int32)
        return chain(tokens, count, None if drawn in ("coupled", "ranked") else log_q), state.replace(policy=policy)

    def _log_q(self, s: State, state: Conditionals) -> Array:
        """Returns the draft distributions as log-probabilities, `f32[B, K, V]`; a position without a conditional has
        all probability on one token."""
        known = (state.log_p > -jnp.inf).any(-1)
        fresh = filling(self.fill, s, self.length)[..., None] == jnp.arange(self.vocab_size)
        log_p = jax.nn.log_softmax(jnp.where(known[..., None], state.log_p, 0), -1)
        put = lambda row, tokens, x: row.at[tokens].set(x)
        kept = jax.vmap(jax.vmap(put))(jnp.full(fresh.shape, -jnp.inf), state.tokens, log_p)
        return jnp.where(known[..., None], kept, jnp.where(fresh, 0.0, -jnp.inf))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Conditionals) -> Conditionals:
        if decision is None or state.policy is None:
            return state.replace(policy=None)
        nodes, run = nodes_after(s, window, decision, self.length)
        log_p = state.policy.over(s, window, out).log_probs()
        if log_p.shape[-1] != self.vocab_size:
            raise ValueError(f"vocab_size: got {self.vocab_size}, the target's logits have {log_p.shape[-1]} entries")
        log_p = take(log_p, nodes)
        log_p, tokens = top_k(jnp.where(run[..., None] & ~jnp.isnan(log_p), log_p, -jnp.inf),
                                      state.tokens.shape[-1])
        return Conditionals(tokens=tokens.astype(jnp.int32), log_p=log_p)


@ALGORITHMS.register("sjd", "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative "
                     "Jacobi Decoding", "Teng et al. 2024", family="parallel-jacobi", needs="a model",
                     guarantee="distribution-exact")
def sjd(lm: Any, length: Count = 16, top: Count = 64, verify: Verifier = Rejection()) -> Speculative:
    """Iterates a window of draws, with the conditionals of the previous iteration as the draft distribution.

    For sampled texts and images, for which plain Jacobi iteration accepts few tokens.

    Args:
        lm: the target.
        length: number of tokens in the window.
        top: number of most likely tokens of a conditional that are kept.
        verify: the rule that accepts drafts.
    """
    return Speculative(SJD(lm.vocab_size, length, min(top, lm.vocab_size)), verify)
