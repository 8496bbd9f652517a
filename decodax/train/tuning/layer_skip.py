"""The training of LayerSkip ("LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", Elhoushi et al.,
2024), after which a model drafts well with its first layers.

Layer dropout: each row of a batch leaves out layer `l` (of L, from 0) with the probability `S(t) (2^(l / (L - 1)) - 1)
p_max`, which rises exponentially with depth and is 0 for the first layer. `S(t)` is 1 for a model that is tuned
further, and rises from 0 to 1 as `2^(t / (T - 1)) - 1` for one that is trained from scratch.

Early exit loss: the cross-entropies after the layers that are switched on at step `t`, all through the model's own norm
and head, are added with weights `e(l)` divided by their sum: `e(l) = e_scale (0 + 1 + ... + l)`, and for the last layer
`L - 1 + e_scale (0 + ... + L - 2)`. The curriculum says which layers are on. "rotational": every R-th layer, and at the
next step their neighbours, so that each is on once in R steps; "gradual": the last layer at first, and one more from
the top down every `T / 2L` steps, so that all are on from the middle of the run. The last layer is always on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.train.loop import cast
from decodax.train.tuning.exits import exit_loss, text_output

Tree = Any
Curriculum = Literal["rotational", "gradual"]


def dropout_rates(layers: int, most: float) -> np.ndarray:
    """Returns the probability with which each layer is left out, `f64[L]`, 0 for the first and `most` for the last.

    >>> dropout_rates(3, 0.1).round(4).tolist()
    [0.0, 0.0414, 0.1]
    """
    return most * (2 ** (np.arange(layers) / max(layers - 1, 1)) - 1)


def exit_weights(layers: int, scale: float) -> np.ndarray:
    """Returns the relative weight of the loss after each layer, `f64[L]`; the weights of those layers whose loss counts
    at a step are then divided by their sum.

    >>> exit_weights(4, 0.1).round(4).tolist()
    [0.0, 0.1, 0.3, 3.3]
    """
    sums = np.cumsum(np.arange(layers))
    last = layers - 1 + scale * (sums[-2] if layers > 1 else 0)
    return np.array([*(scale * sums[:-1]), last if layers > 1 else 1.0])


def switched_on(layers: int, step: Array, steps: int, curriculum: Curriculum, every: int) -> Array:
    """Returns the layers whose loss counts at a step, `bool[L]`.

    Args:
        layers: `L`, number of layers.
        step: `i32[]`, the step, from 0.
        steps: `T`, number of steps of the run, for "gradual".
        curriculum: "rotational": every `every`-th layer, others at each step; "gradual": one layer more every `T / 2L`
            steps, from the last one down. The last layer always counts.
        every: `R`, for "rotational".

    >>> switched_on(4, jnp.int32(1), 8, "rotational", 3).tolist()
    [False, True, False, True]
    >>> switched_on(4, jnp.int32(2), 8, "gradual", 3).tolist()
    [False, True, True, True]
    """
    layer = jnp.arange(layers, dtype=jnp.int32)
    on = layer % every == step % every if curriculum == "rotational" else (
        2 * layers * step >= (layers - 1 - layer) * steps)
    return on | (layer == layers - 1)


@dataclass(frozen=True)
class EarlyExitLoss:
    """LayerSkip's training loss (an `Objective`): a weighted mean of the cross-entropies of the network cut after some
    of its layers, with random layers left out. The third argument of a call is a random key and the step, `i32[]`.

    Attributes:
        network: the trained network.
        steps: number of steps of the run.
        dropout: largest probability of leaving out a layer, that of the last one; 0: none is left out.
        scale: `e_scale`, the weight of early exits relative to the last layer.
        curriculum: which layers' losses count at a step.
        every: `R` of the rotational curriculum.
        rising: True: the dropout rises from 0 during the run, for training from scratch.
        dtype: dtype of the computation.

    Raises:
        ValueError: a number out of range, or an unknown curriculum.
    """

    network: Any
    steps: int
    dropout: float = 0.1
    scale: float = 0.2
    curriculum: Curriculum = "rotational"
    every: int = 8
    rising: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: got {self.dropout}, takes 0 to 1, without 1")
        if self.scale < 0:
            raise ValueError(f"scale: got {self.scale}, takes 0 or more")
        if self.every < 1 or self.steps < 1:
            raise ValueError(f"every, steps: got {self.every} and {self.steps}, take at least 1")
        if self.curriculum not in ("rotational", "gradual"):
            raise ValueError(f"curriculum: got {self.curriculum!r}, takes 'rotational' or 'gradual'")

    def __call__(self, params: Tree, batch: tuple[Array, Array],
                 extra: tuple[Array, Array]) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: "loss", and the cross-entropy after the last layer.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens that are learned.
            extra: a random key and the step.
        """
        (tokens, learned), (key, step) = batch, extra
        L, inputs, targets = self.network.depth, tokens[:, :-1], tokens[:, 1:]
        keep = None
        if self.dropout:
            rates = jnp.asarray(dropout_rates(L, self.dropout), jnp.float32)
            if self.rising:
                rates = rates * (2 ** (step / max(self.steps - 1, 1)) - 1)
            keep = ~jax.random.bernoulli(key, rates, (tokens.shape[0], L))
        out = text_output(self.network, cast(params, self.dtype), inputs, keep)
        on = switched_on(L, step, self.steps, self.curriculum, min(self.every, L))
        weights = jnp.where(on, jnp.asarray(exit_weights(L, self.scale), jnp.float32), 0)
        # an exit's logits cost a product with the whole vocabulary, so those that are off are not computed
        losses = [jax.lax.cond(weights[i] > 0, lambda i=i: exit_loss(out, i + 1, targets, learned[:, 1:]),
                               lambda: jnp.float32(0)) for i in range(L)]
        loss = jnp.dot(weights, jnp.stack(losses)) / weights.sum()
        return loss, {"loss": loss, "last_layer": losses[-1]}


__all__ = ["EarlyExitLoss", "dropout_rates", "exit_weights", "switched_on"]
