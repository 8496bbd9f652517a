"""BASS: one draft length for the batch, adapted to the row with the most accepted drafts ("BASS: Batched
Attention-optimized Speculative Sampling", Qian et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.adaptive.arms import Adaptive, chains
from decodax.algorithms.speculative.adaptive.controllers import Arms, Controller, RoundOutcome, for_rows, of_batch
from decodax.common.arguments import check_counts
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.state import State


@struct
class BassState(Struct):
    """State of `Bass`, common to the batch (`of_batch`).

    Attributes:
        length: `i32[]`, the draft length.
        cut: `i32[]`, 1 if it was reduced in the last round, else 0.
        round: `i32[]`, number of updates.
    """

    length: Array
    cut: Array
    round: Array


@dataclasses.dataclass(frozen=True)
class Bass(Controller):
    """Keeps one draft length for the batch, which grows if some row accepts all drafts and shrinks otherwise (Qian et
    al., 2024).

    It shrinks by `ceil(length / shrink)`, and by one more if it shrank in the round before, but not below the largest
    number of drafts that a row accepted. The longest arm that is not longer is chosen. The defaults are the paper's.

    Attributes:
        start: first length.
        grow: number of tokens by which it grows.
        shrink: divisor of the length that gives the number of tokens by which it shrinks.

    Raises:
        ValueError: a number below 1.
    """

    start: int = 7
    grow: int = 2
    shrink: int = 10

    def __post_init__(self) -> None:
        check_counts(self, "start", "grow", "shrink")

    def init(self, of: Arms, batch: int) -> BassState:
        zero = jnp.zeros((), jnp.int32)
        return for_rows(BassState(length=zero + min(self.start, of.longest), cut=zero, round=zero), batch)

    def choose(self, of: Arms, state: BassState, s: State) -> Array:
        lengths = jnp.array(of.lengths)
        fits = jnp.where(lengths <= of_batch(state.length, state.round), lengths, -1)
        return jnp.where(fits.max() >= 0, jnp.argmax(fits), jnp.argmin(lengths)).astype(jnp.int32)

    def update(self, of: Arms, state: BassState, seen: RoundOutcome) -> BassState:
        drafted, state = jnp.array(of.lengths)[seen.arm], of_batch(state, state.round)
        grown = jnp.minimum(state.length + self.grow, of.longest)
        cut = state.length - -(-state.length // self.shrink) - state.cut
        most = jnp.where(seen.running, seen.accepted, 0).max()
        whole = most >= drafted
        length = jnp.where(whole, grown, jnp.maximum(jnp.maximum(cut, most), 1))
        return for_rows(BassState(length=length, cut=(~whole).astype(jnp.int32), round=state.round + 1),
                        len(seen.running))


@ALGORITHMS.register("bass", "BASS: Batched Attention-optimized Speculative Sampling", "Qian et al. 2024",
                     family="batching-scheduling", needs="a draft model", guarantee="seed-exact")
def bass(draft: Any, lengths: tuple[Count, ...] = (1, 2, 3, 5, 7)) -> Adaptive:
    """Drafts with a draft model, with one draft length that is adapted to the row with the most accepted drafts.

    For batches whose draft length should adapt without measured costs. Rows may accept different numbers of drafts.

    Args:
        draft: the draft model.
        lengths: draft lengths to choose from.
    """
    return Adaptive(chains(draft, lengths), Bass())
