"""Which part of the text is worked on, and when it is final: the whole text, blocks, sub-blocks, blocks that end at a
delimiter, or a sliding window."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Memory, Seen, View, Windows
from decodax.algorithms.diffusion.rules.unmasking import current, number


@dataclasses.dataclass(frozen=True)
class Whole(Windows):
    """The whole text is one region of at most `size` positions; a longer text is filled in several regions. None: the
    largest budget of the call."""

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
        """The rule with a size for texts of `budget` new tokens: a power of two, so that few programs serve all
        budgets."""
        size = max(1 << max(budget - 1, 0).bit_length(), 8)
        return dataclasses.replace(self, size=size) if self.size is None else self


@dataclasses.dataclass(frozen=True)
class WholeBlocks(Whole):
    """The whole text is one region, in which blocks of `block` positions are filled from left to right. It unmasks what
    `Blocks` does, for rules that look at the whole text."""

    block: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise ValueError(f"block: got {self.block}, takes 1 or more")

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.masked & (number(view, self.block) == current(view, self.block)[:, None])


@dataclasses.dataclass(frozen=True)
class Blocks(Windows):
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

    def last(self, start: Array, end: Array) -> Array:
        return start - (start - end) // self.block * self.block


@dataclasses.dataclass(frozen=True)
class SubBlocks(Blocks):
    """Blocks filled in sub-blocks of `sub` positions from left to right (Fast-dLLM v2, Wu et al. 2025)."""

    sub: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.sub <= self.block:
            raise ValueError(f"sub: got {self.sub}, takes 1 to the block of {self.block}")

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.masked & (number(view, self.sub) == current(view, self.sub)[:, None])


@dataclasses.dataclass(frozen=True)
class Delimited(Windows):
    """Blocks that end with a delimiter (AdaBlock, Lu et al. 2025), as in the authors' code: in a block's first step the
    candidates of the next positions (`share` of the text's new ones) are searched for `delimiters`. The surest
    delimiter ends the block if its probability is at least `threshold`; otherwise the block has `block` positions.

    The memory is the block's length, `i32[B]`. The region is as wide as the longest possible block.

    Attributes:
        size: the most new tokens of a text, of which the region takes `share`; None: the largest budget of the call.
    """

    delimiters: tuple[int, ...]
    threshold: float = 0.3
    block: int = 32
    share: float = 0.25
    size: int | None = None
    align = None

    def __post_init__(self) -> None:
        if not self.delimiters:
            raise ValueError("delimiters: got none, takes token ids")
        for name, value in (("block", self.block), ("size", self.size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, takes 1 or more")

    @property
    def width(self) -> int:
        if self.size is None:
            raise ValueError("size: got None; give the most new tokens of a text, or call `fit` with it")
        return max(int(self.size * self.share), self.block)

    def fit(self, budget: int) -> Delimited:
        """The rule with a size for texts of `budget` new tokens: a power of two, so that few programs serve all
        budgets."""
        size = max(1 << max(budget - 1, 0).bit_length(), 8)
        return dataclasses.replace(self, size=size) if self.size is None else self

    def _length(self, view: View, seen: Seen) -> Array:
        """`i32[R]`: the length of a block that begins now."""
        text = (view.end - view.prompt_length).astype(jnp.float32)
        searched = view.inside & (view.positions - view.start[:, None] < jnp.floor(text * self.share)[:, None])
        found = searched & seen.reached & (seen.token[..., None] == jnp.array(self.delimiters, jnp.int32)).any(-1)
        prob = jnp.where(found, seen.model.prob, -1)
        return jnp.where(prob.max(1) >= self.threshold, jnp.argmax(prob, 1).astype(jnp.int32) + 1, self.block)

    def init(self, view: View) -> Memory:
        return jnp.zeros(view.start.shape, jnp.int32)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return jnp.where(before.step == 0, self._length(before, seen), memory)

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        length = jnp.where(view.step == 0, self._length(view, seen), memory)
        return view.masked & (view.positions - view.start[:, None] < length[:, None])

    def finished(self, view: View, memory: Memory) -> Array:
        # what is decided behind the block was given
        run = jnp.cumprod(~view.open & view.inside, 1).sum(1).astype(jnp.int32)
        return jnp.where((view.active & view.masked).any(1), 0, run)


@dataclasses.dataclass(frozen=True)
class Sliding(Windows):
    """The `size` positions behind the last final one. Positions are final once no open one lies before them (SDLM)."""

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
