"""A model over the vocabulary of another one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.core.around import AroundModel
from decodax.core.types import Out
from decodax.core.window import Window


@dataclasses.dataclass(frozen=True)
class Resized(AroundModel):
    """A model over another one's vocabulary, where the ids that both have are the same tokens.

    What it predicts is limited to the `entries` ids of the other's logits: ids that the other lacks are left out before
    anything is drawn, so that q is the model's distribution given that the token is one of the other's, and ids that
    it lacks itself have probability 0. Of a text it reads ids from `reads` on as its last one: any token will do, since
    any q keeps the verifiers exact. None leaves logits or ids as they are.
    """

    reads: int | None = None
    entries: int | None = None

    def apply(self, params: Any, window: Window, cache: Any) -> Out:
        if self.reads is not None:
            window = window.replace(tokens=jnp.minimum(window.tokens, self.reads - 1))
        out = self.base.apply(params, window, cache)

        def head(hidden: Array) -> Array:
            logits = out.head(hidden)
            entries = self.entries or logits.shape[-1]
            spare = [(0, 0)] * (logits.ndim - 1) + [(0, max(entries - logits.shape[-1], 0))]
            return jnp.pad(logits, spare, constant_values=-jnp.inf)[..., :entries]

        return dataclasses.replace(out, head=head)
