"""The training of NMST ("A Non-monotonic Self-terminating Language Model", Choi et al., 2023): ordinary likelihood, in
which the end of a text has the probability that a head of its own and the rising bound give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.contrastive.nmst import with_end_head
from decodax.sampling.degeneration import self_terminating
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning.exits import learned_mean, text_output

Tree = Any


@dataclass(frozen=True)
class SelfTerminatingLoss:
    """The cross-entropy of next tokens under NMST, an `Objective`. The weights are a pair: those of the network, and
    the head's, `f32[D]`. The `t`-th learned token of a row is the `t`-th new one, or of a text in several rows the
    `before + t`-th (`ExampleRows`).

    Attributes:
        network: the trained network.
        ends: tokens that end a text, see `decodax.algorithms.contrastive.SelfTerminating`.
        epsilon: growth of the bound, in [0, 1).
        dtype: dtype of the computation.

    Raises:
        ValueError: no token that ends a text, or an `epsilon` out of range.
    """

    network: Any
    ends: tuple[int, ...]
    epsilon: float = 1e-4
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.ends:
            raise ValueError("target: got a model without a token that ends a text; takes one with eos_token_id")
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon: got {self.epsilon}, takes 0 to below 1")

    def losses(self, params: Tree, tokens: Array, learned: Array, before: Array | None = None) -> Array:
        """Returns `-log p` of each next token in nats, `f32[B, T]`, for tokens `i32[B, T + 1]` of which those in
        `learned` (`bool[B, T + 1]`) are new, after the number `before` of new tokens in earlier rows (`i32[B]`, None:
        0)."""
        out = text_output(self.network, cast(params[0], self.dtype), tokens[:, :-1])
        logits = with_end_head(params[1], out.hidden, out.logits().astype(jnp.float32), self.ends)
        ends = jnp.arange(logits.shape[-1]) == self.ends[0]
        time = jnp.maximum(jnp.cumsum(learned[:, 1:], 1), 1) + (0 if before is None else before[:, None])
        time = time.astype(jnp.float32)
        return cross_entropy(self_terminating(logits, ends, time, self.epsilon), tokens[:, 1:])

    def __call__(self, params: Tree, batch: tuple[Array, ...], extra: None) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: "loss", and that of the ends.

        Args:
            params: the weights of the network, and the head's.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens that are learned; and, if it is not 0,
                `before` as in `losses`.
            extra: ignored.
        """
        tokens, learned, *before = batch
        losses = self.losses(params, tokens, learned, *before)
        loss = learned_mean(losses, learned[:, 1:])
        return loss, {"loss": loss, "ends": learned_mean(losses, learned[:, 1:] & (tokens[:, 1:] == self.ends[0]))}


def first_end_head(lm: Any, tokens: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """Returns a head with which training starts, `f32[D]`: its predictions are nearest to the network's own log-odds of
    the end on some texts (`i32[B, T]`), by least squares."""
    out = text_output(lm.model, lm.params, jnp.asarray(tokens))
    logits, end = np.asarray(out.logits(), np.float64), np.isin(np.arange(lm.vocab_size), ends[:1])
    sums = lambda x: np.logaddexp.reduce(x, -1).reshape(-1)
    odds = sums(logits[..., end]) - sums(logits[..., ~np.isin(np.arange(lm.vocab_size), ends)])
    return np.linalg.lstsq(np.asarray(out.hidden, np.float64).reshape(len(odds), -1), odds)[0].astype(np.float32)


__all__ = ["SelfTerminatingLoss", "first_end_head"]
