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
    """Base of caches to which every forward pass writes the entries that it computed."""

    approximate = True

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return jnp.ones(positions.shape, bool)


def scattered(live: Array) -> Nodes:
    """Returns the positions that are `live` (`bool[B, N]`) as nodes."""
    positions = jnp.broadcast_to(jnp.arange(live.shape[1], dtype=jnp.int32), live.shape)
    return Nodes(positions=positions, live=live, own=jnp.ones(live.shape, bool))


def with_left(these: Array, left: int) -> Array:
    """Adds to the positions `these` (`bool[B, N]`) the `left` positions before each of them."""
    for _ in range(left):
        these = these | jnp.pad(these[:, 1:], ((0, 0), (0, 1)))
    return these
