"""Base of approximate caches that write every entry they recompute.

Under attention in both directions every entry of the cache becomes stale with each unmasked token. These rules need no
training. They differ in which positions a narrow forward recomputes, and in when a wide forward refreshes all of them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.policies import Caching, Memory
from decodax.algorithms.diffusion.view import View


class Rewriting(Caching):
    """Base of caches into which every forward writes the entries that it computed."""

    approximate = True

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return jnp.ones(positions.shape, bool)


def scattered(live: Array) -> Nodes:
    """Returns the positions of the text that are `live` (`bool[B, N]`) as nodes."""
    positions = jnp.broadcast_to(jnp.arange(live.shape[1], dtype=jnp.int32), live.shape)
    return Nodes(positions=positions, live=live, own=jnp.ones(live.shape, bool))


def with_left(these: Array, left: int) -> Array:
    """Returns `these` positions (`bool[B, N]`) together with the `left` positions before each of them."""
    for _ in range(left):
        these = these | jnp.pad(these[:, 1:], ((0, 0), (0, 1)))
    return these
