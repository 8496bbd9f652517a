"""An n-gram model with the exact counts of a corpus, looked up on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.struct import Struct, struct


@struct
class NGrams(Struct):
    """N-grams of a corpus as sorted tables, of the orders (numbers of tokens) 2 to `len(grams) + 1`.

    Attributes:
        grams: for each order `n` the n-grams that occur, in lexicographic order, `i32[M_n, n]`.
        counts: for each order the number of occurrences of each n-gram, `i32[M_n]`.
        contexts: for each order the contexts, the distinct first `n - 1` tokens of n-grams, `i32[C_n, n - 1]`.
        totals: for each order the number of tokens that follow each context, `i32[C_n]`.
    """

    grams: tuple[Array, ...]
    counts: tuple[Array, ...]
    contexts: tuple[Array, ...]
    totals: tuple[Array, ...]

    @classmethod
    def build(cls, texts: Sequence[Sequence[int]], most: int = 6) -> NGrams:
        """Counts the n-grams of texts, on the host.

        Args:
            texts: token ids; n-grams do not cross from one text to the next.
            most: largest order, 2 or more.

        Raises:
            ValueError: `most` below 2, or no text with two tokens.

        >>> table = NGrams.build([[1, 2, 1, 2, 3]], 3)
        >>> table.probability(jnp.array([[2, 1, 2]]), jnp.array([[1, 3, 0]]), jnp.ones(2) / 2).tolist()
        [[0.5, 0.5, 0.0]]
        """
        if most < 2:
            raise ValueError(f"most: got {most}, takes at least 2")
        ids = [np.asarray(text, np.int32) for text in texts]
        if not any(len(text) > 1 for text in ids):
            raise ValueError("texts: got none with two tokens, takes at least one")
        parts: list[tuple[Any, ...]] = []
        for n in range(2, most + 1):
            rows = [np.lib.stride_tricks.sliding_window_view(text, n) for text in ids if len(text) >= n]
            table = np.concatenate(rows) if rows else np.full((1, n), -1, np.int32)      # none so long
            grams, counts = np.unique(table, axis=0, return_counts=True)
            contexts, inverse = np.unique(grams[:, :-1], axis=0, return_inverse=True)
            totals = np.bincount(inverse.reshape(-1), weights=counts)
            parts.append((grams, counts, contexts, totals))
        put = lambda x: tuple(jnp.asarray(part, jnp.int32) for part in x)
        return cls(*(put(x) for x in zip(*parts, strict=True)))

    def probability(self, before: Array, tokens: Array, weights: Array) -> Array:
        """Returns the interpolated probability of tokens, `f32[R, c]`: the sum over orders of the weight times the
        token's share of all tokens that follow its context. An order whose context is not in the corpus adds 0.

        Args:
            before: `i32[R, n]`, the latest tokens of each text, -1 where it is shorter.
            tokens: `i32[R, c]`, the tokens.
            weights: `f32[O]`, weights of the orders from 2 on.
        """
        total = jnp.zeros(tokens.shape, jnp.float32)
        for i in range(min(len(self.grams), before.shape[1])):
            context = before[:, before.shape[1] - 1 - i:]
            at, seen = find(self.contexts[i], context)
            gram = jnp.concatenate([jnp.broadcast_to(context[:, None], (*tokens.shape, i + 1)), tokens[..., None]], -1)
            place, held = find(self.grams[i], gram)
            share = self.counts[i][place] / jnp.maximum(self.totals[i][at], 1)[:, None]
            total = total + jnp.where(held & seen[:, None] & (context >= 0).all(-1)[:, None], weights[i] * share, 0)
        return total


def find(table: Array, rows: Array) -> tuple[Array, Array]:
    """Looks up n-grams in a lexicographically sorted table. Returns the index of each n-gram of `rows` (`i32[..., n]`)
    in `table` (`i32[M, n]`), `i32[...]`, and whether it is in the table, `bool[...]`."""
    size = table.shape[0]
    width = table.shape[1]

    def below(entry: Array) -> Array:
        """Returns True for table entries that come before the rows in lexicographic order."""
        less = jnp.zeros(rows.shape[:-1], bool)
        for j in reversed(range(width)):
            less = (entry[..., j] < rows[..., j]) | ((entry[..., j] == rows[..., j]) & less)
        return less

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        right = below(table[jnp.minimum(middle, size - 1)]) & (low < high)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, jnp.where(low < high, middle, high))

    low = jnp.zeros(rows.shape[:-1], jnp.int32)
    low, _ = lax.fori_loop(0, max(size, 1).bit_length(), halve, (low, jnp.full_like(low, size)))
    at = jnp.minimum(low, size - 1)
    return at, (table[at] == rows).all(-1)
