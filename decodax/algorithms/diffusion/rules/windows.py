"""Windows that several samplers share: the whole text, blocks, or a sliding window."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import BudgetSized, Memory, Windows
from decodax.algorithms.diffusion.rules.unmasking import current, number
from decodax.algorithms.diffusion.view import Seen, View


@dataclasses.dataclass(frozen=True)
class Whole(BudgetSized, Windows):
    """The whole text is one window of at most `size` positions; a longer text is filled in several windows. `size=None`
    is replaced by the largest budget of the call."""

    size: int | None = None
    align = None

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"size: got {self.size}, takes 1 or more")

    @property
    def width(self) -> int:
        return self.known_size


@dataclasses.dataclass(frozen=True)
class WholeBlocks(Whole):
    """The whole text is one window, in which blocks of `block` positions are filled from left to right. It unmasks the
    same positions as `Blocks`, for rules that need the whole text."""

    block: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise ValueError(f"block: got {self.block}, takes 1 or more")

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.masked & (number(view, self.block) == current(view, self.block)[:, None])


@dataclasses.dataclass(frozen=True)
class Blocks(Windows):
    """Blocks of `block` positions from left to right (semi-autoregressive).

    Blocks are counted from the prompt's end, or with `aligned` from the beginning of the sequence, as block-causal
    models are trained.
    """

    block: int = 32
    aligned: bool = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block: got {self.block}, takes 1 or more")

    @property
    def width(self) -> int:
        return self.block

    @property
    def align(self) -> int | None:
        return self.block if self.aligned else None

    def last(self, start: Array, end: Array) -> Array:
        return start - (start - end) // self.block * self.block


@dataclasses.dataclass(frozen=True)
class Sliding(Windows):
    """A sliding window: always the `size` positions after the last final one. A position is final once no position up
    to and including it is undecided (SDLM)."""

    size: int = 8
    align = None
    least = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size: got {self.size}, takes 1 or more")

    @property
    def width(self) -> int:
        return self.size

    def finished(self, view: View, memory: Memory) -> Array:
        return jnp.cumprod(~view.open & view.inside, 1).sum(1).astype(jnp.int32)

    def last(self, start: Array, end: Array) -> Array:
        return end + self.size - 1
