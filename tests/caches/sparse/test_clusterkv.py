"""Caches whose queries read clusters of tokens."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches.sparse.clusterkv import ClusterKVCache, ClusterKVConfig, cluster_slots
from decodax.caches.sparse.clusters import clustered
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal
from tests.caches.small import PROMPTS, SMALL, TREE

N = 75


def given() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values `f32[N, 2, 8]`, and queries `f32[4, 8]`."""
    r = np.random.RandomState(0)
    keys = r.standard_normal((N, 2, 8)).astype(np.float32)
    waves = np.sin(np.arange(N)[:, None, None] * np.array([1.0, 2.0])[None, :, None] * 0.7 + np.arange(8))
    keys = (keys + 3 * waves).round(3).astype(np.float32)
    q = r.standard_normal((4, 8)).astype(np.float32).round(3)
    return keys, r.standard_normal((N, 2, 8)).astype(np.float32).round(3), q


@pytest.mark.wide
def test_clusters_and_what_is_read_of_them_are_the_authors() -> None:
    """The last cluster of a head is cut; and attention to these, the sinks and the token itself."""
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "retrieval.json").read_text())["clusterkv"]
    keys, values, q = given()
    made = clustered(jnp.asarray(keys.swapaxes(0, 1)), jnp.int32(4), jnp.int32(N),
                     4 + jnp.array([3, 40, 11, 60, 25, 52], jnp.int32), 5)
    labels = np.full((2, N - 4), -1)
    for g, c in np.ndindex(2, 6):
        first = int(made.starts[g, c])
        labels[g, np.asarray(made.order[g, first:first + int(made.sizes[g, c])]) - 4] = c
    assert labels.tolist() == wanted["labels"]
    at = cluster_slots(made, jnp.asarray(q).reshape(2, 2, 8), 20)
    assert at.reshape(4, 20).tolist() == wanted["chosen"]
    kind = ClusterKVConfig(24, cluster_size=11, sinks=4, every=30, skip=(), _new=10)
    cache = kind([KVLayer(2, 8, queries=4)], 1, 96, jnp.float32)
    assert isinstance(cache, ClusterKVCache) and cache.clusters[0] is not None
    cache = cache.prefill_cache().commit([KVEntry(jnp.asarray(keys)[None], jnp.asarray(values)[None])],
                                         jnp.arange(N)[None])
    cache = cache.finish_prefill(ReadPrompt(None, None, jnp.zeros((1, 0), jnp.int32)))
    pad = lambda old, new: old.at[0, :, :new.shape[1]].set(new)
    cache = cache.replace(clusters=(jax.tree.map(pad, cache.clusters[0], made),))
    own = -100 * jnp.asarray(q).reshape(1, 1, 2, 2, 8).sum(3)        # the token's own key is as good as not there
    out, _ = cache.attend(0, jnp.asarray(q)[None, None], own, own, causal(jnp.zeros((1, 1), jnp.int32), cache.length),
                          scale=8 ** -0.5)
    np.testing.assert_allclose(out[0, 0], wanted["out"], atol=1e-4)


@pytest.mark.wide
def test_new_tokens_are_clustered_when_there_are_enough() -> None:
    """Each token is a sink, in one cluster, or among the latest, in rows of different lengths; one has no clusters."""
    keys, values, _ = given()
    kind = ClusterKVConfig(24, cluster_size=5, sinks=3, every=4, new_clusters=2, skip=(), _new=12)
    cache = kind([KVLayer(2, 8, queries=4)], 3, 40, jnp.float32)
    rows = lambda x, n: jnp.broadcast_to(jnp.asarray(x)[None, n], (3, len(x[n]), 2, 8))
    lengths = jnp.array([20, 7, 2])[:, None]
    cache = cache.prefill_cache().commit([KVEntry(rows(keys, slice(20)), rows(values, slice(20)))],
                                      jnp.where(jnp.arange(20) < lengths, jnp.arange(20), -1))
    cache = cache.finish_prefill(ReadPrompt(None, None, jnp.zeros((3, 0), jnp.int32)))
    for step in range(9):
        assert isinstance(cache, ClusterKVCache) and cache.clusters[0] is not None
        assert cache.max_commit() is not None and cache.max_commit().tolist() == [4 - step % 4] * 3   # type: ignore[union-attr]
        for b, n in enumerate((20 + step, 7 + step, 2 + step)):
            sizes, order = cache.clusters[0].sizes[b], cache.clusters[0].order[b]
            for g in range(2):
                inside = [order[g, int(s):int(s) + int(c)].tolist()
                          for s, c in zip(cache.clusters[0].starts[b, g], sizes[g], strict=True)]
                others = [*range(int(cache.sinks[b])), *range(int(cache.done[b]), n)]
                assert sorted([*others, *(at for own in inside for at in own)]) == list(range(n))
                assert all(own == sorted(own) for own in inside)
        at = slice(30 + step, 31 + step)
        cache = cache.commit([KVEntry(rows(keys, at), rows(values, at))], cache.length[:, None])


@pytest.mark.wide
def test_drafts_may_be_trees() -> None:
    assert dx.generate(SMALL, PROMPTS, cache="clusterkv:budget=20,skip=()", algorithm=TREE,
                       max_new_tokens=4).lengths.tolist() == [4, 4, 4]
