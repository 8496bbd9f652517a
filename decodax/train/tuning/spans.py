"""Random spans of targets, whose tokens an objective replaces in the inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def random_spans(key: Array, learned: Array, span: int) -> tuple[Array, Array]:
    """Returns a random span of the target in each row: its first position and the position after it, `i32[B]` each.

    Args:
        key: a random key.
        learned: `bool[B, T]`, True for the tokens of the target, which have one end each.
        span: number of tokens of a span; fewer if the target is shorter. Token 0 is in none, and a row without a target
            has an empty one.
    """
    first = jnp.maximum(jnp.argmax(learned, 1), 1)
    end = jnp.where(learned.any(1), learned.shape[1] - jnp.argmax(learned[:, ::-1], 1), first)
    start = jax.random.randint(key, first.shape, first, jnp.maximum(end - span, first) + 1)
    return start, jnp.clip(end, start, start + span)


__all__ = ["random_spans"]
