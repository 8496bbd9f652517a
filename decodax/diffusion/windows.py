"""Which part of the text is worked on, and when it is final: the whole, blocks, blocks in blocks, a sliding window."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.diffusion.policies import Memory, Rule, Seen, View


class _Region(Rule):
    """A region that is final when nothing in it is open."""

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.masked

    def finished(self, view: View, memory: Memory) -> Array:
        left = jnp.maximum(jnp.minimum(view.start + view.positions.shape[1], view.end) - view.start, 0)
        return jnp.where(view.masked.any(1), 0, left)


@dataclasses.dataclass(frozen=True)
class Whole(_Region):
    """The whole text is one region of at most `size` positions; a longer one is filled region after region. None: as
    many as the front door's longest budget."""

    size: int | None = None
    align = None

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"size: got {self.size}, takes 1 or more")

    @property
    def width(self) -> int:
        if self.size is None:
            raise ValueError("size: got None; give the most new tokens of a text, or call `fit` with it")
        return self.size

    def fit(self, budget: int) -> Whole:
        """With a size for texts of `budget` new tokens: a power of two, so that few programs serve all budgets."""
        return Whole(max(1 << max(budget - 1, 0).bit_length(), 8)) if self.size is None else self


@dataclasses.dataclass(frozen=True)
class Fixed(_Region):
    """Blocks of `block` positions from left to right (semi-autoregressive). They are counted from the prompt's end, or
    with `aligned` from the beginning of the sequence, as block-causal models are trained."""

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


@dataclasses.dataclass(frozen=True)
class SubBlocks(Fixed):
    """Blocks filled in sub-blocks of `sub` positions from left to right (Fast-dLLM v2, Wu et al. 2025)."""

    sub: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.sub <= self.block:
            raise ValueError(f"sub: got {self.sub}, takes 1 to the block of {self.block}")

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        number = (view.positions - view.start[:, None]) // self.sub
        first = jnp.where(view.masked, number, self.block).min(1)
        return view.masked & (number == first[:, None])


@dataclasses.dataclass(frozen=True)
class Sliding(_Region):
    """The next `size` positions behind the last final one; what is decided without a gap is final (SDLM)."""

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
