"""Regularisers that prefer texts whose information is spread evenly, by the surprisals of their tokens ("If beam search
is the answer, what was the question?", Meister, Cotterell and Vieira, 2020)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct

Kind = Literal["greedy", "local", "variance", "max", "square"]
KINDS: tuple[Kind, ...] = ("greedy", "local", "variance", "max", "square")


@struct
class Surprisals(Struct):
    """Statistics of the surprisals `-log p` (in nats) of the tokens of each text, for `UID`.

    Attributes:
        count: `f32[...]`, number of tokens.
        total: `f32[...]`, sum of the surprisals.
        squares: `f32[...]`, sum of their squares.
        most: `f32[...]`, the largest one.
        last: `f32[...]`, that of the newest token.
        added: `f32[...]`, the regulariser of the kinds "greedy" and "local" so far.
    """

    count: Array
    total: Array
    squares: Array
    most: Array
    last: Array
    added: Array


@dataclasses.dataclass(frozen=True)
class UID:
    """A regulariser `R` (uniform information density), which a beam search subtracts from the score with weight
    `strength`. With the surprisals `u_t = -log p_t` of a text, `R` is

    - "greedy": the sum of `(u_t - min_v u_t(v)) ** 2`, with the smallest surprisal over the vocabulary at each step;
    - "local": the sum of `(u_t - u_(t-1)) ** 2`, from the second token on;
    - "variance": the mean of `(u_t - mean u) ** 2`;
    - "max": the largest `u_t`;
    - "square": the sum of `u_t ** 2`.

    Attributes:
        kind: one of these.

    Raises:
        ValueError: an unknown kind.
    """

    kind: Kind = "variance"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"uid: got {self.kind!r}, takes one of {', '.join(KINDS)}")

    def init(self, like: Array) -> Surprisals:
        """Returns the surprisal statistics of texts without tokens, with fields in the shape of the array `like`."""
        zero = jnp.zeros(like.shape, jnp.float32)
        return Surprisals(zero, zero, zero, zero, zero, zero)

    def after(self, state: Surprisals, log_p: Array, best: Array) -> Surprisals:
        """Returns the statistics after one more token.

        Args:
            state: the statistics before it.
            log_p: log-probability of the token.
            best: log-probability of the most likely token at this position.
        """
        u = -log_p
        gap = u + best if self.kind == "greedy" else jnp.where(state.count > 0, u - state.last, 0)
        return Surprisals(count=state.count + 1, total=state.total + u, squares=state.squares + u * u,
                          most=jnp.maximum(state.most, u), last=u + jnp.zeros_like(state.last),
                          added=state.added + gap * gap)

    def value(self, state: Surprisals) -> Array:
        """Returns the regulariser `R` of each text, `f32[...]`, by the formula of `kind` (see `UID`), not yet
        multiplied by `strength`. 0 for a text without tokens.

        Args:
            state: the statistics of the texts' tokens.
        """
        if self.kind in ("greedy", "local"):
            return state.added
        if self.kind == "variance":
            n = jnp.maximum(state.count, 1)
            return state.squares / n - (state.total / n) ** 2
        return state.most if self.kind == "max" else state.squares
