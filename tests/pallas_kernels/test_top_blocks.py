"""Attention to the blocks of positions that index heads choose, against a loop over queries in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.pallas_kernels.window_attention import TopBlocks, quantized, window_attention
from decodax.pallas_kernels.window_attention.reference import block_maxima
from tests.matrix import often
from tests.pallas_kernels.caches import LENGTHS, B, G, S

W, H, D, E = 5, 8, 24, 16
FIRST = 14
"""First entry of a key that is its index key."""
CHAIN = np.tril(np.ones((W, W), bool))
TREE = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], bool)
DEPTHS = np.array([0, 1, 1, 2, 2])


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    r = np.random.default_rng(3)
    return [r.normal(size=shape).astype(np.float32) for shape in shapes]


def shared(k: np.ndarray) -> np.ndarray:
    """Keys, and what follows them, whose index keys are the same in all heads."""
    k, heads = k.copy(), 2 if k.shape[2] == G else 1
    k[..., FIRST:D] = k.take([0], heads)[..., FIRST:D]
    return k


def looped(q: Any, k: Any, v: Any, mask: Any, positions: Any, cache: Any, length: Any, choice: TopBlocks,
           hidden: Any = None) -> np.ndarray:
    """The same, for one query head of one node at a time."""
    own = np.asarray(choice.queries)
    out = np.zeros((B, W, H, E))
    for b in range(B):
        for w in range(W):
            for h in range(H):
                g, n = h // (H // G), h // (H // own.shape[2])
                far = np.arange(length[b])
                far = far if hidden is None else far[~hidden[b, far]]
                where = np.concatenate([far, positions[b][mask[w]]])
                keys = np.concatenate([cache[b, g, far, :D], k[b, mask[w], g]]).astype(np.float64)
                values = np.concatenate([cache[b, g, far, D:], v[b, mask[w], g]]).astype(np.float64)
                scores, blocks = keys[:, FIRST:] @ own[b, w, n], where // choice.size
                best = {block: scores[blocks == block].max() for block in set(blocks.tolist())}
                here = positions[b, w] // choice.size
                best |= {block: np.inf for block in best if 0 <= here - block < choice.local}
                chosen = sorted(best, key=lambda block: -best[block])[:choice.count]
                kept = np.isin(blocks, chosen)
                weights = np.exp(keys[kept, :FIRST] @ q[b, w, h] * 0.2)
                out[b, w, h] = weights / weights.sum() @ values[kept]
    return out


@pytest.mark.parametrize(("size", "count", "local", "heads", "paged", "tree"), often(
    [(4, 3, 1, 2, True, True), (128, 2, 1, 4, False, False)],
    [(*rule, paged, tree) for rule in ((4, 3, 1, 2), (128, 2, 1, 4), (40, 3, 2, 2), (96, 2, 0, 8), (700, 1, 1, 2),
                                       (1, 9, 3, 4)) for paged in (False, True) for tree in (False, True)]))
def test_a_query_head_attends_to_the_best_blocks_of_its_index_head(
        size: int, count: int, local: int, heads: int, paged: bool, tree: bool) -> None:
    q, k, v, cache, own = drawn((B, W, H, FIRST), (B, W, G, D), (B, W, G, E), (B, G, S, D + E),
                                (B, W, heads, D - FIRST))
    k, cache = shared(k), shared(cache)
    mask, positions = (TREE, DEPTHS) if tree else (CHAIN, np.arange(W))
    positions = (LENGTHS[:, None] + positions).astype(np.int32)
    rows, table = cache, None
    if paged:
        page = 32
        rows = cache.reshape(B, G, S // page, page, -1).transpose(0, 2, 1, 3, 4).reshape(-1, G, page, D + E)
        table = jnp.arange(B * S // page, dtype=jnp.int32).reshape(B, -1)
    choice = TopBlocks(jnp.asarray(own), FIRST, count, size, local)
    got = window_attention(q, k, v, mask[None], positions, rows, LENGTHS, scale=0.2, table=table, bias=choice)
    np.testing.assert_allclose(got, looped(q, k, v, mask, positions, cache, LENGTHS, choice), atol=2e-5)


def test_slots_that_a_window_does_not_see_give_no_block() -> None:
    q, k, v, cache, own = drawn((B, W, H, FIRST), (B, W, G, D), (B, W, G, E), (B, G, S, D + E), (B, W, G, D - FIRST))
    k, cache = shared(k), shared(cache)
    hidden = np.random.default_rng(4).random((B, S)) < 0.7
    hidden[:, 64:] |= np.arange(64, S) // 32 % 2 == 0           # whole blocks, too
    positions = (LENGTHS[:, None] + np.arange(W)).astype(np.int32)
    choice = TopBlocks(jnp.asarray(own), FIRST, 3, 32, 2)
    got = window_attention(q, k, v, CHAIN[None], positions, cache, LENGTHS, scale=0.2, cached=jnp.asarray(~hidden),
                           bias=choice)
    np.testing.assert_allclose(got, looped(q, k, v, CHAIN, positions, cache, LENGTHS, choice, hidden), atol=2e-5)


def test_positions_of_a_text_without_a_cache_may_be_any() -> None:
    """Positions may begin anywhere and have gaps, and those of nodes that no query sees may be negative."""
    q, k, v, own = drawn((B, W, H, FIRST), (B, W, G, D), (B, W, G, E), (B, W, G, D - FIRST))
    k = shared(k)
    positions = np.array([[7, 8, 9, 10, 11], [1000, 1004, 90_000, 90_001, 90_009], [-3, -2, 0, 1, 2]], np.int32)
    mask = np.broadcast_to(CHAIN, (B, W, W)).copy()
    mask[2, :, :2] = np.eye(W, dtype=bool)[:, :2]
    choice = TopBlocks(jnp.asarray(own), FIRST, 2, 4, 1)
    got = window_attention(q, k, v, mask, positions, scale=0.2, bias=choice)
    for b in range(B):
        want = looped(q, k, v, mask[b], positions, np.zeros((B, G, 0, D + E)), np.zeros(B, int), choice)
        np.testing.assert_allclose(got[b, 2 * (b == 2):], want[b, 2 * (b == 2):], atol=2e-5)


@pytest.mark.parametrize("size", often([24, 128], [1, 24, 128, 200, 1024]))
def test_the_best_products_of_blocks(size: int) -> None:
    q, cache = drawn((B, G, 3, D - FIRST), (B, G, S, D + E))
    products = np.where((np.arange(S) < LENGTHS[:, None])[:, None, None],
                        np.einsum("bgqd,bgsd->bgqs", q, cache[..., FIRST:D]), -np.inf)
    want = np.stack([products[..., i:i + size].max(-1) for i in range(0, S, size)], -1)
    found = jax.jit(block_maxima, static_argnames=("size", "first"))(
        q, cache, LENGTHS, None, None, None, size=size, first=FIRST)
    np.testing.assert_allclose(found, want, atol=1e-5)
    codes, scales = quantized(jnp.asarray(cache), D)
    rounded = block_maxima(jnp.asarray(q), codes, jnp.asarray(LENGTHS), None, scales, None, size=size,
                           first=FIRST)
    np.testing.assert_allclose(rounded, want, atol=0.2)


def test_caches_whose_slots_are_not_positions_are_refused() -> None:
    q, k, v, cache, own = drawn((B, W, H, FIRST), (B, W, G, D), (B, W, G, E), (B, G, S, D + E), (B, W, G, D - FIRST))
    with pytest.raises(ValueError, match="bias: got a choice of keys with slot_positions, takes a cache in which"):
        window_attention(q, k, v, CHAIN[None], np.zeros((B, W), np.int32), cache, scale=0.2, slot_positions=jnp.zeros(
            (B, 1, S), jnp.int32), bias=TopBlocks(jnp.asarray(own), FIRST, 2, 4, 1))
