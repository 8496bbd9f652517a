"""Functions for the approximate verifiers, which accept drafts that are likely enough."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.tree import Tree, at_end, at_parents, path_to
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.base import Temperature
from decodax.sampling.distribution import Distribution
from decodax.sampling.draw import winner


def among(dist: Distribution, tree: Tree, beta: int, tau: float) -> tuple[Array, Array, Array]:
    """Accepts drafts that are among the `beta` most likely tokens (of equal logits the smaller id ranks first) and
    whose logits are at most `tau` below the largest.

    Returns the accepted path, `i32[B, longest + 1]`, window nodes from the newest token (0) down; the number of
    accepted drafts on it, `i32[B]`; and the target's likeliest token after them, `i32[B]`.
    """
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
    """Returns the logits after the policy at each node of the window, `f32[B, 1 + N, V]`; in rows with temperature 0
    those before the temperature, since after it only one token would remain."""
    chain, hot = dist.policy.transforms, dist.processed()
    cut = next((i for i, t in enumerate(chain) if isinstance(t, Temperature)), None)
    if cut is None:
        return hot
    cold = dist.replace(policy=dist.policy.replace(transforms=chain[:cut]),
                        texts=dist.texts.replace(states=dist.texts.states[:cut])).processed()
    return jnp.where(dist.policy.greedy[:, None, None], cold, hot)


def likeliest(tree: Tree, holds: Array, score: Array) -> tuple[Array, Array]:
    """Returns the longest path from the newest token on whose drafts are all acceptable (`holds`, `bool[B, 1 + N]`),
    `i32[B, longest + 1]`, padded with 0, and its number of drafts, `i32[B]`. Of equally long paths it is the one with
    the largest sum of `score` (`f32[B, 1 + N]`), and of those the first."""
    holds = (holds & tree.live).at[:, 0].set(True)
    good = (holds[:, None, :] | ~tree.sees).all(-1)
    depth = jnp.where(good, tree.depth, -1)
    drafts = tree.sees & holds[:, None, :] & (jnp.arange(tree.size) > 0)
    total = jnp.where(drafts, score[:, None, :], 0).sum(-1)
    node = jnp.argmax(jnp.where(depth == depth.max(1, keepdims=True), total, -jnp.inf), 1)
    return path_to(tree, node), jnp.take_along_axis(depth, node[:, None], 1)[:, 0]
