"""Arithmetic sampling: several texts from evenly spaced codes, each of them a draw, none of them near another.

Whole numbers throughout: a code has 64 bits in two words, and the distribution function counts in units of 2^-30, so
that a text does not hang on the rounding of a sum. What a code loses to a token, the draw's address gives back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.policy.base import Context, PyTree, Transform
from decodax.struct import struct

UNIT = 1 << 30
"""Units of probability in the whole."""


@struct
class Arithmetic(Transform):
    """Takes the token in whose interval of the distribution function the row's code lies (Vilnis et al., 2023).

    Of `N` samples the `i`-th has the code `(i + u) / N`, with one uniform `u` for all: so each is a draw from the
    distribution, and together they cover it evenly. Behind a token the code is what it was within the token's interval.
    Tokens stand in the order of their ids. It belongs at the chain's end.

    Attributes:
        code: `u32[B, 2]`, high and low word of the code's fraction.
    """

    code: Array

    stage = "last"

    def init(self, ctx: Context) -> PyTree:
        return {"code": self.code, "next": self.code}

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        token = self._take(state["code"], ctx, logits)[0]
        valid = (logits != -jnp.inf).any() & ~jnp.isnan(logits).any()
        return jnp.where(valid & (jnp.arange(logits.shape[-1]) != token), -jnp.inf, logits)

    def note(self, state: PyTree, ctx: Context, logits: Array) -> PyTree:
        return {**state, "next": self._take(state["code"], ctx, logits)[1]}

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        return {"code": state["next"], "next": state["next"]}       # any other token than that has probability 0

    def _take(self, code: Array, ctx: Context, logits: Array) -> tuple[Array, Array]:
        """The token, and the code behind it."""
        weight = jnp.exp(logits - logits.max())
        units = jnp.where(weight > 0, jnp.maximum(weight / weight.sum() * UNIT, 1), 0).astype(jnp.uint32)
        ends = jnp.cumsum(units)
        total = ends[-1]
        noise = keys.address(keys.at(ctx.key, ctx.length, Purpose.TRANSFORM))[0]
        whole, high, low = _times(code, total, noise)
        whole = jnp.minimum(whole, total - 1)
        token = jnp.searchsorted(ends, whole, side="right").astype(jnp.int32)
        token = jnp.minimum(token, logits.shape[-1] - 1)
        return token, _divide(whole - (ends[token] - units[token]), high, low, jnp.maximum(units[token], 1))


def _wide(a: Array, b: Array) -> tuple[Array, Array]:
    """The product of two words, high and low."""
    mask, half = jnp.uint32(0xFFFF), jnp.uint32(16)
    a1, a0, b1, b0 = a >> half, a & mask, b >> half, b & mask
    low, cross, other, top = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    middle = (low >> half) + (cross & mask) + (other & mask)
    return top + (cross >> half) + (other >> half) + (middle >> half), (middle << half) | (low & mask)


def _times(code: Array, total: Array, noise: Array) -> tuple[Array, Array, Array]:
    """A code's fraction times `total`: the whole number, and the fraction's two words.

    The code is known to 2^-64. Which of the `total` units of 2^-64 that the product is then not known to, `noise` says.
    """
    whole, high = _wide(code[0], total)
    carried, low = _wide(code[1], total)
    low, carry = _add(low, _wide(noise, total)[0])
    carried = carried + carry           # a product's high word is never all ones
    high, carry = _add(high, carried)
    return whole + carry, high, low


def _add(a: Array, b: Array) -> tuple[Array, Array]:
    """A sum of words, and what it carries."""
    total = a + b
    return total, (total < a).astype(jnp.uint32)


def _divide(whole: Array, high: Array, low: Array, by: Array) -> Array:
    """The 64 bits of the fraction `(whole + fraction) / by`, where `whole < by`, which is at most 2^31."""
    def digit(i: Array, held: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, words = held
        word = jnp.where(i < 32, high, low)
        rest = (rest << 1) | ((word >> (31 - i % 32).astype(jnp.uint32)) & 1)
        goes = rest >= by
        at = jnp.where(i < 32, 0, 1)
        words = words.at[at].set((words[at] << 1) | goes.astype(jnp.uint32))
        return jnp.where(goes, rest - by, rest), words

    return lax.fori_loop(0, 64, digit, (whole, jnp.zeros(2, jnp.uint32)))[1]


def codes(seeds: np.ndarray, requests: np.ndarray, samples: int) -> np.ndarray:
    """Evenly spaced codes for each request's samples: `u32[B * samples, 2]`.

    Args:
        seeds: `u32[B, 2]`. requests: `u32[B]`.
    """
    out: Any = np.empty((len(requests), samples, 2), np.uint32)
    shifts = jax.vmap(lambda key: keys.address(keys.at(key, jnp.int32(0), Purpose.TRANSFORM)))(
        keys.row_keys(jnp.asarray(seeds), jnp.asarray(requests), jnp.full(len(requests), np.uint32(2 ** 32 - 1))))
    for i, (high, low) in enumerate(np.asarray(shifts).astype(object).tolist()):
        shift = (int(high) << 32) | int(low)
        for j in range(samples):
            code = ((j << 64) + shift) // samples
            out[i, j] = divmod(code, 1 << 32)
    return out.reshape(-1, 2)
