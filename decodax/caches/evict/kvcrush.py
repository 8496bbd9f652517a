"""KVCrush: keeps representatives of the blocks that are evicted ("KVCrush: Key Value Cache Size-Reduction Using
Similarity in Head-Behaviour", Jha et al., 2025).

Most of the budget goes to the blocks with the highest scores, the rest to representatives of the other blocks. Each
block is described by one bit for each of its tokens: whether the token's score is in the upper half of all scores. The
other blocks are sorted by the Hamming distance of their bits to an anchor, and the representatives are taken at equal
intervals. This is the paper's rule for paged caches, as in its authors' code in OpenVINO GenAI; the paper's rule for
single tokens has one bit for each head.

In OpenVINO GenAI (da1db864d) representatives are added to the budget; here both share it. Random bits differ.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.h2o import Accumulated
from decodax.caches.evict.scores import HeldLayer
from decodax.caches.evict.selection import Every, Selection, best
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES

Anchor = Literal["random", "zeros", "ones", "mean", "alternating"]
"""The bits that blocks are compared with. "mean": in each place the bit that most blocks have."""


@dataclasses.dataclass(frozen=True)
class BlockRepresentatives(Selection):
    """Keeps the best blocks of a layer, the same ones in all heads, and representatives of the other blocks. The first
    and the latest tokens are always kept, and so are tokens that do not fill a block.

    Attributes:
        score: score of the tokens, the same for all heads. Its `sinks` and `recent` are the numbers of first and latest
            tokens.
        block_size: number of tokens of a block.
        kvcrush_budget: number of blocks of the budget for representatives.
        anchor_point_mode: see `Anchor`.
        rng_seed: seed of a random anchor.
    """

    score: Accumulated
    block_size: Count = 32
    kvcrush_budget: Whole = 8
    anchor_point_mode: Anchor = "random"
    rng_seed: int = 0

    @property
    def least(self) -> int:
        """Smallest allowed budget in tokens: the tokens that are always kept, an incomplete block, and the
        representatives."""
        return self.score.always + self.block_size - 1 + self.kvcrush_budget * self.block_size

    def choose(self, held: HeldLayer, count: Array) -> Array:
        first, number = self.score.sinks, held.count[0]
        several = max((held.slots - first) // self.block_size, 1)
        whole = jnp.maximum(number - self.score.always, 0) // self.block_size        # blocks that may go
        worth = jnp.pad(self.score(held)[0], (0, self.block_size))[first:first + several * self.block_size]
        within = jnp.arange(several) < whole
        chosen = self.blocks(worth.reshape(several, self.block_size), within, (count - self.least) // self.block_size)
        of = jnp.clip((held.index[0] - first) // self.block_size, 0, several - 1)
        beside = (held.index[0] < first) | (held.index[0] >= first + whole * self.block_size)
        stays = beside | chosen[of] | (number <= count)
        return held.valid & stays

    def blocks(self, worth: Array, within: Array, number: Array) -> Array:
        """Returns a mask of the blocks to keep, `bool[N]`: the `number` blocks of highest score, and `kvcrush_budget`
        of the others that represent them. There are no representatives if there are fewer others than that.

        Args:
            worth: `f32[N, P]`, scores of the `P` tokens of each of `N` blocks.
            within: `bool[N]`, the blocks to choose from.
            number: `i32[]`, number of best blocks.
        """
        size, whole = worth.shape, within.sum()
        top = best(worth.sum(1)[None], within[None], number)[0]
        valid = jnp.broadcast_to(within[:, None], size).reshape(1, -1)
        bits = best(worth.reshape(1, -1), valid, whole * self.block_size // 2).reshape(size)
        away = (bits != self._anchor(bits, whole)).sum(1)
        left = within & ~top
        rank = jnp.argsort(jnp.argsort(jnp.where(left, away, self.block_size + 1), stable=True), stable=True)
        others = left.sum()
        step = jnp.maximum(others // max(self.kvcrush_budget, 1), 1)
        some = left & (rank % step == 0) & (rank // step < self.kvcrush_budget)
        return top | (some & (others >= self.kvcrush_budget))

    def _anchor(self, bits: Array, whole: Array) -> Array:
        """Returns the bits that blocks are compared with, `bool[P]`."""
        match self.anchor_point_mode:
            case "random":
                return jax.random.bernoulli(jax.random.key(self.rng_seed), shape=(self.block_size,))
            case "mean":
                return bits.sum(0) / jnp.maximum(whole, 1) > 0.5
            case "alternating":
                return jnp.arange(self.block_size) % 2 == 1
        return jnp.full(self.block_size, self.anchor_point_mode == "ones")


@CACHES.register("kvcrush", "KVCrush: Key Value Cache Size-Reduction Using Similarity in Head-Behaviour",
                 "Jha et al. 2025", family="evict")
def kvcrush(budget: Count = 1024, every: Every = 32, block_size: Count = 32, kvcrush_budget: Whole = 8,
            start_size: Whole = 32, recent_size: Whole = 128, anchor_point_mode: Anchor = "random",
            rng_seed: Whole = 0) -> Eviction:
    """Keeps the blocks that have received the most attention, and representatives of the other blocks.

    The options are those of the authors' code in OpenVINO GenAI.

    Args:
        budget: tokens that each head keeps.
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        block_size: tokens of a block.
        kvcrush_budget: number of blocks of the budget for representatives.
        start_size, recent_size: numbers of first and of latest tokens that are always kept.
        anchor_point_mode: the bits that blocks are compared with; "mean": in each place the bit that most blocks have.
        rng_seed: seed of a random anchor.
    """
    select = BlockRepresentatives(Accumulated(recent_size, every=every, sinks=start_size, over="heads"), block_size,
                                  kvcrush_budget, anchor_point_mode, rng_seed)
    if budget < select.least:
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens from {select.least}, which the first and "
                         f"the latest tokens and {kvcrush_budget} blocks take")
    return Eviction(select, budget, every, name="kvcrush")
