"""Jacobi decoding: drafts are the target's own guesses of the next tokens, iterated in parallel until they no longer
change ("Accelerating Transformer Inference for Translation via Parallel Decoding", Santilli et al., 2023).

Decoding is the triangular system `y_i = f_i(y_<i)`: here `f_i` is the draw that plain decoding makes at position `i`
with that position's key (the argmax where a row is greedy), under the whole policy. A round runs one forward over the
newest token and the guesses, and every guess is replaced by what its left neighbour draws. The guesses in front that
were right are the settled part, and leave the window as accepted drafts; the others are the next round's guesses. So
position `i` of a window is settled after `i` rounds at the latest, for sampled rows too: since `f_i` is the draw of
`SeedExact`, the fixed point is the text of plain decoding.

`Jacobi` slides: as positions settle, fresh ones enter at the far end. `PGJ` (Gauss-Seidel between blocks, Jacobi
inside) opens the next block when one is settled. The paper's PJ is PGJ with one block, and HGJ is PGJ for a first part
and plain decoding after it. Settled tokens are committed in the round that proves them; their forwards are
counted as in the paper, where a block stops at the iteration that changes none of its inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Range
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.cache import Feature
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window

Fill = int | Literal["repeat", "text"]
"""The first guess of a position: a token id (the paper's PAD), the newest token again, or a token of the text so far
at a random place."""


@struct
class Guesses(Struct):
    """Guesses of the tokens after the newest one: `tokens` `i32[B, K]`, -1 for no guess; within a round also the
    `policy`, so that `observe` draws as plain decoding does."""

    tokens: Array
    policy: Any = None


class Iterated(Draft):
    """The base of drafts by Jacobi iteration: a chain of guesses, whose length in a round is defined by `width`."""

    length: int
    fill: Fill
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def width(self, s: State) -> Array:
        """Returns the number of guesses that each row runs in this round, `i32[B]`, at most `length`."""
        raise NotImplementedError

    def init(self, params: Params, s: State) -> Guesses:
        return Guesses(tokens=jnp.full((s.batch, self.length), -1, jnp.int32))

    def propose(self, params: Params, policy: Any, s: State, state: Guesses, drawn: Drawn) -> tuple[Proposal, Guesses]:
        tokens = jnp.where(state.tokens >= 0, state.tokens, filling(self.fill, s, self.length))
        return chain(tokens, self.width(s)), state.replace(policy=policy)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Guesses) -> Guesses:
        if decision is None or state.policy is None:
            return state.replace(policy=None)
        nodes, run = nodes_after(s, window, decision, self.length)
        drawn = state.policy.over(s, window, out).draw()       # XLA shares SeedExact's head, not its draws
        tokens = jnp.take_along_axis(drawn, nodes, 1)
        return Guesses(tokens=jnp.where(run & (tokens >= 0), tokens, -1))


def nodes_after(s: State, window: Window, decision: Decision, length: int) -> tuple[Array, Array]:
    """Returns the window nodes that predict the tokens after the round's last one, along the chain of guesses.

    The node after the last accepted one holds a rejected guess for that token; its logits are the next guess.

    Returns:
        `i32[B, length]` nodes and `bool[B, length]`, True for those that were run.
    """
    at = decision.count[:, None] + jnp.arange(length, dtype=jnp.int32)
    nodes = jnp.minimum(at, window.width - 1)
    take = lambda x: jnp.take_along_axis(x, nodes, 1)
    # another draft's window may have other nodes there
    return nodes, (at < window.width) & take(window.live) & (take(window.positions) == s.length[:, None] - 1 + at)


def filling(fill: Fill, s: State, length: int, salt: int = 0) -> Array:
    """Returns first guesses for the positions after the newest token, `i32[B, length]`."""
    if isinstance(fill, int):
        return jnp.full((s.batch, length), fill, jnp.int32)
    if fill == "repeat":
        return jnp.broadcast_to(s.newest[:, None], (s.batch, length))

    def row(key: Array, tokens: Array, end: Array) -> Array:
        one = lambda i: jax.random.randint(keys.at(key, end + i, Purpose.DRAFT, jnp.int32(salt)), (), 0, end)
        return tokens[jax.vmap(one)(jnp.arange(length, dtype=jnp.int32))]

    return jax.vmap(row)(s.key, s.tokens, s.length)


def check_fill(fill: Fill) -> None:
    """Raises ValueError for what is no `Fill`."""
    if fill not in ("repeat", "text") and not (isinstance(fill, int) and fill >= 0):
        raise ValueError(f"fill: got {fill!r}, takes a token id, 'repeat' or 'text'")


@dataclasses.dataclass(frozen=True)
class Jacobi(Iterated):
    """A sliding window of `length` guesses.

    Attributes:
        fill: the first guess of a position that enters the window.

    Raises:
        ValueError: a length below 1, or a fill that is none.
    """

    length: int = 8
    fill: Fill = "repeat"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, takes at least 1")
        check_fill(self.fill)

    def width(self, s: State) -> Array:
        return jnp.full(s.batch, self.length, jnp.int32)


@dataclasses.dataclass(frozen=True)
class PGJ(Iterated):
    """Iterates blocks of `block` new tokens from left to right, each until it is settled, in `block` rounds at most.

    Attributes:
        fill: the first guess of every position of a block; the paper takes PAD.
        until: number of new tokens that are drafted; the rest is decoded plainly. None drafts all.

    Raises:
        ValueError: a block below 2, an `until` below 1, or a fill that is none.
    """

    block: int = 5
    fill: Fill = "repeat"
    until: int | None = None

    def __post_init__(self) -> None:
        if self.block < 2:
            raise ValueError(f"block: got {self.block}, takes at least 2")
        if self.until is not None and self.until < 1:
            raise ValueError(f"until: got {self.until}, takes at least 1")
        check_fill(self.fill)

    @property
    def length(self) -> int:  # type: ignore[override]
        """The newest token's own prediction is the first of the block, so it takes one guess less."""
        return self.block - 1

    def width(self, s: State) -> Array:
        made = s.length - s.prompt_length
        left = self.block - 1 - made % self.block
        if self.until is not None:      # the last block may be shorter
            left = jnp.clip(self.until - 1 - made, 0, left)
        return left.astype(jnp.int32)


@ALGORITHMS.register("jacobi", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def jacobi(length: Count = 8, fill: Fill = "repeat", verify: Verifier = SeedExact()) -> Speculative:
    """Iterates a window of the target's own guesses to its fixed point, which moves with the text.

    It needs nothing but the target; it saves little unless the model was trained for it.

    Args:
        length: guesses in the window.
        fill: first guess of a position: a token id, "repeat" (the newest token) or "text" (a token of the text).
        verify: rule that accepts drafts.
    """
    return Speculative(Jacobi(length, fill), verify)


@ALGORITHMS.register("pj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def pj(size: Annotated[int, Range(2)] = 64, fill: Fill = "repeat", verify: Verifier = SeedExact()) -> Speculative:
    """Iterates guesses of the whole output at once (parallel Jacobi decoding).

    For short outputs of known length, such as translations.

    Args:
        size: most new tokens; after them another block begins.
        fill: first guess of a position, as in `jacobi`. verify: rule that accepts drafts.
    """
    return Speculative(PGJ(size, fill), verify)


@ALGORITHMS.register("pgj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def pgj(block: Annotated[int, Range(2)] = 5, fill: Fill = "repeat", verify: Verifier = SeedExact()) -> Speculative:
    """Iterates guesses block by block (parallel Gauss-Seidel-Jacobi decoding).

    A block is small enough that most of its forwards settle a token.

    Args:
        block: new tokens of a block.
        fill: first guess of a position, as in `jacobi`. verify: rule that accepts drafts.
    """
    return Speculative(PGJ(block, fill), verify)


@ALGORITHMS.register("hgj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def hgj(block: Annotated[int, Range(2)] = 5, until: Count = 48, fill: Fill = "repeat",
        verify: Verifier = SeedExact()) -> Speculative:
    """Iterates guesses block by block up to a length, and decodes plainly after it (hybrid Gauss-Seidel-Jacobi).

    `until` is an estimate of the output's length.

    Args:
        block: new tokens of a block. until: number of new tokens that are drafted.
        fill: first guess of a position, as in `jacobi`. verify: rule that accepts drafts.
    """
    return Speculative(PGJ(block, fill, until), verify)
