"""Functions for chains that end where the draft becomes uncertain: predictors, and the loop that grows a chain.

The uncertain token itself is drafted and verified; only the tokens after it are not. So whether a position is drafted
depends on the tokens before it and not on its own, and sampled drafts are exact under every verifier. The number of
draft steps is that of the longest row; the chain of a row does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.source import Children, Grower
from decodax.algorithms.speculative.tree import Proposal
from decodax.common.struct import Struct, struct
from decodax.pallas_kernels.vocabulary import top_k

TOP = 10
"""Number of probabilities that a predictor reads."""


@struct
class DraftFeatures(Struct):
    """Inputs of a `Predictor` for one draft of each row.

    Attributes:
        log_p: `f32[B]`, log-probability of the draft under the source, at temperature 1.
        entropy: `f32[B]`, entropy of the source's distribution, in nats.
        place: `i32[]`, index of the draft in the chain, 0 for the first.
        hidden: `f[B, D]`, the source's hidden state at the node before it; None if the source has none.
        top: `f32[B, TOP]`, the probabilities of the source's likeliest tokens, the largest first; see `likeliest`.
    """

    log_p: Array
    entropy: Array
    place: Array
    hidden: Array | None = None
    top: Array | None = None


Predictor = Callable[[DraftFeatures], Array]
"""A function that predicts the probability that a draft is accepted, `f32[B]`. It is static under jit: a function of a
module, or an instance of a frozen dataclass with `__call__`."""


def probability(draft: DraftFeatures) -> Array:
    """The default predictor of acceptance: returns the probability that the draft model gives to its own draft,
    `f32[B]`."""
    return jnp.exp(draft.log_p)


def chances(predictor: Predictor | None) -> Callable[[Children, Array], Array]:
    """Returns a function that predicts whether a chain's next draft is accepted: it maps the draft (`Children`) and its
    index in the chain, `i32[]`, to a probability, `f32[B]`. It calls `predictor`, or if that is None returns the
    source's own prediction (`foretold`)."""
    if predictor is None:
        return foretold
    return lambda child, i: predictor(DraftFeatures(child.own[:, 0, 0], entropy(child.log_own[:, 0]), i,
                                                    None if child.hidden is None else child.hidden[:, 0],
                                                    likeliest(child.log_own[:, 0])))


def foretold(child: Children, index: Array) -> Array:
    """Returns the source's own prediction of the probability that a chain's next draft is accepted, `f32[B]`. `index`,
    the draft's place in the chain, is not used.

    Raises:
        ValueError: the source predicts no acceptance (`Answer.chance` is None).
    """
    if child.chance is None:
        raise ValueError("shape: this one takes a source that predicts the acceptance of drafts, such as a block head "
                         "with a confidence head, or AcceptanceHead")
    return child.chance[:, 0]


def grow_chain(grower: Grower, state: Any, length: int, chance: Callable[[Children, Array], Array],
               goes_on: Callable[[Array, Array], Array], unseen: bool = False) -> tuple[Proposal, Any, Array]:
    """Grows a chain of at most `length` drafts.

    Args:
        grower: grows the tree.
        state: the source's state.
        length: largest number of drafts.
        chance: a function of the newest draft and its index `i32[]` that returns its probability of acceptance,
            `f32[B]`.
        goes_on: a function of that probability and of the product of all of them so far that returns True for rows that
            draft another token, `bool[B]`.
        unseen: True if `chance` does not depend on the newest draft itself; then rows that do not go on leave out that
            draft, too.

    Returns:
        The results of `Shape.grow`.
    """
    g, first = grower.start(state, length - 1, 1)
    B = g.tokens.shape[0]
    log_q = None if first.log_q is None else jnp.zeros((B, length, first.log_q.shape[-1]))
    chain = (jnp.zeros((B, length), jnp.int32), jnp.zeros((B, length), bool), log_q)

    def add(chain: Any, i: Array, child: Children, grows: Array, product: Array) -> tuple[Any, Array, Array]:
        f = chance(child, i)
        on = goes_on(f, product * f)
        live = child.live[:, :, 0] & (grows & on if unseen else grows)[:, None]
        new = (child.tokens[:, :, 0], live, child.log_q)
        chain = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 1), chain, new)
        return chain, live[:, 0] & on, product * f

    def unfinished(carry: Any) -> Array:
        return (carry[0] < length) & carry[-2].any()

    def visit(carry: Any) -> Any:
        i, g, chain, grows, product = carry
        newest = jax.lax.dynamic_slice_in_dim(chain[0], i - 1, 1, 1)
        g, child = grower.expand(g, newest, g.filled[None, None] - 1, 1)
        return (i + 1, g, *add(chain, i, child, grows, product))

    start = add(chain, jnp.zeros((), jnp.int32), first, grower.s.running, jnp.ones(B))
    carry = (jnp.ones((), jnp.int32), g, *start)
    if length > 1:
        carry = jax.lax.while_loop(unfinished, visit, carry)
    _, g, (tokens, live, log_q), _, _ = carry
    node = jnp.arange(1, length, dtype=jnp.int32)[None]
    return Proposal(tokens=tokens, live=live, log_q=log_q), g.source, jnp.where(node < g.filled, node, -1)


def entropy(log_p: Array) -> Array:
    """Returns the entropy in nats, `f32[...]`, of log-probabilities `f32[..., V]`."""
    p = jnp.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0).sum(-1)


def likeliest(log_p: Array) -> Array:
    """Returns the `TOP` largest probabilities, `f32[..., TOP]`, of log-probabilities `f32[..., V]`; of a smaller
    vocabulary the last ones are 0."""
    count = min(TOP, log_p.shape[-1])
    best = jnp.exp(top_k(log_p, count)[0])
    return jnp.pad(best, [(0, 0)] * (best.ndim - 1) + [(0, TOP - count)])


def check_chance(name: str, value: float) -> None:
    """Raises ValueError if `value` is outside [0, 1]; the error begins with `name`."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: got {value}, takes 0 to 1")
