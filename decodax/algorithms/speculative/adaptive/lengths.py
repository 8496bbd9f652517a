"""H-RAD of SpecBranch (Shen et al., 2025): predicts from the target's hidden states how much of a draft it will accept.

A perceptron with three layers reads the outputs of the target's last layers at the last verified place, and the
embedding of the token that the target drew there. It has three classes: of the chain after that token the target
accepts nothing, a part, or all. Widths (256 and 64), the number of layers read (4) and dropout (0.2) are the
authors'; it is trained by cross entropy.

The first layer's share of the embedding is a table with a row for each token, made when the classifier is fitted: the
same numbers, and it needs nothing of the target's weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.types import Out
from decodax.core.window import take

WIDTHS, DROPOUT = (256, 64), 0.2


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The classifier of draft lengths.

    Attributes:
        weights: weights of its layers; they become a part of `Params.draft`.
        layers: number of the target's layers that it reads.
    """

    weights: Any = dataclasses.field(default=None, compare=False, repr=False)
    layers: int = 4

    def bare(self) -> Lengths:
        return dataclasses.replace(self, weights=None)

    def features(self, weights: Any) -> int:
        """Returns the number of features that it reads of the target."""
        return weights["hidden"].shape[0]

    def read(self, out: Out, node: Array) -> Array:
        """Returns the features `f32[B, F]` of a forward at window nodes `node` (`i32[B]`).

        Raises:
            ValueError: a target that does not show what its layers give, or has too few of them.
        """
        if out.layers is None or len(out.layers) < self.layers:
            raise ValueError(f"lengths: reads {self.layers} layers of the target, which shows "
                             f"{len(out.layers or ())}")
        return jnp.concatenate([take(x, node[:, None])[:, 0] for x in out.layers[-self.layers:]], -1).astype(
            jnp.float32)

    def classify(self, weights: Any, seen: Array, token: Array) -> Array:
        """Returns the class `i32[B]`: 0 nothing, 1 a part, 2 all of the draft after `token` (`i32[B]`) will be
        accepted."""
        return jnp.argmax(scores(weights, seen, token), -1).astype(jnp.int32)


def scores(weights: Any, seen: Array, token: Array, key: Array | None = None) -> Array:
    """Returns the logits of the classes, `f32[B, 3]`; with a key, dropout is applied as in training."""
    x = (seen - weights["mean"]) / weights["scale"] @ weights["hidden"] + weights["table"][token] + weights["first"]
    for i, (kernel, bias) in enumerate((("second", "second_bias"), ("third", "third_bias"))):
        x = jax.nn.relu(x)
        if key is not None:
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - DROPOUT, x.shape)
            x = jnp.where(keep, x / (1 - DROPOUT), 0)
        x = x @ weights[kernel] + weights[bias]
    return x


def always(kind: int, features: int, vocabulary: int) -> dict[str, Array]:
    """Returns the weights of a classifier that always predicts `kind`."""
    zeros = lambda *size: jnp.zeros(size, jnp.float32)
    return dict(mean=zeros(features), scale=jnp.ones(features), hidden=zeros(features, 1), table=zeros(vocabulary, 1),
                first=zeros(1), second=zeros(1, 1), second_bias=zeros(1), third=zeros(1, 3),
                third_bias=zeros(3).at[kind].set(1))
