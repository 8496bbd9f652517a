"""Rules that end a row before its whole canvas is decided: at the end of the text, after a number of steps, when the
canvas is stable or the answer is sure."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Counts, Memory, Seen, Stop, View


def ends(view: View, tokens: Array) -> Array:
    """`bool[R, W]`: which of `tokens` (`i32[R, W]`) would end the text at their positions."""
    eos = (tokens[:, :, None] == view.eos[:, None, :]).any(-1) & (tokens >= 0)
    return eos & view.editable & view.inside & (view.positions - view.prompt_length[:, None] >= view.min_new[:, None])


@dataclasses.dataclass(frozen=True)
class EndOfText(Stop):
    """The text ends behind the first end of sequence that has no open position before it. The rest is dropped."""

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        clean = jnp.cumprod(~after.open | ~after.inside, 1).astype(bool)
        return behind(after, ends(after, after.tokens) & ~after.open & clean)


@dataclasses.dataclass(frozen=True)
class FirstEnd(Stop):
    """The text ends behind the first end of sequence that is decided, even if positions before it are open: the canvas
    is cut there.

    Attributes:
        filled: the canvas keeps its length. Positions that are open before the end then attend to more ends of sequence
            behind it (d3LLM).
        once: the canvas is cut only once (Elastic-Cache's loop). If an end of sequence is decided later at an earlier
            position, the positions between the two are still filled in, and the returned text ends at the earlier one.
            The memory is whether the row has been cut, `bool[B]`.
    """

    filled: bool = False
    once: bool = False

    def init(self, view: View) -> Memory:
        return jnp.zeros(view.start.shape, bool) if self.once else None

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return memory | (after.end < before.end) if self.once else None

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        end = behind(after, ends(after, after.tokens) & ~after.open)
        return jnp.where(memory, after.end, end) if self.once else end


def behind(view: View, hit: Array) -> Array:
    """`i32[R]`: the end of the text if it ends behind the first position of `hit` (`bool[R, W]`); unchanged if there is
    none."""
    return jnp.where(hit.any(1), view.start + jnp.argmax(hit, 1).astype(jnp.int32) + 1, view.end)


@dataclasses.dataclass(frozen=True)
class Steps(Counts, Stop):
    """A region takes at most `steps` steps: the last one unmasks all open positions."""

    steps: int

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.step + 1 >= self.steps


@dataclasses.dataclass(frozen=True)
class Stable(Stop):
    """A region is done when its likeliest tokens are the same as in the `times` steps before and their mean entropy is
    below `entropy` nats. This is DiffusionGemma as in transformers; google-deepmind/gemma compares with the tokens on
    the canvas, noise included.

    The memory is those tokens, `i32[B, times, W]`.
    """

    entropy: float = 0.005
    times: int = 1
    reads = 1

    def init(self, view: View) -> Memory:
        return jnp.zeros((view.start.shape[0], self.times, view.positions.shape[1]), jnp.int32)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        assert seen.likeliest is not None
        return jnp.concatenate([memory, seen.likeliest[0][:, None, :, 0]], 1)[:, 1:]

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        assert seen.likeliest is not None
        same = ((seen.likeliest[0][:, None, :, 0] == memory) | ~view.masked[:, None]).all((1, 2))
        mean = jnp.where(view.masked, seen.model.entropy, 0).sum(1) / jnp.maximum(view.masked.sum(1), 1)
        return same & (mean < self.entropy) & (view.step >= self.times)


@dataclasses.dataclass(frozen=True)
class Gap(Counts, Stop):
    """Prophet (Li et al. 2025): everything is unmasked at once when the answer is sure. It is sure when the mean
    difference of the two largest logits over its positions reaches 7.5, 5.0 or 2.5 in the first, second and last third
    of the steps (progress below 0.33, below 0.67, and beyond, as in the authors' code).

    Attributes:
        steps: of a block. block: positions of one.
        answer: the first position of the answer behind the prompt, and its length; None: the whole text.
        gaps: the three thresholds.
    """

    steps: int
    block: int
    answer: tuple[int, int] | None = None
    gaps: tuple[float, float, float] = (7.5, 5.0, 2.5)

    def __post_init__(self) -> None:
        if self.answer is not None and (self.answer[0] < 0 or self.answer[1] < 1):
            raise ValueError(f"answer: got {self.answer}, takes a first position from 0 on and a length from 1 on")

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        watched = view.editable if self.answer is None else view.positions >= view.prompt_length[:, None]
        watched = watched & view.inside & seen.reached
        if self.answer is not None:
            offset = view.positions - view.prompt_length[:, None] - self.answer[0]
            watched = watched & (offset >= 0) & (offset < self.answer[1])
        count = watched.sum(1)
        gap = jnp.where(watched, seen.model.gap, 0).sum(1) / jnp.maximum(count, 1)
        blocks = -(-(view.end - view.start) // self.block)
        progress = (view.step + 1) / jnp.maximum(self.steps * blocks, 1)
        early, middle, late = self.gaps
        bar = jnp.where(progress < 0.33, early, jnp.where(progress < 0.67, middle, late))
        return (count > 0) & (gap >= bar)
