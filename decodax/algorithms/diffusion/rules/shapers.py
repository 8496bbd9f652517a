"""The memory of shapers that mix distributions of earlier steps into those of the current one (CCD, dInfer).

Only the likeliest tokens of a distribution are stored: an array as wide as the vocabulary would take more memory than
the cache. The docstring of each rule says what is lost.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.view import View
from decodax.common.struct import Struct, struct


@struct
class Past(Struct):
    """For each position of the window, up to `n` tokens with an amount to be added to their logits.

    Attributes:
        ids: `i32[B, W, n]`, token ids.
        amount: `f32[B, W, n]`, their amounts; 0 for unused places.
    """

    ids: Array
    amount: Array

    @classmethod
    def empty(cls, view: View, n: int) -> Past:
        """Returns amounts 0 for `n` tokens (id 0) of each position of the windows `view`."""
        shape = (*view.positions.shape, n)
        return cls(ids=jnp.zeros(shape, jnp.int32), amount=jnp.zeros(shape, jnp.float32))

    def unless(self, gone: Array) -> Past:
        """Returns a copy in which the rows `gone` (`bool[B]`) are empty: all their token ids and amounts are 0."""
        keep = ~gone[:, None, None]
        return Past(jnp.where(keep, self.ids, 0), jnp.where(keep, self.amount, 0))

    def onto(self, x: Array) -> Array:
        """Returns `x` (`f32[B, W, V]`, such as logits) with each stored amount added at its token."""
        return jax.vmap(jax.vmap(lambda row, at, new: row.at[at].add(new)))(x, self.ids, self.amount)
