"""Recycled Attention: what a query notes that reads everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache.entry import AskedEntry, KVEntry
from decodax.caches.sparse.reading import gathered
from decodax.caches.sparse.recycled_attention import RecycledAttentionCache, RecycledAttentionConfig


@pytest.mark.wide
def test_a_query_that_reads_everything_notes_what_it_attends_to() -> None:
    """By the largest weight of a group's heads; the others read that and what has come since."""
    cache = RecycledAttentionConfig(budget=5, stride=4)([(2, 8)], 2, 64, jnp.float32)
    assert isinstance(cache, RecycledAttentionCache)
    keys, values = np.random.default_rng(0).standard_normal((2, 2, 40, 2, 8)).astype(np.float32)
    cache = cache.commit([KVEntry(jnp.asarray(keys), jnp.asarray(values))],
                         jnp.where(jnp.arange(40) < jnp.array([[40], [3]]), jnp.arange(40), -1))
    assert cache.max_commit().tolist() == [1, 1]
    q = np.random.default_rng(1).standard_normal((2, 1, 4, 8)).astype(np.float32)
    own = jnp.ones((2, 1, 2, 8))
    cache = cache.commit([AskedEntry(own, own, jnp.asarray(q))], cache.length[:, None])
    assert cache.max_commit().tolist() == [3, 3] and cache.since.tolist() == [40, 3]
    for g in range(2):
        weights = jax.nn.softmax(keys[0, :, g] @ q[0, 0, 2 * g:2 * g + 2].T, axis=0).max(1)
        assert cache.chosen[0][0, g].tolist() == np.argsort(-weights)[:5].tolist()
    assert sorted(cache.chosen[0][1, 0].tolist()) == [-1, -1, 0, 1, 2]      # a short text has no more
    some, at = gathered(cache.kv[0], cache.always(0))
    assert set(at[0, 0].tolist()) == {*cache.chosen[0][0, 0].tolist(), 40, -1}
    np.testing.assert_array_equal(some[0, 1, 0], np.concatenate([keys, values], -1)[0, int(at[0, 1, 0]), 1])
