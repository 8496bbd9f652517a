"""Rules that test each draft by itself against its parent's distribution; the longest path of passing drafts holds."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.tree import Drawn, Tree, deepest, path_to
from decodax.algorithms.speculative.verify.base import Guarantee, Verifier
from decodax.core.state import State
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.base import Distribution, Temperature
from decodax.sampling.draw import winner


@dataclasses.dataclass(frozen=True)
class SeedExact(Verifier):
    """Draws the target's own token at each node, with the key that plain sampling uses at its position, and accepts a
    draft if it is the token drawn at its parent.

    With one seed the output is token-identical to plain sampling for any draft and any tree. A draft `x` is accepted
    with probability p(x), as much as rejection sampling gives a deterministic draft. Greedy rows are a special case.
    """

    guarantee: ClassVar[Guarantee] = "seed-exact"
    drawn: ClassVar[Drawn] = "coupled"

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        tokens = dist.draw()
        path, accepted = deepest(tree, at_parents(tree, tokens) == tree.tokens)
        return path, accepted, at_end(tokens, path, accepted)


@dataclasses.dataclass(frozen=True)
class Greedy(Verifier):
    """Accepts a draft if it is the most likely token after its parent; the next token is the most likely one too.

    Exact for greedy rows (Stern et al. 2018; every method's greedy verification). A row that samples gets the most
    likely tokens instead, so in general the rule is approximate.
    """

    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        best = winner(dist.processed())
        path, accepted = deepest(tree, at_parents(tree, best) == tree.tokens)
        return path, accepted, at_end(best, path, accepted)


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance(Verifier):
    """Typical acceptance of Medusa (Cai et al. 2024): a draft `x` holds if `p(x) > min(epsilon, delta * exp(-H(p)))`,
    with the entropy `H` in nats: if it is likely enough, or not much less likely than a typical token.

    As in the paper the first token is greedy and accepted unconditionally: the most likely token after the accepted
    drafts is what the round adds to them. As in the authors' code the likeliest among equally deep paths is taken. p
    is the row's processed distribution, so a greedy row gets greedy decoding, exactly; sampled rows are approximate.

    Attributes:
        epsilon: hard threshold, between 0 and 1. delta: entropy-dependent threshold, above 0; the authors recommend
            the square root of `epsilon`. The defaults are those of their code.

    Raises:
        ValueError: a threshold out of range.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon: got {self.epsilon}, takes a number between 0 and 1")
        if not self.delta > 0:
            raise ValueError(f"delta: got {self.delta}, takes a number above 0")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        log_p = dist.log_probs()
        entropy = -jnp.where(log_p == -jnp.inf, 0, jnp.exp(log_p) * log_p).sum(-1)
        bound = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        chance = of_tokens(tree, log_p)
        path, accepted = likeliest(tree, jnp.exp(chance) > at_parents(tree, bound), chance)
        return path, accepted, at_end(winner(log_p), path, accepted)


@dataclasses.dataclass(frozen=True)
class SpecVerification(Verifier):
    """Spec-Verification (SpecDec, Xia et al. 2023; GAD++, Ge et al. 2022): a draft holds if it is among the `beta` most
    likely tokens after its parent and its log-probability is at most `tau` below the best one's.

    The next token is the most likely one. Ranks and log-probabilities are those of the row's processed distribution;
    of a greedy row, where only one token would be left, those before the temperature. With beta 1, or tau 0 and no
    ties, it is `Greedy`; otherwise approximate. Among equally deep paths the one nearest to the best tokens is taken.

    Raises:
        ValueError: beta below 1 or tau below 0.
    """

    beta: int = 3
    tau: float = 1.0
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise ValueError(f"beta: got {self.beta}, takes at least 1")
        if not self.tau >= 0:
            raise ValueError(f"tau: got {self.tau}, takes at least 0")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return among(dist, tree, self.beta, self.tau)


@dataclasses.dataclass(frozen=True)
class TopKAcceptance(Verifier):
    """Top-k acceptance of blockwise parallel decoding (Stern et al. 2018): a draft holds if it is among the `k` most
    likely tokens after its parent. `SpecVerification` without a bound on the log-probability; with k 1 it is `Greedy`.

    Raises:
        ValueError: k below 1.
    """

    k: int
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k: got {self.k}, takes at least 1")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return among(dist, tree, self.k, math.inf)


@dataclasses.dataclass(frozen=True)
class Distance(Verifier):
    """Distance-based acceptance of blockwise parallel decoding (Stern et al. 2018), for tokens whose ids are ordinal,
    such as intensities of pixels: a draft holds if it is at most `epsilon` away from the most likely token after its
    parent, and the policy allows it. The next token is the most likely one. With epsilon 0 it is `Greedy`.

    Raises:
        ValueError: epsilon below 0.
    """

    epsilon: int
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if self.epsilon < 0:
            raise ValueError(f"epsilon: got {self.epsilon}, takes at least 0")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        logits = before_temperature(dist)
        best = winner(logits)
        above = at_parents(tree, best)
        near = jnp.abs(above - tree.tokens)
        holds = (above >= 0) & (near <= self.epsilon) & (of_tokens(tree, logits) > -jnp.inf)
        path, accepted = likeliest(tree, holds, -near.astype(jnp.float32))
        return path, accepted, at_end(best, path, accepted)


def among(dist: Distribution, tree: Tree, beta: int, tau: float) -> tuple[Array, Array, Array]:
    """The result of a rule that accepts the `beta` best tokens as far as their logits are at most `tau` below the
    best; ties go to the smaller id."""
    logits = before_temperature(dist)
    values, tokens = top_k(logits, min(beta, logits.shape[-1]))
    best = winner(logits)
    gap = values[..., :1] - values
    # what the policy forbids has a rank too, and no comparison may let a broken distribution accept
    ok = (gap <= tau) & (values > -jnp.inf) & (best >= 0)[..., None]
    hit = at_parents(tree, jnp.where(ok, tokens, -1)) == tree.tokens[..., None]
    score = -jnp.where(hit, at_parents(tree, gap), 0).sum(-1)
    path, accepted = likeliest(tree, hit.any(-1), score)
    return path, accepted, at_end(best, path, accepted)


def before_temperature(dist: Distribution) -> Array:
    """The processed logits `f32[B, 1 + N, V]`; of greedy rows, where the temperature leaves a single token, those that
    go into it."""
    chain, hot = dist.policy.transforms, dist.processed()
    cut = next((i for i, t in enumerate(chain) if isinstance(t, Temperature)), None)
    if cut is None:
        return hot
    cold = dist.replace(policy=dist.policy.replace(transforms=chain[:cut]),
                        texts=dist.texts.replace(states=dist.texts.states[:cut])).processed()
    return jnp.where(dist.policy.greedy[:, None, None], cold, hot)


def likeliest(tree: Tree, holds: Array, score: Array) -> tuple[Array, Array]:
    """As `deepest`, but among equally deep paths the one whose drafts' `score` (`f32[B, 1 + N]`) has the largest sum,
    and the first of those."""
    holds = (holds & tree.live).at[:, 0].set(True)
    good = (holds[:, None, :] | ~tree.sees).all(-1)
    depth = jnp.where(good, tree.depth, -1)
    drafts = tree.sees & holds[:, None, :] & (jnp.arange(tree.size) > 0)
    total = jnp.where(drafts, score[:, None, :], 0).sum(-1)
    node = jnp.argmax(jnp.where(depth == depth.max(1, keepdims=True), total, -jnp.inf), 1)
    return path_to(tree, node), jnp.take_along_axis(depth, node[:, None], 1)[:, 0]


def at_parents(tree: Tree, x: Array) -> Array:
    """`x` (`[B, 1 + N, ...]`, a value of each node) of each node's parent; the newest token gets its own."""
    up = jnp.maximum(jnp.broadcast_to(tree.parents, tree.tokens.shape), 0)
    return jnp.take_along_axis(x, up.reshape(*up.shape, *[1] * (x.ndim - 2)), 1)


def of_tokens(tree: Tree, x: Array) -> Array:
    """`x` (`[B, 1 + N, V]`) of each node's token at its parent: `[B, 1 + N]`."""
    up = jnp.maximum(jnp.broadcast_to(tree.parents, tree.tokens.shape), 0)
    return x[jnp.arange(up.shape[0])[:, None], up, tree.tokens]


def at_end(x: Array, path: Array, accepted: Array) -> Array:
    """`x` (`[B, 1 + N]`) of the last accepted node: `[B]`."""
    node = jnp.take_along_axis(path, accepted[:, None], 1)
    return jnp.take_along_axis(x, node, 1)[:, 0]
