"""When a row is done before its canvas is: the end of the text, the end of the steps, a stable canvas."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.diffusion.policies import Memory, Rule, Seen, View


class StopRule(Rule):
    """A stop that never stops."""

    def rush(self, view: View, seen: Seen, memory: Memory) -> Array:
        return jnp.zeros(view.start.shape, bool)

    def end(self, view: View, memory: Memory) -> Array:
        return view.end


@dataclasses.dataclass(frozen=True)
class EndOfText(StopRule):
    """The text ends behind its first end of sequence that has nothing open before it. What follows is dropped."""

    def end(self, view: View, memory: Memory) -> Array:
        ends = (view.tokens[:, :, None] == view.eos[:, None, :]).any(-1) & ~view.open & view.editable & view.inside
        ends = ends & (view.positions - view.prompt_length[:, None] >= view.min_new[:, None])
        clean = jnp.cumprod(~view.open | ~view.inside, 1).astype(bool)
        hit = ends & clean
        return jnp.where(hit.any(1), view.start + jnp.argmax(hit, 1).astype(jnp.int32) + 1, view.end)


@dataclasses.dataclass(frozen=True)
class Steps(StopRule):
    """A region takes at most `count` steps: the last commits all that is open."""

    count: int

    def rush(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.step + 1 >= self.count


@dataclasses.dataclass(frozen=True)
class Stable(StopRule):
    """A region is done when its candidates are those of the step before and their mean entropy is below `entropy`
    (DiffusionGemma)."""

    width: int
    entropy: float = 0.005

    def init(self, view: View) -> Memory:
        return jnp.full((view.start.shape[0], self.width), -1, jnp.int32)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return jnp.where((after.step == 0)[:, None], -1, seen.token)

    def rush(self, view: View, seen: Seen, memory: Memory) -> Array:
        same = ((seen.token == memory) | ~view.active).all(1)
        mean = jnp.where(view.active, seen.model.entropy, 0).sum(1) / jnp.maximum(view.active.sum(1), 1)
        return same & (mean < self.entropy)
