"""FastCoT's windows: a glance at the future of a chain of thought, as far as the position deserves.

Zhang et al. 2023, "Fast Chain-of-Thought: A Glance of Future from Parallel Decoding Leads to Answers Faster". Each
forward carries the newest token, which it decodes as usual, and a window of approximate tokens of the future, which it
improves by a Jacobi update; what is verified is committed, and approximate tokens that are still wrong stay and are
used by the next forward. The window's size changes with the position: many approximate tokens where the text settles
early, few or none where they would be wasted.

This is the exact part. The paper's other part, to cut the rationale early and to answer from exact and approximate
tokens together, changes the output and is not included.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
from jax import Array

from decodax.core.state import State
from decodax.speculative.drafts.jacobi import Fill, Iterated, check_fill


@dataclasses.dataclass(frozen=True)
class FastCoT(Iterated):
    """A Jacobi window whose size follows a schedule.

    Attributes:
        schedule: pairs of a number of new tokens and a size: from so many new tokens on, the window has that size (0
            is plain decoding). Tokens that a shrinking window leaves out are forgotten.
        fill: the first guess of a position that enters the window.

    Raises:
        ValueError: a schedule that does not start at 0, does not rise, or never has a window; or a fill that is none.

    >>> FastCoT(((0, 4), (32, 16), (128, 0))).length
    16
    """

    schedule: tuple[tuple[int, int], ...] = ((0, 4), (16, 8), (64, 12))
    fill: Fill = "repeat"

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.schedule]
        if starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"schedule: got starts {starts}, takes 0 and then rising numbers of new tokens")
        if self.length < 1 or min(size for _, size in self.schedule) < 0:
            raise ValueError(f"schedule: got sizes {[size for _, size in self.schedule]}, takes 0 or more, one of them "
                             "at least 1")
        check_fill(self.fill)

    @property
    def length(self) -> int:  # type: ignore[override]
        """The largest size."""
        return max(size for _, size in self.schedule)

    def width(self, s: State) -> Array:
        starts, sizes = (jnp.asarray(x, jnp.int32) for x in zip(*self.schedule, strict=True))
        made = s.length - s.prompt_length
        return sizes[(made[:, None] >= starts).sum(1) - 1]
