"""Lookahead decoding: collects n-grams from parallel Jacobi trajectories, and drafts those that begin with the newest
token ("Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", Fu, Bailis, Stoica, Zhang, 2024).

One forward runs two branches after the newest token:

The lookahead branch is a window of `W` columns and `N - 1` levels, which are the last iterations of a Jacobi
trajectory, oldest first. The cell at level `l` and column `c` is `l + c` positions after the newest token, which itself
is cell (0, 0). A cell attends to the text, to the columns up to `c` of level 0, and to column `c` of the levels 1 to
`l`, including itself. So a column, read downwards, is one n-gram that continues the oldest trajectory. With `W = 4`, `N
= 4`, by distance from the newest token:

    level 0   newest 1 2 3 level 1        1 2 3 4        the 4 in level 1 sees newest, 1, 2, 3 of level 0 and itself
    level 2        2 3 4 5        the 5 in level 2 sees the same and that 4

The argmaxes of the last level are the next trajectory; together with the columns above them they are `W` new n-grams.
Then each level replaces the one before it.

The verification branch is a tree of up to `G` n-grams from a pool that begin with the newest token. N-grams with a
common prefix share nodes, so that a token is tested once, as in the paper's rule for sampling.

As in the authors' code by default, the window moves by one position however many drafts are accepted, and the pool
keeps `G` n-grams for each key and drops the least recently seen. One level is filled in each round; the cell that a
moving level leaves open gets a random token of the text, while the authors begin with a level that is wider by `N - 2`.
End tokens stay in the window. Drafts are deterministic, and every verifier keeps its guarantee.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.drafts.jacobi.jacobi import filling
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Probes, Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Range, check_options
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window
from decodax.sampling.draw import first_argmax


@struct
class Ahead(Struct):
    """State of `Lookahead`: the window and the pool of each row.

    Attributes:
        levels: `i32[B, N - 1, W]`, tokens of the window; cell (0, 0) is not used.
        filled: `i32[B]`, number of levels in use.
        pool: `i32[B, buckets, G, N]`, n-grams, the newest of a bucket last; -1 for none.
    """

    levels: Array
    filled: Array
    pool: Array


@dataclasses.dataclass(frozen=True)
class Lookahead(Draft):
    """Drafts n-grams from a pool, which is filled from a window of Jacobi iterations (Fu et al., 2024). A forward pass
    has `1 + G (N - 1) + W (N - 1) - 1` nodes.

    Attributes:
        window_size: `W`, number of columns of the window.
        ngram_size: `N`, number of tokens of an n-gram, its first token included; "level" in the authors' code.
        guess_set_size: `G`, number of n-grams that are verified in a round.
        buckets: number of sets of `G` n-grams in a row's pool; n-grams whose first tokens are equal modulo this number
            share a set.
        text: True: n-grams of the prompt and of the output enter the pool, too.

    Raises:
        ValueError: `window_size`, `guess_set_size` or `buckets` below 1, or `ngram_size` below 2.
    """

    window_size: Count = 7
    ngram_size: Annotated[int, Range(2)] = 5
    guess_set_size: Count = 7
    buckets: Count = 1024
    text: bool = True
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees", "probes"))

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    @property
    def length(self) -> int:
        return self.ngram_size - 1

    def init(self, params: Params, s: State) -> Ahead:
        B, N = s.batch, self.ngram_size
        pool = jnp.full((B, self.buckets, self.guess_set_size, N), -1, jnp.int32)
        if self.text:
            def enter(i: Array, pool: Array) -> Array:
                grams = lax.dynamic_slice_in_dim(s.tokens, i, N, 1)
                return insert(pool, grams[:, None], (i + N <= s.length)[:, None])

            pool = lax.fori_loop(0, jnp.max(s.length) - N + 1, enter, pool)
        first = filling("text", s, self.window_size)[:, None]
        return Ahead(levels=jnp.tile(first, (1, N - 1, 1)), filled=jnp.ones(B, jnp.int32), pool=pool)

    def propose(self, params: Params, policy: Any, s: State, state: Ahead, drawn: Drawn) -> tuple[Proposal, Ahead]:
        offset, sees = layout(self.window_size, self.ngram_size, self.guess_set_size * self.length)
        cells = state.levels.reshape(s.batch, -1)[:, 1:]
        probes = Probes(tokens=cells, offset=jnp.asarray(offset)[None], sees=jnp.asarray(sees)[None])
        tokens, live, parents = jax.vmap(guesses)(state.pool, s.newest)
        return Proposal(tokens=tokens, live=live, parents=parents, probes=probes if cells.shape[1] else None), state

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Ahead) -> Ahead:
        if decision is None:
            return state
        drafts = self.guess_set_size * self.length
        if window.width == drafts + self.window_size * self.length:     # other drafts propose windows of other widths
            state = self._advance(s, out, state, drafts)
        return state.replace(pool=self._read(s, decision, state.pool)) if self.text else state

    def _advance(self, s: State, out: Out, state: Ahead, drafts: int) -> Ahead:
        """Returns the state after one more iteration of the window, with its n-grams in the pool."""
        cell = (state.filled[:, None] - 1) * self.window_size + jnp.arange(self.window_size, dtype=jnp.int32)
        new = first_argmax(out.logits(jnp.where(cell > 0, drafts + cell, 0)))      # `[B, W]`, of the last level in use
        full = state.filled == self.length
        levels = state.levels.at[:, 0, 0].set(s.newest)
        grown = jnp.concatenate([levels, new[:, None]], 1)
        grams = grown.swapaxes(1, 2)
        pool = insert(state.pool, grams, jnp.broadcast_to(full[:, None], grams.shape[:2]))
        # one step on: level l + 1 becomes level l; while the window fills, levels move one column on and one joins them
        opened = filling("text", s, self.ngram_size, salt=1)[:, :, None]
        moved = jnp.concatenate([grown[:, :, 1:], opened], 2)
        joins = jnp.arange(self.length) == state.filled[:, None]
        moved = jnp.where(joins[:, :, None], moved[:, -1:], moved[:, :-1])
        return Ahead(levels=jnp.where(full[:, None, None], grown[:, 1:], moved), pool=pool,
                     filled=jnp.where(full, state.filled, state.filled + 1))

    def _read(self, s: State, decision: Decision, pool: Array) -> Array:
        """Returns the pool with the n-grams of the text that end with the round's tokens."""
        N, M = self.ngram_size, decision.tokens.shape[1]
        at = s.length[:, None] - N + 1 + jnp.arange(N - 1)
        text = jnp.concatenate([jnp.take_along_axis(s.tokens, jnp.maximum(at, 0), 1), decision.tokens], 1)
        grams = text[:, np.arange(M)[:, None] + np.arange(N)]
        ends = jnp.arange(M)
        valid = (ends < decision.count[:, None]) & (s.length[:, None] + ends >= N - 1) & (grams >= 0).all(-1)
        return insert(pool, grams, valid)


def layout(W: int, N: int, drafts: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and attention mask of the lookahead branch without cell (0, 0), the newest token. There are
    `drafts` drafts between the newest token and the branch.

    Returns:
        Distances from the newest token, `i32[P]`, and the mask `bool[P, 1 + drafts + P]`.

    >>> layout(2, 3)[0].tolist(), layout(2, 3)[1].astype(int).tolist()
    ([1, 1, 2], [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
    """
    level, column = (x.reshape(-1) for x in np.mgrid[:N - 1, :W])
    oldest = (level == 0) & (column <= column[:, None])
    same = (level > 0) & (level <= level[:, None]) & (column == column[:, None])
    sees = oldest | same
    between = np.zeros((len(level), drafts), bool)
    return (level + column)[1:].astype(np.int32), np.concatenate([sees[:, :1], between, sees[:, 1:]], 1)[1:]


def guesses(pool: Array, newest: Array) -> tuple[Array, Array, Array]:
    """Returns the n-grams in one row's pool (`i32[buckets, G, N]`) that begin with the token `newest` (`i32[]`), as a
    tree.

    Returns:
        Tokens, live and parents, each `[G (N - 1)]`, n-gram by n-gram, the newest first. A node that an n-gram shares
        with an earlier one is dead there; its children have the earlier node as parent.
    """
    bucket = pool[newest % pool.shape[0]][::-1]
    mine, tokens = bucket[:, 0] == newest, bucket[:, 1:]
    G, K = tokens.shape
    alike = (tokens[:, None] == tokens[None]) & (mine[:, None] & mine)[:, :, None]
    owner = jnp.argmax(jnp.cumprod(alike, 2), 1).astype(jnp.int32)         # `[G, K]`, the first with the same beginning
    depth = jnp.arange(K, dtype=jnp.int32)
    live = mine[:, None] & (owner == jnp.arange(G)[:, None])
    node = 1 + owner * K + depth
    parents = jnp.concatenate([jnp.zeros((G, 1), jnp.int32), node[:, :-1]], 1)
    return tokens.reshape(-1), live.reshape(-1), parents.reshape(-1)


def insert(pool: Array, grams: Array, valid: Array) -> Array:
    """Inserts `grams` (`i32[B, n, N]`) one after the other into their buckets, each as the newest. A full bucket drops
    its oldest n-gram; an n-gram that is already there becomes the newest. Those with `valid` False (`bool[B, n]`) are
    skipped."""
    def row(pool: Array, grams: Array, valid: Array) -> Array:
        ways = jnp.arange(pool.shape[1])

        def one(pool: Array, x: tuple[Array, Array]) -> tuple[Array, None]:
            gram, valid = x
            at = jnp.where(valid, gram[0] % pool.shape[0], 0)
            bucket = pool[at]
            out = jnp.argmax((bucket == gram).all(-1))      # itself, or else the oldest: that is entry 0
            moved = jnp.concatenate([bucket, gram[None]])[ways + (ways >= out)]
            return pool.at[at].set(jnp.where(valid, moved, bucket)), None

        return lax.scan(one, pool, (grams, valid))[0]

    return jax.vmap(row)(pool, grams, valid)


@ALGORITHMS.register("lookahead", "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
                     "Fu et al. 2024", family="parallel-jacobi", guarantee="seed-exact")
def lookahead(window_size: Count = 7, ngram_size: Annotated[int, Range(2)] = 5, guess_set_size: Count = 7,
              verify: Verifier = SeedExact()) -> Speculative:
    """Drafts n-grams that are collected from a window of Jacobi iterations.

    It needs no draft model. Its forward passes are wide, so it pays if a wide window costs little.

    Args:
        window_size: W, number of columns of the window.
        ngram_size: N, number of tokens of an n-gram, its first token included.
        guess_set_size: G, number of n-grams that are verified in a round.
        verify: the rule that accepts drafts.
    """
    return Speculative(Lookahead(window_size, ngram_size, guess_set_size), verify)
