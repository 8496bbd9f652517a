"""Blocks that stand for others of their kind ("KVCrush: Key Value Cache Size-Reduction Using Similarity in
Head-Behaviour", Jha et al., 2025).

A part of the budget goes to the blocks of the highest scores. The rest goes to representatives of those that would be
evicted: each block is described by bits, one a token, which say whether it is among the better half of all tokens; the
blocks are put in order by the Hamming distance of their bits to an anchor, and taken at even steps along it. This is
the paper's rule for paged caches, as its authors' code in OpenVINO GenAI has it; for single tokens the paper has a bit
a head.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.query_scores import Accumulated
from decodax.caches.evict.selection import Selection, best

Anchor = Literal["random", "zeros", "ones", "mean", "alternating"]
"""What bits are compared with; "mean": in each place what most of the blocks have."""


@dataclasses.dataclass(frozen=True)
class Representatives(Selection):
    """The best blocks of a layer, the same ones for all heads, and representatives of the others. The first tokens and
    the latest ones stay, and those that fill no block.

    Attributes:
        score: says how many of the first and latest tokens stay (`sinks`, `recent`), and gives all heads the same
            scores.
        block: tokens of a block. crush: how many representatives, in blocks of the budget.
        anchor: see `Anchor`. seed: of a random one.
    """

    score: Accumulated
    block: int = 32
    crush: int = 8
    anchor: Anchor = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.anchor not in get_args(Anchor):
            raise ValueError(f"anchor: got {self.anchor!r}, takes one of {', '.join(get_args(Anchor))}")
        if self.block < 1 or self.crush < 0:
            raise ValueError(f"block, crush: got {self.block} and {self.crush}, takes 1 and 0 or more")

    @property
    def least(self) -> int:
        """The smallest budget: what stays in any case, and the representatives."""
        return self.score.always + self.block - 1 + self.crush * self.block

    def choose(self, held: HeldLayer, count: Array) -> Array:
        first, number = self.score.sinks, held.count[0]
        several = max((held.slots - first) // self.block, 1)
        whole = jnp.maximum(number - self.score.always, 0) // self.block        # blocks that may go
        worth = jnp.pad(self.score(held)[0], (0, self.block))[first:first + several * self.block]
        within = jnp.arange(several) < whole
        chosen = self.blocks(worth.reshape(several, self.block), within, (count - self.least) // self.block)
        of = jnp.clip((held.index[0] - first) // self.block, 0, several - 1)
        stays = (held.index[0] < first) | (held.index[0] >= first + whole * self.block) | chosen[of] | (number <= count)
        return held.valid & stays

    def blocks(self, worth: Array, within: Array, number: Array) -> Array:
        """`bool[N]`: the best `number` of those `within` (`bool[N]`) by their tokens' worth `f32[N, P]`, and
        representatives of the others, where there are as many."""
        size, whole = worth.shape, within.sum()
        top = best(worth.sum(1)[None], within[None], number)[0]
        valid = jnp.broadcast_to(within[:, None], size).reshape(1, -1)
        bits = best(worth.reshape(1, -1), valid, whole * self.block // 2).reshape(size)
        away = (bits != self._anchor(bits, whole)).sum(1)
        left = within & ~top
        rank = jnp.argsort(jnp.argsort(jnp.where(left, away, self.block + 1), stable=True), stable=True)
        others = left.sum()
        step = jnp.maximum(others // max(self.crush, 1), 1)
        some = left & (rank % step == 0) & (rank // step < self.crush)
        return top | (some & (others >= self.crush))

    def _anchor(self, bits: Array, whole: Array) -> Array:
        """`bool[P]`."""
        match self.anchor:
            case "random":
                return jax.random.bernoulli(jax.random.key(self.seed), shape=(self.block,))
            case "mean":
                return bits.sum(0) / jnp.maximum(whole, 1) > 0.5
            case "alternating":
                return jnp.arange(self.block) % 2 == 1
        return jnp.full(self.block, self.anchor == "ones")
