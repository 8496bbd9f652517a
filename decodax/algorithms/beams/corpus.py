"""Suffix array of the tokens of a corpus, to look up the tokens that follow a text in the corpus, their number and
positions."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.struct import Struct, struct

NARROW = 64
"""Largest number of rows of a span whose next tokens are looked up row by row. After a long text a span has one or a
few rows."""


@struct
class CorpusSpan(Struct):
    """A range of rows of a suffix array: the suffixes that begin with a certain text.

    Attributes:
        low: `i32[...]`, first row.
        high: `i32[...]`, row after the last one.
        depth: `i32[...]`, number of tokens of the text.
    """

    low: Array
    high: Array
    depth: Array


@struct
class Corpus(Struct):
    """Documents with a suffix array: all their suffixes in lexicographic order.

    Attributes:
        tokens: `i32[n]`, the documents one after the other, -1 after each.
        suffixes: `i32[n]`, first positions of the suffixes in `tokens`, in lexicographic order.
        starts: `i32[D + 1]`, first positions of the documents, then `n`.
    """

    tokens: Array
    suffixes: Array
    starts: Array

    @classmethod
    def build(cls, documents: Sequence[Sequence[int]]) -> Corpus:
        """Builds the suffix array on the host, by prefix doubling.

        Args:
            documents: token ids of each document. With an end-of-text token as the last one, a search can end at the
                end of the document.

        Raises:
            ValueError: no documents, an empty one, or a negative id.

        >>> corpus = Corpus.build([[5, 1, 2], [1, 2, 7]])
        >>> corpus.count([1, 2]), corpus.count([2, 1]), corpus.positions([1, 2]).tolist()
        (2, 0, [1, 4])
        """
        ids = [np.asarray(document, np.int64).reshape(-1) for document in documents]
        wrong = [f"document {i}: {d.tolist()[:8]}" for i, d in enumerate(ids) if not len(d) or d.min() < 0]
        if not ids or wrong:
            raise ValueError(f"documents: got {(wrong or ['none'])[0]}; takes some, each a list of token ids")
        starts = np.cumsum([0, *(len(d) + 1 for d in ids)])
        if starts[-1] >= 2**31:
            raise ValueError(f"documents: got {starts[-1]} tokens with their ends, takes fewer than 2 ** 31")
        tokens = np.concatenate([part for d in ids for part in (d, [-1])])
        put = lambda x: jnp.asarray(x, jnp.int32)
        return cls(put(tokens), put(sorted_suffixes(tokens)), put(starts))

    @property
    def documents(self) -> int:
        return self.starts.shape[0] - 1

    # on the device

    def whole(self, shape: tuple[int, ...], prefix: Sequence[int] = ()) -> CorpusSpan:
        """Returns spans of the given shape, each with the rows of all suffixes that begin with the tokens `prefix`; all
        rows if it is empty."""
        fill = lambda x: jnp.full(shape, x, jnp.int32)
        span = CorpusSpan(fill(0), fill(self.suffixes.shape[0]), fill(0))
        for token in prefix:
            span = self.extend(span, fill(token))
        return span

    def extend(self, span: CorpusSpan, token: Array) -> CorpusSpan:
        """Returns the spans of suffixes that begin with the text of `span` and then `token` (`i32[...]`, one for each
        span). A span is empty if the token never follows its text in the corpus."""
        return CorpusSpan(self.bound(span, token), self.bound(span, token + 1), span.depth + 1)

    def follows(self, row: Array, depth: Array) -> Array:
        """Returns token `depth` (`i32[...]`, counted from 0) of the suffix in row `row` (`i32[...]`) of the suffix
        array: `i32[...]`, -1 where the document ends there."""
        last = self.tokens.shape[0] - 1
        return self.tokens[jnp.minimum(self.suffixes[jnp.minimum(row, last)] + depth, last)]

    def bound(self, span: CorpusSpan, token: Array) -> Array:
        """Returns the first row of each span whose token after the span's text is at least `token` (`i32[...]`), or the
        row after the span if there is none: `i32[...]`, by binary search."""
        shape = jnp.broadcast_shapes(span.low.shape, token.shape)
        wide = lambda x: jnp.broadcast_to(x, shape)

        def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            less = (self.follows(middle, span.depth) < token) & (low < high)
            return jnp.where(less, middle + 1, low), jnp.where(less, high, middle)

        rounds = self.tokens.shape[0].bit_length()
        return lax.fori_loop(0, rounds, halve, (wide(span.low), wide(span.high)))[0]

    def occurs(self, span: CorpusSpan, token: Array) -> Array:
        """Returns whether each of the tokens `token` (`i32[..., m]`) follows the text of its span (`[...]`) somewhere
        in the corpus: `bool[..., m]`."""
        span = CorpusSpan(span.low[..., None], span.high[..., None], span.depth[..., None])
        row = self.bound(span, token)
        return (row < span.high) & (self.follows(row, span.depth) == token)

    def allowed(self, span: CorpusSpan, order: Array, need: int, look: int) -> Array:
        """Returns tokens that follow the text of each span somewhere in the corpus, `bool[..., V]`: at least the best
        `need` of them; all if there are fewer.

        First the best `look` tokens of each span are looked up, and narrow spans are listed row by row. If this is not
        enough for some text, all tokens are looked up.

        Args:
            span: the spans, `[...]`.
            order: `f32[..., V]`, values by which tokens are ranked; -inf excludes a token.
            need: number of tokens that are needed.
            look: number of tokens that are looked up first.

        Returns:
            True for the tokens that were found; False for others, even if they follow the text.
        """
        V = order.shape[-1]
        look = min(look, V)
        out = order == -jnp.inf
        none = jnp.zeros(order.shape, bool)
        if look == V:
            return self.occurs(span, jnp.arange(V, dtype=jnp.int32)) & ~out
        row = span.low[..., None] + jnp.arange(NARROW, dtype=jnp.int32)
        token = self.follows(row, span.depth[..., None])
        token = jnp.where((row < span.high[..., None]) & (token >= 0), token, V)
        few = jnp.put_along_axis(none, token, True, -1, inplace=False, mode="drop")
        narrow = span.high - span.low <= NARROW
        best, token = lax.top_k(order, look)
        there = self.occurs(span, token.astype(jnp.int32)) & (best > -jnp.inf)
        some = jnp.put_along_axis(none, token, there, -1, inplace=False, mode="drop")
        enough = narrow | (there.sum(-1) >= need) | (best[..., -1] == -jnp.inf)
        found = lax.cond(enough.all(), lambda: jnp.where(narrow[..., None], few, some),
                         lambda: self.occurs(span, jnp.arange(V, dtype=jnp.int32)))
        return found & ~out

    # on the host

    def positions(self, text: Sequence[int]) -> np.ndarray:
        """Returns the indices in `Corpus.tokens`, the concatenated documents, at which the token sequence `text`
        begins, in ascending order."""
        return Finder(self).positions(tuple(text))

    def count(self, text: Sequence[int]) -> int:
        """Returns the number of occurrences of a text in the documents."""
        return Finder(self).count(tuple(text))

    def document(self, index: int) -> list[int]:
        """Returns the token ids of document number `index` (from 0), without the end mark."""
        return Finder(self).document(index)


class Finder:
    """The arrays of a `Corpus` copied to host memory (NumPy), for several look-ups of texts."""

    def __init__(self, corpus: Corpus):
        self.tokens, self.suffixes, self.starts = map(np.asarray, (corpus.tokens, corpus.suffixes, corpus.starts))

    def rows(self, text: tuple[int, ...]) -> tuple[int, int]:
        """Returns the range of rows of the suffix array whose suffixes begin with the tokens `text`: the first row, and
        the row after the last one."""
        low, high = 0, len(self.suffixes)
        for depth, token in enumerate(text):
            key = lambda row, depth=depth: self.tokens[self.suffixes[row] + depth]
            low, high = (bisect.bisect_left(range(high), token + more, low, high, key=key) for more in (0, 1))
        return low, high

    def count(self, text: tuple[int, ...]) -> int:
        low, high = self.rows(text)
        return high - low

    def positions(self, text: tuple[int, ...]) -> np.ndarray:
        low, high = self.rows(text)
        return np.sort(self.suffixes[low:high])

    def document(self, index: int) -> list[int]:
        return self.tokens[self.starts[index]:self.starts[index + 1] - 1].tolist()

    def document_of(self, position: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, position, "right") - 1


def sorted_suffixes(tokens: np.ndarray) -> np.ndarray:
    """Returns the suffix array of `tokens` (`[n]`): the start positions of all suffixes in lexicographic order,
    `i64[n]`. By prefix doubling: each round doubles the number of tokens by which they are ordered."""
    n = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    width = 1
    while True:
        following = np.zeros(n, np.int64)
        following[:max(n - width, 0)] = rank[width:]
        pair = rank * (n + 1) + following
        order = np.argsort(pair, kind="stable")
        rank = np.empty(n, np.int64)
        rank[order] = np.cumsum(np.concatenate([[1], pair[order][1:] != pair[order][:-1]]))
        if rank[order[-1]] == n:
            return order
        width *= 2
