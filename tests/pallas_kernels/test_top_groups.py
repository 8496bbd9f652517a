"""Attention to the groups of tokens that an index chooses by their pooled keys, against a loop over queries in float64.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.pallas_kernels.window_attention import TopGroups, TopKeys, window_attention
from tests.matrix import often
from tests.pallas_kernels.caches import LENGTHS, B, S
from tests.pallas_kernels.test_top_blocks import CHAIN, DEPTHS, TREE

W, H, D, N, WIDTH, FIRST = 5, 6, 40, 3, 12, 20
"""Numbers of queries, heads, channels of a key, index queries and channels of an index key, which begins at channel
`FIRST` of a key. The channels after it belong to another index."""


def drawn() -> list[np.ndarray]:
    """Queries, keys of a window and of a cache, index queries and their weights."""
    r = np.random.default_rng(3)
    return [r.normal(size=shape).astype(np.float32) for shape in (
        (B, W, H, D), (B, W, 1, D), (B, 1, S, D), (B, W, N, WIDTH), (B, W, N))]


def looped(q: Any, k: Any, mask: Any, positions: Any, cache: Any, length: Any, own: Any, weights: Any, count: int,
           every: int, hidden: Any = None) -> np.ndarray:
    """The same, for one node at a time."""
    out = np.zeros((B, W, H, D))
    for b in range(B):
        for w in range(W):
            far = np.arange(length[b])
            far = far if hidden is None else far[~hidden[b, far]]
            where = np.concatenate([far, positions[b][mask[w]]])
            keys = np.concatenate([cache[b, 0, far], k[b, mask[w], 0]]).astype(np.float64)
            index = weights[b, w] @ np.maximum(own[b, w] @ keys[:, FIRST:FIRST + WIDTH].T, 0)
            best = {at // every: score for at, score in zip(where, index, strict=True) if (at + 1) % every == 0}
            chosen = sorted(best, key=lambda group: -best[group])[:count]
            kept = np.isin(where // every, [*chosen, (positions[b, w] + 1) // every])
            shares = np.exp(keys[kept] @ q[b, w].T * 0.1)
            out[b, w] = (shares / shares.sum(0)).T @ keys[kept]
    return out


@pytest.mark.parametrize(("every", "count", "paged", "tree"), often(
    [(3, 2, True, True), (16, 4, False, False)],
    [(*rule, paged, tree) for rule in ((3, 2), (16, 4), (128, 1), (1, 9), (700, 1))
     for paged in (False, True) for tree in (False, True)]))
def test_a_query_attends_to_the_best_groups_and_to_the_one_that_is_not_whole(
        every: int, count: int, paged: bool, tree: bool) -> None:
    q, k, cache, own, weights = drawn()
    mask, positions = (TREE, DEPTHS) if tree else (CHAIN, np.arange(W))
    # The first row is empty, and the others end within a group or at its end.
    length = np.minimum(LENGTHS, S - S % 3)
    positions = (length[:, None] + positions).astype(np.int32)
    rows, table = cache, None
    if paged:
        page = 32
        rows = cache.reshape(B, 1, S // page, page, -1).transpose(0, 2, 1, 3, 4).reshape(-1, 1, page, D)
        table = jnp.arange(B * S // page, dtype=jnp.int32).reshape(B, -1)
    choice = TopGroups(TopKeys(jnp.asarray(own), jnp.asarray(weights), count), FIRST, every)
    got = window_attention(q, k, k[..., :0], mask[None], positions, rows, length, scale=0.1, table=table, bias=choice)
    np.testing.assert_allclose(got, looped(q, k, mask, positions, cache, length, own, weights, count, every),
                               atol=2e-5)


def test_a_group_whose_last_token_is_hidden_is_not_chosen() -> None:
    q, k, cache, own, weights = drawn()
    hidden = np.random.default_rng(4).random((B, S)) < 0.5
    positions = (LENGTHS[:, None] + np.arange(W)).astype(np.int32)
    choice = TopGroups(TopKeys(jnp.asarray(own), jnp.asarray(weights), 4), FIRST, 8)
    got = window_attention(q, k, k[..., :0], CHAIN[None], positions, cache, LENGTHS, scale=0.1,
                           cached=jnp.asarray(~hidden), bias=choice)
    np.testing.assert_allclose(
        got, looped(q, k, CHAIN, positions, cache, LENGTHS, own, weights, 4, 8, hidden), atol=2e-5)
