"""Losses of trained drafters. Each compares a drafter's logits with a target's at the same positions.

`p` is the target's distribution and `q` the drafter's. A drafter with a vocabulary of its own predicts some of the
target's tokens only: `p` is then restricted to them, and positions whose most likely token is not among them do not
count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.train.language_model import cross_entropy, divergence


def _soft(target: Array, logits: Array, labels: Array) -> Array:
    """Returns `-sum p log q`, the soft cross-entropy (EAGLE)."""
    return -(jax.nn.softmax(target) * jax.nn.log_softmax(logits)).sum(-1)


def _hard(target: Array, logits: Array, labels: Array) -> Array:
    """Returns `-log q(label)`, where the label is the token of the text; 0 for one that the drafter does not know."""
    known = labels >= 0
    return jnp.where(known, cross_entropy(logits, jnp.maximum(labels, 0)), 0.0)


def _kl(target: Array, logits: Array, labels: Array) -> Array:
    """Returns the divergence `sum p log(p / q)`."""
    return divergence(target, logits)


def _reverse(target: Array, logits: Array, labels: Array) -> Array:
    """Returns the reverse divergence `sum q log(q / p)`."""
    return divergence(logits, target)


def overlap_of(target: Array, logits: Array) -> Array:
    """Returns the probability that speculative sampling accepts a draft, `sum min(p, q)` over the vocabulary,
    `f32[...]`, for the distributions `p` of the target and `q` of the drafter, which are given as logits `[..., V]`."""
    return jnp.minimum(jax.nn.softmax(target), jax.nn.softmax(logits)).sum(-1)


def _tv(target: Array, logits: Array, labels: Array) -> Array:
    """Returns the total variation, 1 minus the probability of acceptance (DSpark)."""
    return 1 - overlap_of(target, logits)


def _nla(target: Array, logits: Array, labels: Array) -> Array:
    """Returns minus the logarithm of the probability of acceptance (Samarin et al., 2026)."""
    return -jnp.log(jnp.maximum(overlap_of(target, logits), 1e-8))


def _hybrid(target: Array, logits: Array, labels: Array) -> Array:
    """Returns `w kl + (1 - w) tv` with `w = exp(-3 a)` for the probability `a` of acceptance (Samarin et al., 2026)."""
    accepted = overlap_of(target, logits)
    share = jnp.exp(-3 * jax.lax.stop_gradient(accepted))
    return share * _kl(target, logits, labels) + (1 - share) * (1 - accepted)


def _top_k(target: Array, logits: Array, labels: Array, k: int = 10) -> Array:
    """Returns the soft cross-entropy restricted to the target's ten most likely tokens (HASS)."""
    best, at = jax.lax.top_k(jax.nn.softmax(target), min(k, target.shape[-1]))
    return -(best * jnp.take_along_axis(jax.nn.log_softmax(logits), at, -1)).sum(-1)


LOSSES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "soft": _soft, "hard": _hard, "kl": _kl, "reverse-kl": _reverse, "tv": _tv, "nla": _nla, "hybrid": _hybrid,
    "top-k": _top_k}
"""Losses by name. Each maps the target's logits and the drafter's, `f32[..., V]`, and labels `i32[...]` (-1 for a token
that the drafter does not know) to `f32[...]`."""


def loss_of(name: str) -> Callable[[Array, Array, Array], Array]:
    """Returns a loss function by name, called with target logits, drafter logits (`[..., V]`) and labels (`i32[...]`).
    A weighted sum of losses is written like "0.9*tv+0.1*hard".

    Raises:
        ValueError: an unknown name or a weight that is not a number.

    >>> float(loss_of("0.5*tv+0.5*tv")(jnp.zeros(4), jnp.zeros(4), jnp.int32(0)))
    0.0
    """
    parts: list[tuple[float, Any]] = []
    for term in name.split("+"):
        weight, _, kind = term.strip().rpartition("*")
        try:
            parts.append((float(weight or 1), LOSSES[kind]))
        except (KeyError, ValueError):
            raise ValueError(f"loss: got {term!r}, takes one of {', '.join(LOSSES)}, or a sum such as "
                             "'0.9*tv+0.1*hard'") from None
    return lambda target, logits, labels: sum((w * one(target, logits, labels) for w, one in parts), jnp.float32(0))
