"""Samplers of llama.cpp that adapt to the distribution's shape: top-n-sigma, XTC, dynamic temperature, Mirostat 2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.sampling.base import Context, PyTree, Temperature, Transform
from decodax.sampling.draw import first_argmax
from decodax.sampling.threshold import probabilities


@struct
class TopNSigma(Transform):
    """Removes logits more than `n` standard deviations below the largest (Tang et al., 2024). The temperature has no
    influence on the set of tokens that is left.

    `n` is `f32[B]`; 0 or less keeps all tokens. Tokens with logit -inf do not count for the standard deviation.
    """

    n: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        valid = logits != -jnp.inf
        count = jnp.maximum(valid.sum(), 1)
        mean = jnp.where(valid, logits, 0).sum() / count
        deviation = jnp.sqrt(jnp.where(valid, (logits - mean) ** 2, 0).sum() / count)
        return jnp.where((logits < logits.max() - self.n * deviation) & (self.n > 0), -jnp.inf, logits)


@struct
class XTC(Transform):
    """Exclude top choices (p-e-w, 2024): with probability `probability`, removes all tokens above a threshold except
    the least likely of them.

    Attributes:
        probability: `f32[B]`, the probability of removing tokens at a position; 0 changes nothing.
        threshold: `f32[B]`, the probability from which a token counts as likely. Above 0.5 nothing is removed, since
            there cannot be two such tokens.
    """

    probability: Array
    threshold: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        coin = jax.random.uniform(keys.at(ctx.key, ctx.length, Purpose.TRANSFORM))
        likely = probabilities(logits)[1] >= self.threshold
        least = jnp.where(likely, logits, jnp.inf).min()
        index = jnp.arange(logits.shape[-1])
        last = jnp.where(likely & (logits == least), index, -1).max()      # the last of equal ones, as in a stable sort
        excluded = likely & (index != last)
        return jnp.where(excluded & (coin < self.probability) & (self.threshold <= 0.5), -jnp.inf, logits)


@struct
class DynamicTemperature(Transform):
    """A temperature between `temperature - range` and `temperature + range` that grows with the entropy (kalomaze,
    2023).

    The entropy is normalised to [0, 1] by its largest possible value over the allowed tokens, so this transform belongs
    after the truncations.

    Attributes:
        temperature: `f32[B]`, the middle of the range.
        range: `f32[B]`, half the width of the range; 0 makes it an ordinary temperature.
        exponent: `f32[B]`, the power to which the normalised entropy is raised.
    """

    temperature: Array
    range: Array
    exponent: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        count = (logits != -jnp.inf).sum()
        entropy = probabilities(logits)[2] / jnp.log(jnp.maximum(count, 2).astype(jnp.float32))
        low, high = jnp.maximum(self.temperature - self.range, 0), self.temperature + self.range
        # Rounding may leave the entropy of one certain token below 0, where a power is NaN.
        dynamic = low + (high - low) * jnp.maximum(entropy, 0) ** self.exponent
        temperature = jnp.where(self.range > 0, dynamic, self.temperature)
        alone = (self.range > 0) & (count <= 1)
        return jnp.where(alone | jnp.isnan(entropy), logits, Temperature(temperature).logits(None, ctx, logits))


@struct
class Mirostat2(Transform):
    """Mirostat 2.0 (Basu et al., 2021): removes tokens whose surprisal (`-log2 p`) exceeds `mu`, which is controlled so
    that the mean surprisal approaches `tau`.

    `mu` starts at `2 tau`. After each token it grows by `eta * (tau - surprisal)`, with the token's surprisal under the
    complete chain, so this transform belongs at the chain's end. The most likely token is never removed.

    Attributes:
        tau: `f32[B]`, the target surprisal in bits.
        eta: `f32[B]`, the learning rate.
    """

    tau: Array
    eta: Array

    def init(self, ctx: Context) -> PyTree:
        return 2 * self.tau

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        surprise = -probabilities(logits)[0] / jnp.log(2.0)
        best = jnp.arange(logits.shape[-1]) == first_argmax(logits)
        return jnp.where((surprise > state) & ~best, -jnp.inf, logits)

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        return state - self.eta * (-log_prob / jnp.log(2.0) - self.tau)
