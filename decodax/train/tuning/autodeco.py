"""The training of AutoDeco's heads ("The End of Manual Decoding: Towards Truly End-to-End Language Models", Wang et
al., 2025), beside a network that does not change. The losses are those of `decodax.algorithms.contrastive.autodeco`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.contrastive.autodeco import Heads, losses
from decodax.train.loop import cast
from decodax.train.tuning.exits import text_output

Tree = Any


@dataclass(frozen=True)
class DecodingHeadsLoss:
    """The loss (an `Objective`) of two small heads that predict the sampling temperature and top-p of each token: the
    sum of their losses. The third argument of a call is a random key and the network's weights, which are not trained.

    Attributes:
        network: the network, which is not trained.
        dtype: dtype of the network's computation.
    """

    network: Any
    dtype: str = "float32"

    def __call__(self, params: Heads, batch: tuple[Array, Array],
                 extra: tuple[Array, Tree]) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log: "loss", and that of each head.

        Args:
            params: the heads.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens that are learned.
            extra: a random key, and the network's weights.
        """
        (tokens, learned), (key, weights) = batch, extra
        out = text_output(self.network, cast(weights, self.dtype), tokens[:, :-1])
        labels = jnp.where(learned[:, 1:], tokens[:, 1:], -1)
        temperature, top_p = losses(params, out.hidden, out.logits().astype(jnp.float32), labels, key)
        return temperature + top_p, {"loss": temperature + top_p, "temperature": temperature, "top_p": top_p}


__all__ = ["DecodingHeadsLoss"]
