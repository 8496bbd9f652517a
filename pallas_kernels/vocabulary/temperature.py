"""Logits over a temperature, whichever it is."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import platform

FAR = 4096.0
"""From here on the largest logit over the temperature is taken off first. A float32 is within 2.5e-4 below it, so that
sums and differences of logits mean something."""

LEAST = float(jnp.finfo(jnp.float32).tiny)
MOST = 1 / LEAST
"""Temperatures beyond count as these. On many chips a smaller float32 is 0, and so is one over a larger one, by which
-inf would become a NaN."""


def cooled(logits: Array, temperature: Array) -> Array:
    """`logits / temperature`, up to a constant for each distribution where that would be large.

    Where the largest quotient is beyond `FAR`, the largest logit is subtracted first. Then it becomes 0, exactly, and
    nothing else overflows to more than that. A NaN or +inf among the logits stays.

    Args:
        logits: `f32[..., V]`. temperature: `f32[...]`, above 0.

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
    # XLA's CPU may compute what it is given again for each use, and round it differently: then the largest logit minus
    # the largest logit is not 0. What enters a loop, of one trip here, or none where nothing is far, is there once
    once = lambda c: (jnp.zeros((), bool), jnp.where(far, shifted(), c[1]))
    return lax.while_loop(lambda c: c[0], once, (far.any(), plain))[1]
