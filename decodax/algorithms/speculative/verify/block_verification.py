"""Block verification: accepts or rejects a chain of drafts jointly instead of token by token ("Block Verification
Accelerates Speculative Decoding", Sun et al., 2024). The output has the target's distribution.

Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)). The first i drafts are accepted with probability w_i, so a draft
that is more likely under p than under q makes up for one that is less likely. In the paper's terms, for i = 0 .. n - 1
and n drafts

    h_i = S_i / (S_i + 1 - w_i),    S_i = sum_x max(w_i p(x | x_1 .. x_i) - q(x | x_1 .. x_i), 0),

and h_n = w_n. Draft i passes if a uniform number of its own is below h_i. The last draft that passes is accepted
together with all drafts before it, whether or not those passed. The next token is drawn from the normalised max(w_i p -
q, 0), and after the last draft from p. No rule that keeps p and looks at one block accepts more drafts in expectation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.tree import Drawn, Tree
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.rejection import chain_drafts
from decodax.algorithms.speculative.verify.walk import residual
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.window import take
from decodax.sampling.distribution import Distribution
from decodax.sampling.draw import draw


@dataclasses.dataclass(frozen=True)
class BlockVerification(Verifier):
    """Block verification of a chain (Sun et al., 2024). The output has the target's distribution. In expectation it
    accepts at least as many drafts as `Rejection`, and exactly as many deterministic drafts.

    Acceptance depends on later drafts, some of which are dropped and drafted again. So unlike other rules, this one
    needs drafts with new noise in each round, not noise that depends on the position alone. Drafts grown by a `Shape`
    have it: their noise depends also on the depth of the node.
    """

    guarantee: ClassVar[Guarantee] = "distribution-exact"
    drawn: ClassVar[Drawn] = "independent"
    refuses: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        log_p = dist.log_probs()
        live, p, q, own_p, own_q = chain_drafts(self, tree, log_p)
        K = live.shape[1]
        # no draft after broken logits holds: a row that gets there ends there, with a status
        sound = log_p[:, :K].max(-1) > -jnp.inf
        n = jnp.cumprod((live & sound).astype(jnp.int32), 1).sum(1)

        def weigh(w: Array, ratio: Array) -> tuple[Array, Array]:
            w = jnp.minimum(w * ratio, 1)
            return w, w

        # q = 0 (a draft that cannot have been drawn) never divides; p / tiny is finite, so that 0 times it is 0
        ratio = own_p / jnp.maximum(own_q, jnp.finfo(p.dtype).tiny)
        one = jnp.ones_like(ratio[:, 0])
        w = jnp.concatenate([one[:, None], lax.scan(weigh, one, ratio.T)[1].T], 1)      # [B, 1 + K]
        spare = jnp.maximum(w[:, :K, None] * p - q, 0).sum(-1)
        total = spare + 1 - w[:, :K]
        # p = q all over and w = 1: a later draft holds but for rounding
        h = jnp.where(total > 0, spare / jnp.where(total > 0, total, 1), 1)
        node = jnp.arange(K + 1, dtype=jnp.int32)
        h = jnp.where(node == n[:, None], w, jnp.concatenate([h, w[:, K:]], 1))
        # a position may be judged in several rounds: the row's length tells them apart
        u = keys.uniforms(s.key, dist.predicts[:, :K], Purpose.ACCEPT, s.length)[..., 0]
        passes = (u < h[:, 1:]) & (node[1:] <= n[:, None])
        accepted = jnp.where(passes, node[1:], 0).max(1, initial=0)

        end = accepted[:, None]
        here = jnp.exp(take(log_p, end)[:, 0])
        below = take(q, jnp.minimum(end, K - 1))[:, 0]
        weight = jnp.take_along_axis(w, end, 1)
        left = jnp.where((accepted < n)[:, None], residual(weight * here - below, here), here)
        predicts = jnp.take_along_axis(dist.predicts, end, 1)
        own = draw(jnp.log(left)[:, None], keys.addresses(s.key, predicts, Purpose.RESIDUAL))[:, 0]
        return jnp.broadcast_to(node, tree.tokens.shape), accepted, own


@ALGORITHMS.register("block-verification", "Block Verification Accelerates Speculative Decoding", "Sun et al. 2024",
                     family="speculative-theory", needs="a draft model", guarantee="distribution-exact")
def block_verification(draft: Any, length: Count = 6) -> Speculative:
    """Accepts a draft model's chain jointly; in expectation at least as many drafts as with token-by-token
    verification.

    It replaces `speculative_decoding` for long chains; the output has the target's distribution.

    Args:
        draft: the draft model.
        length: number of drafts in a round.
    """
    return Speculative(DraftModel(draft), BlockVerification(), Chain(length))
