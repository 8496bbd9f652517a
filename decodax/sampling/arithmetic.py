"""Arithmetic sampling: several samples of a prompt from evenly spaced codes, so that they cover the distribution
evenly."""

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
    """Takes the token whose interval of the distribution function contains the row's code (Vilnis et al., 2023).

    Sample `i` of `N` has the code `(i / N + u) mod 1`, with one uniform `u` in [0, 1) per prompt. The code of each
    single sample is uniform, so the sample is a draw from the distribution. Together the codes are evenly spaced, so
    the samples cover the distribution evenly. After a token, the code is its relative place within the token's
    interval. Tokens are ordered by id. The transform belongs at the chain's end.

    An exact code would make a text depend on rounding: a token's interval of width `w` is stretched by `1 / w`,
    together with the rounding errors of its ends, so a text could differ from batch to batch. Therefore a row has a
    cell of possible codes, at first a sixteenth of the distance between two samples, which is stretched with the
    interval. Among the tokens whose intervals overlap the cell, one is drawn with probability proportional to the
    overlap. This does not change the distribution. When the cell covers the complete interval [0, 1), the row continues
    as an ordinary sample.

    Attributes:
        low: `f32[B]`, lower end of the code's cell.
        size: `f32[B]`, size of the cell.
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
        return {"here": state["next"], "next": state["next"]}       # every other token has probability 0

    def _take(self, cell: tuple[Array, Array], ctx: Context, logits: Array) -> tuple[Array, tuple[Array, Array]]:
        """Returns the token for a cell of codes, and the cell after it."""
        p = probabilities(logits)[1]
        ends = jnp.cumsum(p)
        low, high = cell[0], cell[0] + cell[1]
        # Parts of each interval outside the cell. At 0 and 1 nothing may be cut off by rounding.
        before = jnp.where(low > 0, jnp.clip(low - (ends - p), 0, p), 0)
        after = jnp.where(high < 1 - 1e-6, jnp.clip(ends - high, 0, p), 0)
        share = jnp.maximum(p - before - after, 0)
        lost = ~(share.sum() > 0)           # the cell is smaller than the rounding error
        share, before = jnp.where(lost, p, share), jnp.where(lost, 0, before)
        address = keys.address(keys.at(ctx.key, ctx.length, Purpose.TRANSFORM))
        token = first_argmax(race(jnp.log(share), address))
        width = jnp.maximum(p[token], jnp.finfo(jnp.float32).tiny)
        return token, (before[token] / width, share[token] / width)


def evenly(seeds: np.ndarray, requests: np.ndarray, samples: int) -> Arithmetic:
    """Returns the transform for `samples` rows of each request; the rows of a request are adjacent.

    All samples of a request share one shift, which depends on the request's seed and id alone.

    Args:
        seeds: `u32[B, 2]`, the seed of each request.
        requests: `u32[B]`, the id of each request.
        samples: number of samples per request.
    """
    shared = keys.row_keys(jnp.asarray(seeds), jnp.asarray(requests), jnp.full(len(requests), np.uint32(2 ** 32 - 1)))
    shift = jax.vmap(lambda key: keys.address(keys.at(key, jnp.int32(0), Purpose.TRANSFORM))[0])(shared)
    cells = CELLS * samples
    cell = (np.asarray(shift).astype(np.int64)[:, None] + CELLS * np.arange(samples)) % cells
    low: Any = (cell / cells).astype(np.float32).reshape(-1)
    size: Any = np.full(cell.size, 1 / cells, np.float32)
    return Arithmetic(low, size)
