"""Coherent contextual decoding, CCD (Chen et al. 2025), after the code that its authors released: positions on which
two successive steps agree are decided together, however many there are (CCD-DS).

Each step remembers the surest positions that it left open, and the likeliest token of every position. The next step
looks at its own surest positions: those among them that were remembered, and whose likeliest token is unchanged, are
decided together. If the surest positions of all are new, or too few agree, the step decides its quota. The list of
remembered positions grows by one a step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Counts, Memory, Seen, Unmask, View
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.unmasking import best
from decodax.algorithms.diffusion.stats import rank
from decodax.common.struct import Struct, struct


@struct
class Kept(Struct):
    """What a step leaves for the next one.

    Attributes:
        surest: `bool[B, W]`: its surest positions that stayed open. token: `i32[B, W]`: the likeliest tokens.
        size: `i32[B]`: how many positions `surest` may have.
    """

    surest: Array
    token: Array
    size: Array


@dataclasses.dataclass(frozen=True)
class Agreeing(Counts, Unmask):
    """The positions on which this step and the one before it agree, or the step's quota.

    Attributes:
        steps: steps of a region: the quota is its open positions divided by them, rounded down, and at least 1. None:
            one position a step. The last step takes its quota.
        adaptive: all that agree are decided (CCD-DS); False: at most the quota, chosen among them.
        grow: the list of remembered positions grows to `1 + grow` times the quota.
        warmup: the number of first steps that take their quota.
        score: which positions are the surest.
    """

    steps: int | None = None
    adaptive: bool = True
    grow: float = 4.0
    warmup: int = 5
    score: Any = NegEntropy()
    reads = 1

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes 1 or more")
        if self.grow < 0 or self.warmup < 1:
            raise ValueError(f"grow, warmup: got {self.grow}, {self.warmup}, take 0 or more and 1 or more")

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.score.of

    def init(self, view: View) -> Memory:
        return Kept(surest=jnp.zeros(view.positions.shape, bool), token=jnp.full(view.positions.shape, -1, jnp.int32),
                    size=jnp.ones(view.start.shape, jnp.int32))

    def _quota(self, view: View) -> Array:
        """`i32[R]`."""
        return jnp.maximum(view.opened // (view.opened if self.steps is None else self.steps), 1)

    def _size(self, view: View, memory: Kept) -> Array:
        """`i32[R]`: how many of its surest positions the step looks at, and keeps."""
        quota, left = self._quota(view), view.masked.sum(1, dtype=jnp.int32)
        late = left <= 0.1 * view.opened.astype(jnp.float32)
        grown = jnp.where(late, 1, memory.size) + 1
        most = quota + (quota.astype(jnp.float32) * self.grow).astype(jnp.int32)
        return jnp.where(view.step < self.warmup - 1, 1, jnp.minimum(grown, most))

    def _chosen(self, view: View, seen: Seen, score: Array, open: Array, memory: Kept) -> Array:
        """`bool[R, W]` of the positions `open`."""
        assert seen.likeliest is not None
        order, quota = rank(score, open), self._quota(view)
        surest = best(score, open, quota)
        agree = open & memory.surest & (order < self._size(view, memory)[:, None]) & \
            (seen.likeliest[0][..., 0] == memory.token)
        enough = (surest & memory.surest).any(1) & (agree.sum(1) >= quota) & (view.step >= self.warmup)
        last = view.opened if self.steps is None else self.steps
        enough = enough & (view.step < last - 1)
        taken = agree if self.adaptive else best(score, agree, quota)
        return jnp.where(enough[:, None], taken, surest)

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return self._chosen(view, seen, score, view.active, memory)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        assert seen.likeliest is not None
        open, score = before.masked & seen.reached, self.score(before, seen, None)
        rest = open & ~self._chosen(before, seen, score, open, memory)
        size = self._size(before, memory)
        new = Kept(surest=best(score, rest, size), token=seen.likeliest[0][..., 0].astype(jnp.int32), size=size)
        gone = after.step == 0
        keep = lambda x, none: jnp.where(gone.reshape(-1, *[1] * (x.ndim - 1)), none, x)
        return Kept(surest=keep(new.surest, False), token=keep(new.token, -1), size=keep(new.size, 1))
