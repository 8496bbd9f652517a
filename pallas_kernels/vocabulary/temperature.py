"""Division of logits by temperatures of any size."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import platform

FAR = 4096.0
"""Above this value of the largest logit divided by the temperature, the largest logit is subtracted first. Below it the
spacing of float32 is at most 2.5e-4, so that sums and differences of logits are accurate."""

LEAST = float(jnp.finfo(jnp.float32).tiny)
MOST = 1 / LEAST
"""Temperatures are clipped to this range. Many chips round a smaller float32 to 0, as well as the reciprocal of a
larger one, which would turn -inf into NaN."""


def cooled(logits: Array, temperature: Array) -> Array:
    """Returns `logits / temperature`, shifted by a constant for each distribution if the result would be large.

    If the largest quotient exceeds `FAR`, the largest logit is subtracted first. The maximum is then exactly 0, and no
    other entry overflows above it. A NaN or +inf among the logits remains.

    Args:
        logits: `f32[..., V]`.
        temperature: `f32[...]`, above 0.

    >>> cooled(jnp.array([1.0, 2.0]), jnp.float32(0.5)).tolist()
    [2.0, 4.0]
    >>> cooled(jnp.array([1.0, 2.0, 2.0]), jnp.float32(1e-30)).argmax().item()
    1
    """
    t = jnp.clip(temperature, LEAST, MOST)[..., None]
    plain = logits / t
    top = logits.max(-1, keepdims=True)
    far = jnp.isfinite(top) & (jnp.abs(top) > FAR * t)
    shifted = lambda: (logits - logits.max(-1, keepdims=True)) / t
    if platform() != "cpu":
        return jnp.where(far, shifted(), plain)
    # XLA's CPU may compute an operand again for each use and round it differently, so that the largest logit minus the
    # largest logit is not 0. The operand of a loop is computed once; this loop runs once, or not at all if nothing is
    # far.
    once = lambda c: (jnp.zeros((), bool), jnp.where(far, shifted(), c[1]))
    return lax.while_loop(lambda c: c[0], once, (far.any(), plain))[1]
