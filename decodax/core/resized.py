"""A model wrapper that adapts a draft model to the vocabulary size of its target."""

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
    """A model with its vocabulary cut or padded to that of another model (the target), for draft models. Ids below both
    sizes are the same tokens.

    Logits beyond `entries` are cut off before sampling, so the draft distribution is the model's distribution over the
    target's tokens; missing ids get probability 0. Any draft distribution keeps the verifiers exact.

    Attributes:
        reads: number of token ids that the model knows; larger ids in its input are replaced by `reads - 1`. None: no
            change.
        entries: number of logits of the target. None: no change.
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
