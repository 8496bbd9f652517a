"""Changes to the model's distributions before candidates are drawn: a temperature that falls, or a mixture with the
distributions of earlier steps (CCD's average, dInfer's credit).

Distributions are remembered for their likeliest tokens only: a carry as wide as the vocabulary would cost more than the
cache. Each rule says what is lost by that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Memory, Seen, Shaper, View
from decodax.common.struct import Struct, struct
from decodax.pallas_kernels.vocabulary import cooled


@dataclasses.dataclass(frozen=True)
class AsIs(Shaper):
    """The model's own distributions."""

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        return logits


@dataclasses.dataclass(frozen=True)
class Anneal(Shaper):
    """A temperature that falls linearly from `first` in a region's first step and would reach `last` one step after
    `steps` steps (DiffusionGemma). The policy's temperature is applied on top; the published rule has 1 there."""

    first: float = 0.8
    last: float = 0.4
    steps: int = 48

    def __post_init__(self) -> None:
        if not 0 < self.last <= self.first:
            raise ValueError(f"last: got {self.last}, takes more than 0 up to the first of {self.first}")

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        left = jnp.maximum(1 - view.step.astype(jnp.float32) / self.steps, 0)
        return cooled(logits, (self.last + (self.first - self.last) * left)[:, None])


@struct
class Past(Struct):
    """Amounts for some tokens of each position: ids `i32[B, W, n]` and amounts `f32[B, W, n]`; an unused place has
    amount 0."""

    ids: Array
    amount: Array

    @classmethod
    def empty(cls, view: View, n: int) -> Past:
        shape = (*view.positions.shape, n)
        return cls(ids=jnp.zeros(shape, jnp.int32), amount=jnp.zeros(shape, jnp.float32))

    def unless(self, gone: Array) -> Past:
        """The same, with all amounts 0 in the rows `gone` (`bool[B]`)."""
        keep = ~gone[:, None, None]
        return Past(jnp.where(keep, self.ids, 0), jnp.where(keep, self.amount, 0))

    def onto(self, x: Array) -> Array:
        """`x` (`f32[B, W, V]`) plus the amounts."""
        return jax.vmap(jax.vmap(lambda row, at, new: row.at[at].add(new)))(x, self.ids, self.amount)


@dataclasses.dataclass(frozen=True)
class Average(Shaper):
    """Coherent contextual decoding (CCD, Chen et al. 2025): the mean of a position's distributions in this step and in
    the `past` steps before it, an estimate of its marginal over contexts. Past distributions count with their `kept`
    likeliest tokens; the mass of all others is lost, and the mean is normalised without it.

    The paper averages over all steps so far and keeps a few of the last ones. The released code decides by agreement
    instead (`Agreeing`).
    """

    past: int = 3
    kept: int = 8

    def __post_init__(self) -> None:
        for name, value, low in (("past", self.past, 0), ("kept", self.kept, 1)):
            if value < low:
                raise ValueError(f"{name}: got {value}, takes {low} or more")

    @property
    def reads(self) -> int:      # type: ignore[override]
        return self.kept if self.past else 0

    def init(self, view: View) -> Memory:
        return Past.empty(view, self.past * self.kept) if self.past else None

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        # a softmax's logarithm is its logits but for a constant: the mean's is that of the sum
        return logits if memory is None else jnp.log(memory.onto(jax.nn.softmax(logits)))

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        if memory is None:
            return None
        assert seen.likeliest is not None
        ids, log_probs = seen.likeliest
        probs = jnp.where(seen.reached[..., None], jnp.exp(log_probs), 0)
        shift = lambda new, old: jnp.concatenate([new, old], -1)[..., :old.shape[-1]]
        return Past(shift(ids, memory.ids), shift(probs, memory.amount)).unless(after.step == 0)


@dataclasses.dataclass(frozen=True)
class Credit(Shaper):
    """dInfer's credit decoding (Ma et al. 2025), after its code: in each step an open position's likeliest token earns
    its probability to the power `gamma`, older credit is multiplied by `beta`, and logits rise by `alpha * log(1 +
    credit)`.

    The published matrix `[B, W, V]` is kept for the `kept` tokens of most credit at each position. One token of a
    position earns credit in a step, so this is exact for the first `kept` steps, and as long as no more than `kept`
    different tokens were likeliest.
    """

    alpha: float = 0.7
    gamma: float = 0.2
    beta: float = 0.8
    kept: int = 8
    reads = 1

    def __post_init__(self) -> None:
        if self.kept < 2:
            raise ValueError(f"kept: got {self.kept}, takes 2 or more")

    def init(self, view: View) -> Memory:
        return Past.empty(view, self.kept)

    def _earned(self, memory: Past, token: Array, log_prob: Array, masked: Array) -> Past:
        new = jnp.where(masked, jnp.exp(self.gamma * log_prob), 0)
        old = self.beta * memory.amount
        own = (memory.ids == token[..., None]) & (old > 0)
        least = jnp.argmin(old, -1)
        at = jnp.where(own.any(-1), jnp.argmax(own, -1), least)[..., None] == jnp.arange(self.kept)
        at = at & masked[..., None]
        return Past(ids=jnp.where(at, token[..., None], memory.ids),
                    amount=jnp.where(at, new[..., None] + jnp.where(own, old, 0), old))

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        now = self._earned(memory, jnp.argmax(logits, -1).astype(jnp.int32),
                           logits.max(-1) - jax.nn.logsumexp(logits, -1), view.masked)
        return Past(now.ids, self.alpha * jnp.log1p(now.amount)).onto(logits)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Any:
        assert seen.likeliest is not None
        ids, log_probs = seen.likeliest
        now = self._earned(memory, ids[..., 0], log_probs[..., 0], before.masked)
        return now.unless(after.step == 0)
