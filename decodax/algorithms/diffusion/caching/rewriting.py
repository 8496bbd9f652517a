"""Base of approximate caches that write every entry they recompute.

With attention in both directions, every entry of the cache becomes stale with each unmasked token. These rules need no
training. They differ in the positions that a narrow forward pass recomputes, and in when a wide one refreshes all of
them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.policies import Caching, Memory
from decodax.algorithms.diffusion.view import View


class Rewriting(Caching):
    """Base class of caching rules by which every forward pass writes the keys and values of all positions that it
    computes, also of those whose tokens may still change."""

    approximate = True

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return jnp.ones(positions.shape, bool)


def scattered(live: Array) -> Nodes:
    """Returns `Nodes` with one node for each of the `N` positions of the text; those that are not `live` (`bool[B, N]`)
    are padding."""
    positions = jnp.broadcast_to(jnp.arange(live.shape[1], dtype=jnp.int32), live.shape)
    return Nodes(positions=positions, live=live, own=jnp.ones(live.shape, bool))


def with_left(these: Array, left: int) -> Array:
    """Returns the mask `these` (`bool[B, N]`) of positions, with the `left` positions before each of them added."""
    for _ in range(left):
        these = these | jnp.pad(these[:, 1:], ((0, 0), (0, 1)))
    return these
