"""Attention to keys that are values, too, and to the keys that an index chooses."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.pallas_kernels.window_attention import TopKeys, prefix_attention, window_attention
from tests.pallas_kernels.caches import LENGTHS, B, S

W, H, D = 4, 6, 72
MASK, POSITIONS = np.tril(np.ones((1, W, W), bool)), (LENGTHS[:, None] + np.arange(W)).astype(np.int32)


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, the keys of a window, and a cache of keys."""
    r = np.random.default_rng(3)
    shapes = (B, W, H, D), (B, W, 1, D), (B, 1, S, D)
    return tuple(r.normal(size=shape).astype(np.float32) for shape in shapes)      # type: ignore[return-value]


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_keys_without_values_are_the_values(implementation: Any) -> None:
    q, k, cache = drawn()
    both = np.concatenate([cache, cache], -1)
    want = window_attention(q, k, k, MASK, POSITIONS, both, LENGTHS, scale=0.2)
    got = window_attention(q, k, k[..., :0], MASK, POSITIONS, cache, LENGTHS, scale=0.2, implementation=implementation)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for one, other in zip(prefix_attention(q, POSITIONS, both, LENGTHS, scale=0.2),
                          prefix_attention(q, POSITIONS, cache, LENGTHS, scale=0.2, implementation=implementation),
                          strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_the_kernel_for_gpus_takes_keys_and_values() -> None:
    q, k, cache = drawn()
    with pytest.raises(ValueError, match="cache: got keys that are values, too, with triton"):
        window_attention(q, k, k[..., :0], MASK, POSITIONS, cache, LENGTHS, scale=0.2, implementation="triton")


@pytest.mark.parametrize("paged", [False, True])
def test_a_query_attends_to_the_keys_with_the_best_index_scores(paged: bool) -> None:
    q, k, cache = drawn()
    r = np.random.default_rng(4)
    own, weights, count = r.normal(size=(B, W, 5, D)), r.normal(size=(B, W, 5)), 9
    rows, table = cache, None
    if paged:
        page = 16
        rows = cache.reshape(B, 1, S // page, page, D).transpose(0, 2, 1, 3, 4).reshape(-1, 1, page, D)
        table = jnp.arange(B * S // page, dtype=jnp.int32).reshape(B, -1)
    got = window_attention(q, k, k[..., :0], MASK, POSITIONS, rows, LENGTHS, scale=0.2, table=table, bias=TopKeys(
        jnp.asarray(own, jnp.float32), jnp.asarray(weights, jnp.float32), count))
    for b in range(B):
        for w in range(W):
            keys = np.concatenate([cache[b, 0, :LENGTHS[b]], k[b, :w + 1, 0]]).astype(np.float64)
            index = np.maximum(own[b, w] @ keys.T, 0).T @ weights[b, w]
            best = keys[np.argsort(-index, kind="stable")[:count]]
            s = np.exp(q[b, w] @ best.T * 0.2)
            np.testing.assert_allclose(got[b, w], s / s.sum(-1, keepdims=True) @ best, atol=2e-5)
