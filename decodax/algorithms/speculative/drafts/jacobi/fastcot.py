"""FastCoT: Jacobi decoding of a chain of thought with a window whose size depends on the position ("Fast
Chain-of-Thought: A Glance of Future from Parallel Decoding Leads to Answers Faster", Zhang et al., 2023).

Each forward pass has the newest token, which it decodes as usual, and a window of approximate tokens for the next
positions, which it improves by a Jacobi update. Verified tokens are committed; approximate tokens that are still wrong
are used in the next forward pass. The size of the window changes with the position: many approximate tokens where they
soon become right, few or none where they would be wasted.

This part is exact. The paper also cuts the rationale early: after a number of forward passes it stops at any point, and
the answer is generated from exact and approximate tokens together. With `cut` and `trigger`, the next window has the
approximate tokens as they are, then the tokens that start the answer. The verifier `Cut` accepts all of it, and
decoding continues after it. The output is then approximate.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.jacobi.jacobi import Fill, Guesses, Iterated, check_fill
from decodax.algorithms.speculative.source import Drawn
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.algorithms.speculative.verify.cut import Cut
from decodax.common.options import Count, TokenId, Whole
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.core.types import Params


@dataclasses.dataclass(frozen=True)
class FastCoT(Iterated):
    """Iterates a Jacobi window whose size follows a schedule (Zhang et al., 2023).

    Attributes:
        schedule: pairs of a number of new tokens and a window size: from that number on, the window has that size (0 is
            plain decoding). Approximate tokens beyond a smaller window are dropped.
        fill: the first guess for a position that enters the window.
        cut: number of forward passes after which the rationale ends; None: it is never cut.
        trigger: token ids that start the answer.

    Raises:
        ValueError: a schedule that does not start at 0, is not ascending, or never has a window; an invalid fill; a cut
            below 1; or a trigger without a cut or with a negative id.

    >>> FastCoT(((0, 4), (32, 16), (128, 0))).length
    16
    """

    schedule: tuple[tuple[int, int], ...] = ((0, 4), (16, 8), (64, 12))
    fill: Fill = "repeat"
    cut: int | None = None
    trigger: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.schedule]
        if starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"schedule: got starts {starts}, takes 0 and then rising numbers of new tokens")
        if self.widest < 1 or min(size for _, size in self.schedule) < 0:
            raise ValueError(f"schedule: got sizes {[size for _, size in self.schedule]}, takes 0 or more, one of them "
                             "at least 1")
        check_fill(self.fill)
        if self.cut is not None and self.cut < 1:
            raise ValueError(f"cut: got {self.cut}, takes at least 1")
        if self.trigger and (self.cut is None or min(self.trigger) < 0):
            raise ValueError(f"trigger: got {self.trigger} with cut={self.cut}, takes ids from 0 up, with a cut")

    @property
    def widest(self) -> int:
        """The largest window size in the schedule."""
        return max(size for _, size in self.schedule)

    @property
    def length(self) -> int:  # type: ignore[override]
        """Largest number of drafts in a round: the largest window size in the schedule plus the number of trigger
        tokens."""
        return self.widest + len(self.trigger)

    def width(self, s: State) -> Array:
        starts, sizes = (jnp.asarray(x, jnp.int32) for x in zip(*self.schedule, strict=True))
        made = s.length - s.prompt_length
        return sizes[(made[:, None] >= starts).sum(1) - 1]

    def propose(self, params: Params, policy: Any, s: State, state: Guesses, drawn: Drawn) -> tuple[Proposal, Guesses]:
        p, state = super().propose(params, policy, s, state, drawn)
        if self.cut is None:
            return p, state
        # the known guesses, up to an end of sequence, and the trigger after them
        known = (state.tokens >= 0) & ~(state.tokens[:, :, None] == policy.eos[:, None, :]).any(-1)
        count = jnp.minimum(jnp.cumprod(known, 1).sum(1, dtype=jnp.int32), self.widest)
        opens = jnp.asarray(self.trigger, jnp.int32)
        put = jax.vmap(lambda row, i: jax.lax.dynamic_update_slice_in_dim(row, opens, i, 0))
        whole = chain(put(jnp.maximum(state.tokens, 0), count), count + len(self.trigger))
        now = (s.stats.rounds == self.cut)[:, None]
        return jax.tree.map(lambda a, b: jnp.where(now, a, b), whole, p), state


@ALGORITHMS.register("fastcot",
                     "Fast Chain-of-Thought: A Glance of Future from Parallel Decoding Leads to Answers Faster",
                     "Zhang et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def fastcot(schedule: tuple[tuple[Whole, Whole], ...] = ((0, 4), (16, 8), (64, 12)), cut: Count | None = None,
            trigger: tuple[TokenId, ...] = (), verify: Verifier | None = None) -> Speculative:
    """Iterates a Jacobi window whose size follows a schedule; `cut` ends a rationale early, with approximate tokens.

    After a cut, the answer is written after guesses of the rationale's end.

    Args:
        schedule: pairs of a number of new tokens and the window size from there on.
        cut: number of forward passes after which the rationale ends; None: it is never cut.
        trigger: token ids that start the answer.
        verify: the rule that accepts drafts, not possible with `cut`; None: `SeedExact`.
    """
    if cut is not None and verify is not None:
        raise ValueError(f"verify: got {verify} beside a cut, which is a verifier of its own")
    draft = FastCoT(schedule, cut=cut, trigger=tuple(trigger))
    return Speculative(draft, (verify or SeedExact()) if cut is None else Cut(cut))
