"""Memory of shapers that mix distributions of earlier steps into those of the current one (CCD, dInfer).

Distributions are remembered for their likeliest tokens only: a carry as wide as the vocabulary would cost more than the
cache. Each rule says what is lost by that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.view import View
from decodax.common.struct import Struct, struct


@struct
class Past(Struct):
    """Amounts for some tokens of each position: ids `i32[B, W, n]` and amounts `f32[B, W, n]`; an unused place has
    amount 0."""

    ids: Array
    amount: Array

    @classmethod
    def empty(cls, view: View, n: int) -> Past:
        shape = (*view.positions.shape, n)
        return cls(ids=jnp.zeros(shape, jnp.int32), amount=jnp.zeros(shape, jnp.float32))

    def unless(self, gone: Array) -> Past:
        """The same, with all amounts 0 in the rows `gone` (`bool[B]`)."""
        keep = ~gone[:, None, None]
        return Past(jnp.where(keep, self.ids, 0), jnp.where(keep, self.amount, 0))

    def onto(self, x: Array) -> Array:
        """`x` (`f32[B, W, V]`) plus the amounts."""
        return jax.vmap(jax.vmap(lambda row, at, new: row.at[at].add(new)))(x, self.ids, self.amount)
