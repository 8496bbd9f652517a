"""Functions for drafts from text: a history to search, n-gram matches in it, and prefix trees of the tokens after them.

The tables of the papers (n-gram counts, tries, automata) answer the question where certain tokens occurred before and
which tokens followed. A vectorised pass over the tokens gives the same answer without building a table, and costs
microseconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.drafter import Drafter
from decodax.algorithms.speculative.tree import Proposal
from decodax.common.options import TokenId
from decodax.core.state import State
from decodax.core.types import Params
from decodax.core.window import take

Corpus = tuple[tuple[TokenId, ...], ...]


@dataclasses.dataclass(frozen=True)
class FromText(Drafter):
    """Base class of drafts from text. By default it has no state. It searches a corpus before each row's own text.

    Attributes:
        corpus: documents of token ids. They are arguments of the compiled programs (`weights`).

    Raises:
        ValueError: an empty document, or a negative id.
    """

    corpus: Corpus = dataclasses.field(default=(), kw_only=True, metadata={"bare": ()})

    def __post_init__(self) -> None:
        for i, document in enumerate(self.corpus):
            if not document or min(document) < 0:
                raise ValueError(f"corpus: got document {i} of {len(document)} tokens, the least is "
                                 f"{min(document, default=None)}, takes one token or more, ids from 0 up")

    @property
    def weights(self) -> Any:
        """The documents of `corpus` concatenated, each followed by -1, `i32[C]`, an argument of the compiled programs;
        None without documents."""
        if not self.corpus:
            return None
        return np.concatenate([np.array([*document, -1], np.int32) for document in self.corpus])

    def history(self, params: Params, s: State) -> Array:
        """Returns the tokens in which drafts are looked up, `i32[B, C + N]`: the corpus, and after it each row's text
        so far. Each document is followed by -1, and so is the text, up to the end of the buffer."""
        own = known(s)
        corpus = self.weights if params.draft is None else params.draft
        if corpus is None:
            return own
        return jnp.concatenate([jnp.broadcast_to(corpus, (s.batch, corpus.shape[0])), own], 1)


def known(s: State) -> Array:
    """Returns each row's tokens so far, prompt included, `i32[B, N]`, with -1 after the last one."""
    return jnp.where(jnp.arange(s.tokens.shape[1]) < s.length[:, None], s.tokens, -1)


def tail(s: State, count: int) -> Array:
    """Returns the last `count` tokens of each row, `i32[B, count]`, oldest first, padded with -1 at the front."""
    index = s.length[:, None] - count + jnp.arange(count, dtype=jnp.int32)
    return jnp.where(index >= 0, take(s.tokens, jnp.maximum(index, 0)), -1)


def matched(history: Array, context: Array) -> Array:
    """Returns the length of the match at each place of a history: the number of last tokens of a context that equal the
    tokens up to this place.

    Args:
        history: `i32[..., H]`; -1 matches nothing.
        context: `i32[..., n]`, oldest token first.

    Returns:
        `i32[..., H]`, from 0 to n; 0 also where no token follows.

    >>> matched(jnp.array([5, 6, 7, 9, 6, 7, -1]), jnp.array([5, 6, 7])).tolist()
    [0, 0, 3, 0, 0, 0, 0]
    """
    H, n = history.shape[-1], context.shape[-1]
    place = jnp.arange(H, dtype=jnp.int32)
    equal = jnp.concatenate([history[..., 1:] >= 0, jnp.zeros((*history.shape[:-1], 1), bool)], -1)
    length = jnp.zeros(history.shape, jnp.int32)
    for d in range(min(n, H)):
        token = context[..., n - 1 - d, None]
        equal = equal & (jnp.roll(history, d, -1) == token) & (place >= d) & (token >= 0)
        length += equal
    return length


def best_places(length: Array, count: int) -> tuple[Array, Array]:
    """Returns the `count` places with the longest matches; of equally long ones the most recent comes first.

    Args:
        length: `i32[..., H]`, lengths of matches from `matched`.
        count: number of places.

    Returns:
        Places `i32[..., R]` and the lengths of their matches `i32[..., R]` (0: no match), where R is the smaller of
            `count` and H.
    """
    H = length.shape[-1]
    score = jnp.where(length > 0, length * H + jnp.arange(H, dtype=jnp.int32), -1)
    best, places = lax.top_k(score, min(count, H))
    return places.astype(jnp.int32), jnp.where(best >= 0, best // H, 0)


def following(history: Array, places: Array, count: int) -> Array:
    """Returns the `count` tokens that follow each of the indices `places` (`i32[B, R]`) in `history` (`i32[B, H]`):
    `i32[B, R, count]`, -1 from the first negative token (the end of a document) on."""
    index = places[..., None] + 1 + jnp.arange(count, dtype=jnp.int32)
    tokens = take(jnp.pad(history, ((0, 0), (0, count + 1)), constant_values=-1), index)
    return jnp.where(jnp.cumprod(tokens >= 0, -1) > 0, tokens, -1)


def shared(paths: Array) -> Array:
    """Compares each pair of a row's `R` paths (`paths`, `i32[B, R, D]`, padded with -1). Returns `bool[B, R, R, D]`:
    entry `[b, i, j, d]` is True if the first `d + 1` tokens of paths `i` and `j` are equal and none is padding."""
    alike = (paths[:, :, None] == paths[:, None]) & (paths[:, :, None] >= 0)
    return jnp.cumprod(alike, -1) > 0


def prefix_tree(paths: Array, weight: Array, nodes: int) -> Proposal:
    """Returns the prefixes of paths with the largest weights, as a tree of `nodes` drafts.

    The weight of a prefix is the sum over the paths that begin with it, so it is at least that of a longer prefix.
    Prefixes are ordered by weight, then the shorter first, then by the index of their path.

    Args:
        paths: `i32[B, R, D]`, padded with -1.
        weight: `i32[B, R]`; paths of weight 0 are left out.
        nodes: number of drafts.
    """
    alike = shared(paths) & (weight > 0)[:, None, :, None] & (weight > 0)[:, :, None, None]
    total = (alike * weight[:, :, None, None]).sum(1)
    return best_prefixes(paths, alike, jnp.where(total > 0, total, -1), nodes)


def best_prefixes(paths: Array, alike: Array, score: Array, nodes: int, most: Array | None = None) -> Proposal:
    """Returns the prefixes with the largest scores, as a tree of `nodes` drafts. Of equal scores the shorter prefix
    comes first, then that of the earlier path.

    Args:
        paths: `i32[B, R, D]`, padded with -1.
        alike: `bool[B, R, R, D]`, the result of `shared`, False for paths that are left out.
        score: `[B, R, D]`, score of the prefix of d + 1 tokens of each path: equal for equal prefixes, at least that of
            a longer prefix, and negative if there is none.
        nodes: number of drafts.
        most: `i32[B]`, largest number of drafts of each row; None: `nodes`.
    """
    R, D = paths.shape[1:]

    def row(alike: Array, tokens: Array, score: Array, most: Array) -> tuple[Array, Array, Array]:
        first = jnp.argmax(alike, 0)                                     # [R, D]: the path that stands for the prefix
        own = (first == jnp.arange(R)[:, None]) & (score >= 0) & alike.any(0)
        best, chosen = lax.top_k(jnp.where(own, score, -1).T.reshape(-1), min(nodes, R * D))
        node = jnp.zeros(R * D, jnp.int32).at[chosen].set(jnp.arange(1, chosen.shape[0] + 1, dtype=jnp.int32))
        path, depth = chosen % R, chosen // R
        above = node[(depth - 1) * R + first[path, jnp.maximum(depth - 1, 0)]]
        live = (best >= 0) & (jnp.arange(chosen.shape[0]) < most)
        fill = lambda x: jnp.pad(jnp.where(live, x, 0), (0, nodes - chosen.shape[0])).astype(jnp.int32)
        return fill(tokens.T.reshape(-1)[chosen]), fill(live) > 0, fill(jnp.where(depth > 0, above, 0))

    most = jnp.full(paths.shape[0], nodes) if most is None else most
    tokens, live, parents = jax.vmap(row)(alike, paths, score, most)
    return Proposal(tokens=tokens, live=live, parents=parents)
