"""Arithmetic sampling: several texts from evenly spaced codes, each of them a draw of the model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import struct
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.draw import first_argmax, race
from decodax.sampling.threshold import probabilities

CELLS = 16
"""Number of cells between the codes of two neighbouring samples."""


@struct
class Arithmetic(Transform):
    """Takes the token in whose interval of the distribution function the row's code lies (Vilnis et al., 2023).

    Of `N` samples the `i`-th has the code `(i / N + u) mod 1`, with one uniform `u` in [0, 1) for each prompt. So the
    code of each single sample is uniform, and the sample is a draw from the distribution, while each `N`-th of [0, 1)
    holds the code of exactly one of the samples, which together cover the distribution evenly. After a token the code
    is its place within the token's interval. Tokens stand in the order of their ids. The transform belongs at the
    chain's end.

    A code that is known to the last bit would make a text depend on the last bit of each sum: an interval of width `w`
    is stretched by `1 / w`, together with the rounding errors of its ends, so that a text would differ from batch to
    batch. Here a code is known up to a cell, at first a sixteenth of the distance between two samples, which is
    stretched with it. Among the tokens that meet the cell, one is drawn by its share of the cell. This does not change
    the law, and once a cell is the whole interval the row goes on like any other sample.

    Attributes:
        low, size: `f32[B]`, the cell of the code.
    """

    low: Array
    size: Array

    stage = "last"

    def init(self, ctx: Context) -> PyTree:
        return {"here": (self.low, self.size), "next": (self.low, self.size)}

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        token = self._take(state["here"], ctx, logits)[0]
        valid = (logits != -jnp.inf).any() & ~jnp.isnan(logits).any()
        return jnp.where(valid & (jnp.arange(logits.shape[-1]) != token), -jnp.inf, logits)

    def note(self, state: PyTree, ctx: Context, logits: Array) -> PyTree:
        return {**state, "next": self._take(state["here"], ctx, logits)[1]}

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        return {"here": state["next"], "next": state["next"]}       # any other token than that has probability 0

    def _take(self, cell: tuple[Array, Array], ctx: Context, logits: Array) -> tuple[Array, tuple[Array, Array]]:
        """The token, and the cell behind it."""
        p = probabilities(logits)[1]
        ends = jnp.cumsum(p)
        low, high = cell[0], cell[0] + cell[1]
        # what of each interval lies before the cell and behind it; at the ends of all no rounding cuts anything off
        before = jnp.where(low > 0, jnp.clip(low - (ends - p), 0, p), 0)
        behind = jnp.where(high < 1 - 1e-6, jnp.clip(ends - high, 0, p), 0)
        share = jnp.maximum(p - before - behind, 0)
        lost = ~(share.sum() > 0)           # a cell that is smaller than what is rounded off
        share, before = jnp.where(lost, p, share), jnp.where(lost, 0, before)
        address = keys.address(keys.at(ctx.key, ctx.length, Purpose.TRANSFORM))
        token = first_argmax(race(jnp.log(share), address))
        width = jnp.maximum(p[token], jnp.finfo(jnp.float32).tiny)
        return token, (before[token] / width, share[token] / width)


def evenly(seeds: np.ndarray, requests: np.ndarray, samples: int) -> Arithmetic:
    """Returns the transform for `samples` rows of each request, side by side.

    All samples of a request share one shift, which depends on the request's seed and id alone.

    Args:
        seeds: `u32[B, 2]`. requests: `u32[B]`.
    """
    shared = keys.row_keys(jnp.asarray(seeds), jnp.asarray(requests), jnp.full(len(requests), np.uint32(2 ** 32 - 1)))
    shift = jax.vmap(lambda key: keys.address(keys.at(key, jnp.int32(0), Purpose.TRANSFORM))[0])(shared)
    cells = CELLS * samples
    cell = (np.asarray(shift).astype(np.int64)[:, None] + CELLS * np.arange(samples)) % cells
    low: Any = (cell / cells).astype(np.float32).reshape(-1)
    size: Any = np.full(cell.size, 1 / cells, np.float32)
    return Arithmetic(low, size)
