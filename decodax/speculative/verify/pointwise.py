"""Rules that test each draft by itself against its parent's distribution; the longest path of passing drafts holds."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.core.state import State
from decodax.speculative.tree import Tree, deepest
from decodax.speculative.verify.base import AnyTree, Guarantee


@dataclasses.dataclass(frozen=True)
class SeedExact(AnyTree):
    """Draws the target's own token at each node, with the key that plain sampling uses at its position, and accepts a
    draft if it is the token drawn at its parent.

    With one seed the output is token-identical to plain sampling for any draft and any tree. A draft `x` is accepted
    with probability p(x), as much as rejection sampling gives a deterministic draft. Greedy rows are a special case.
    """

    guarantee: ClassVar[Guarantee] = "seed-exact"
    drawn: ClassVar = "coupled"

    def __call__(self, policy: Any, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        tokens = policy.draw()
        path, accepted = deepest(tree, at_parents(tree, tokens) == tree.tokens)
        return path, accepted, at_end(tokens, path, accepted)


def at_parents(tree: Tree, x: Array) -> Array:
    """`x` (`[B, 1 + N, ...]`, a value of each node) of each node's parent; the newest token gets its own."""
    up = jnp.maximum(jnp.broadcast_to(tree.parents, tree.tokens.shape), 0)
    return jnp.take_along_axis(x, up.reshape(*up.shape, *[1] * (x.ndim - 2)), 1)


def at_end(x: Array, path: Array, accepted: Array) -> Array:
    """`x` (`[B, 1 + N]`) of the last accepted node: `[B]`."""
    node = jnp.take_along_axis(path, accepted[:, None], 1)
    return jnp.take_along_axis(x, node, 1)[:, 0]
