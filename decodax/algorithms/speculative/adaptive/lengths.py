"""H-RAD of SpecBranch (Shen et al., 2025): predicts from the target's hidden states how much of a draft it will accept.

The classifier is a perceptron with three layers. Its inputs are the outputs of the target's last layers at the last
verified position, and the embedding of the token that the target drew there. Its three classes are that the target
accepts nothing, a part, or all of the draft after that token. Widths (256 and 64), the number of layers (4) and dropout
(0.2) are the authors'; it is trained with cross-entropy.

The product of the first layer and the embedding is stored as a table with a row for each token, made when the
classifier is fitted. The numbers are the same, and the target's weights are not needed.
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
    """The classifier that sets the draft lengths of `SpecBranch`.

    Attributes:
        weights: weights of its layers; they become a part of `Params.draft`.
        layers: number of last layers of the target whose outputs are features.
    """

    weights: Any = dataclasses.field(default=None, compare=False, repr=False)
    layers: int = 4

    def bare(self) -> Lengths:
        return dataclasses.replace(self, weights=None)

    def features(self, weights: Any) -> int:
        """Returns the number `F` of features that the classifier with the given weights reads from the target's
        layers."""
        return weights["hidden"].shape[0]

    def read(self, out: Out, node: Array) -> Array:
        """Returns the classifier's features: the outputs of the target's last `layers` layers at the window positions
        `node` (`i32[B]`), concatenated, `f32[B, F]`.

        Raises:
            ValueError: the target does not return the outputs of its layers, or has too few layers.
        """
        if out.layers is None or len(out.layers) < self.layers:
            raise ValueError(f"lengths: reads {self.layers} layers of the target, which shows "
                             f"{len(out.layers or ())}")
        return jnp.concatenate([take(x, node[:, None])[:, 0] for x in out.layers[-self.layers:]], -1).astype(
            jnp.float32)

    def classify(self, weights: Any, seen: Array, token: Array) -> Array:
        """Predicts how many of the drafts after `token` (`i32[B]`) are accepted, from the features `seen` (`f32[B, F]`)
        of the target. Returns `i32[B]`: 0 for none, 1 for a part, 2 for all."""
        return jnp.argmax(scores(weights, seen, token), -1).astype(jnp.int32)


def scores(weights: Any, seen: Array, token: Array, key: Array | None = None) -> Array:
    """Returns the classifier's logits of its three classes (none, a part or all of the drafts accepted), `f32[B, 3]`.

    Args:
        weights: its weights.
        seen: `f32[B, F]`, features of the target.
        token: `i32[B]`, the token before the drafts.
        key: random key for dropout, as in training; None: no dropout.
    """
    x = (seen - weights["mean"]) / weights["scale"] @ weights["hidden"] + weights["table"][token] + weights["first"]
    for i, (kernel, bias) in enumerate((("second", "second_bias"), ("third", "third_bias"))):
        x = jax.nn.relu(x)
        if key is not None:
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - DROPOUT, x.shape)
            x = jnp.where(keep, x / (1 - DROPOUT), 0)
        x = x @ weights[kernel] + weights[bias]
    return x


def always(kind: int, features: int, vocabulary: int) -> dict[str, Array]:
    """Returns weights with which the classifier always predicts the class `kind` (0: no draft accepted, 1: a part, 2:
    all), for the given numbers of features and of tokens."""
    zeros = lambda *size: jnp.zeros(size, jnp.float32)
    return dict(mean=zeros(features), scale=jnp.ones(features), hidden=zeros(features, 1), table=zeros(vocabulary, 1),
                first=zeros(1), second=zeros(1, 1), second_bias=zeros(1), third=zeros(1, 3),
                third_bias=zeros(3).at[kind].set(1))
