"""Sorted fine-tuning, SoFT ("Sorted LLaMA: Unlocking the Potential of Intermediate Layers of Large Language Models for
Dynamic Inference Using Sorted Fine-Tuning", Kavehzadeh et al., 2024): the loss is the mean of the losses of several
sub-models, the first `n` layers with the model's own norm and head, so that each of them writes texts.

`decodax.train.sub_model` is such a model for any decoding method; `dx.drafts.LayerSkip` drafts with one for the whole
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.train.loop import cast
from decodax.train.tuning.exits import exit_loss, text_output

Tree = Any


def sorted_depths(layers: int) -> tuple[int, ...]:
    """Returns the sub-models of a model, as numbers of layers: eight equally spaced ones, as for 32 layers in the
    paper, or one for each layer.

    >>> sorted_depths(32), sorted_depths(5)
    ((4, 8, 12, 16, 20, 24, 28, 32), (1, 2, 3, 4, 5))
    """
    return tuple(sorted({layers - i * max(layers // 8, 1) for i in range(min(layers, 8))}))


@dataclass(frozen=True)
class SortedLoss:
    """The training loss of sorted fine-tuning (an `Objective`): the mean of the cross-entropies of sub-models, which
    are the first layers of the network with its own norm and head.

    Attributes:
        network: the trained network.
        depths: numbers of layers of the sub-models.
        dtype: dtype of the computation.

    Raises:
        ValueError: no depth, or one that the network does not have.
    """

    network: Any
    depths: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.depths or not 1 <= min(self.depths) <= max(self.depths) <= self.network.depth:
            raise ValueError(f"depths: got {self.depths}, takes numbers of layers from 1 to {self.network.depth}")

    def __call__(self, params: Tree, batch: tuple[Array, Array], extra: Any) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: "loss", and the cross-entropy of each sub-model.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens that are learned.
            extra: ignored.
        """
        tokens, learned = batch
        out = text_output(self.network, cast(params, self.dtype), tokens[:, :-1])
        losses = {n: exit_loss(out, n, tokens[:, 1:], learned[:, 1:]) for n in self.depths}
        loss = jnp.stack(list(losses.values())).mean()
        return loss, {"loss": loss, **{f"layers_{n}": x for n, x in losses.items()}}


__all__ = ["SortedLoss", "sorted_depths"]
