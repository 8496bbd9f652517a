"""Jacobi decoding: drafts are the target's own guesses of the next tokens, iterated in parallel until they no longer
change ("Accelerating Transformer Inference for Translation via Parallel Decoding", Santilli et al., 2023).

Decoding is the triangular system `y_i = f_i(y_<i)`. Here `f_i` is the draw of plain decoding at position `i` with that
position's random key (the argmax in greedy rows), under the complete policy. A round runs one forward pass over the
newest token and the guesses, and each guess is replaced by the token that its left neighbour draws. The leading guesses
that were right leave the window as accepted drafts; the others are the guesses of the next round. So position `i` of a
window is right after at most `i` rounds, also in sampled rows: since `f_i` is the draw of `SeedExact`, the fixed point
is the text of plain decoding.

`Jacobi` has a sliding window: for each accepted position a new one enters at its end. `PGJ` (Gauss-Seidel between
blocks, Jacobi inside) starts the next block when one is complete. The paper's PJ is PGJ with one block, and HGJ is PGJ
for the first part of a text and plain decoding after it. Accepted tokens are committed in the round that verifies them.
The number of forward passes is that of the paper, where a block stops at the iteration that changes none of its inputs.
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
from decodax.common.options import Count, Range, TokenId
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.cache import Feature
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window

Fill = TokenId | Literal["repeat", "text"]
"""The first guess for a position: a token id (the paper's PAD), "repeat" (the newest token), or "text" (a token at a
random position of the text so far)."""


@struct
class Guesses(Struct):
    """State of Jacobi iteration: guesses of the tokens after the newest one.

    Attributes:
        tokens: `i32[B, K]`, -1 for no guess.
        policy: within a round, the sampling policy, so that `observe` draws as plain decoding does.
    """

    tokens: Array
    policy: Any = None


class Iterated(Draft):
    """Base class of drafts by Jacobi iteration: the drafts are guesses of the next tokens, which the target's forward
    pass of each round replaces by its own predictions. Subclasses give their number (`width`)."""

    length: int
    fill: Fill
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def width(self, s: State) -> Array:
        """Returns the number of guesses that each row drafts in this round, `i32[B]`, from 0 to `length`."""
        raise NotImplementedError

    def init(self, params: Params, s: State) -> Guesses:
        return Guesses(tokens=jnp.full((s.batch, self.length), -1, jnp.int32))

    def propose(self, params: Params, policy: Any, s: State, state: Guesses, drawn: Drawn) -> tuple[Proposal, Guesses]:
        tokens = jnp.where(state.tokens >= 0, state.tokens, filling(self.fill, s, self.length))
        return chain(tokens, self.width(s)), state.replace(policy=policy)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Guesses) -> Guesses:
        if decision is None or state.policy is None:
            return state.replace(policy=None)
        nodes, run = nodes_after(s, window, decision, self.length)
        drawn = state.policy.over(s, window, out).draw()       # XLA shares SeedExact's head, not its draws
        tokens = jnp.take_along_axis(drawn, nodes, 1)
        return Guesses(tokens=jnp.where(run & (tokens >= 0), tokens, -1))


def nodes_after(s: State, window: Window, decision: Decision, length: int) -> tuple[Array, Array]:
    """Returns the window indices of the guesses whose logits predict the tokens after the last decided one, `i32[B,
    length]`, and whether each was in the window, `bool[B, length]`.

    The first of these is a rejected guess of the last decided token; its logits give the next guess. `decision` is that
    of the round, and `s` the state before it.
    """
    at = decision.count[:, None] + jnp.arange(length, dtype=jnp.int32)
    nodes = jnp.minimum(at, window.width - 1)
    take = lambda x: jnp.take_along_axis(x, nodes, 1)
    # another draft's window may have other nodes there
    return nodes, (at < window.width) & take(window.live) & (take(window.positions) == s.length[:, None] - 1 + at)


def filling(fill: Fill, s: State, length: int, salt: int = 0) -> Array:
    """Returns the initial guesses for the `length` positions after the newest token, `i32[B, length]`.

    Args:
        fill: a token id, "repeat" (the newest token) or "text" (random tokens of the row's text).
        s: the decoding state.
        length: number of guesses.
        salt: distinguishes several random draws in one round.
    """
    if isinstance(fill, int):
        return jnp.full((s.batch, length), fill, jnp.int32)
    if fill == "repeat":
        return jnp.broadcast_to(s.newest[:, None], (s.batch, length))

    def row(key: Array, tokens: Array, end: Array) -> Array:
        one = lambda i: jax.random.randint(keys.at(key, end + i, Purpose.DRAFT, jnp.int32(salt)), (), 0, end)
        return tokens[jax.vmap(one)(jnp.arange(length, dtype=jnp.int32))]

    return jax.vmap(row)(s.key, s.tokens, s.length)


def check_fill(fill: Fill) -> None:
    """Raises ValueError if `fill` is neither a token id (0 or more), nor "repeat" nor "text"."""
    if fill not in ("repeat", "text") and not (isinstance(fill, int) and fill >= 0):
        raise ValueError(f"fill: got {fill!r}, takes a token id, 'repeat' or 'text'")


@dataclasses.dataclass(frozen=True)
class Jacobi(Iterated):
    """Jacobi decoding with a sliding window of `length` guesses (Santilli et al., 2023).

    Attributes:
        length: number of guesses.
        fill: the first guess for a position that enters the window.

    Raises:
        ValueError: a length below 1, or an invalid fill.
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
    """Jacobi decoding of blocks of `block` new tokens from left to right, each until it is complete, in at most `block`
    rounds (Santilli et al., 2023).

    Attributes:
        block: number of new tokens in a block.
        fill: the first guess for every position of a block; the paper uses PAD.
        until: number of new tokens that are drafted; the rest is decoded plainly. None: all are drafted.

    Raises:
        ValueError: a block below 2, an `until` below 1, or an invalid fill.
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
        """Largest number of guesses, `block - 1`, since the first token of a block is predicted by the newest token."""
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
    """Iterates a sliding window of the target's own guesses until they no longer change.

    It needs no other model, but saves little time unless the target was trained for it.

    Args:
        length: number of guesses in the window.
        fill: first guess for a position: a token id, "repeat" (the newest token) or "text" (a random token of the
            text).
        verify: the rule that accepts drafts.
    """
    return Speculative(Jacobi(length, fill), verify)


@ALGORITHMS.register("pj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def pj(size: Annotated[int, Range(2)] = 64, fill: Fill = "repeat", verify: Verifier = SeedExact()) -> Speculative:
    """Iterates guesses of the complete output at once (parallel Jacobi decoding).

    For short outputs of known length, such as translations.

    Args:
        size: largest number of new tokens; after them another block begins.
        fill: first guess for a position, see `jacobi`.
        verify: the rule that accepts drafts.
    """
    return Speculative(PGJ(size, fill), verify)


@ALGORITHMS.register("pgj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def pgj(block: Annotated[int, Range(2)] = 5, fill: Fill = "repeat", verify: Verifier = SeedExact()) -> Speculative:
    """Iterates guesses block by block (parallel Gauss-Seidel-Jacobi decoding).

    Choose a block so small that most of its forward passes complete a token.

    Args:
        block: number of new tokens in a block.
        fill: first guess for a position, see `jacobi`.
        verify: the rule that accepts drafts.
    """
    return Speculative(PGJ(block, fill), verify)


@ALGORITHMS.register("hgj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", family="parallel-jacobi", guarantee="seed-exact")
def hgj(block: Annotated[int, Range(2)] = 5, until: Count = 48, fill: Fill = "repeat",
        verify: Verifier = SeedExact()) -> Speculative:
    """Iterates guesses block by block up to a length, and decodes plainly after it (hybrid Gauss-Seidel-Jacobi
    decoding).

    `until` is an estimate of the output's length.

    Args:
        block: number of new tokens in a block.
        until: number of new tokens that are drafted.
        fill: first guess for a position, see `jacobi`.
        verify: the rule that accepts drafts.
    """
    return Speculative(PGJ(block, fill, until), verify)
