"""A sketch of attention in place of older tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches.bounded.subgen import Sketch, SubGenCache, SubGenConfig, estimated, sketched
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal

N, RNG = 40, np.random.default_rng(0)
KEYS = RNG.standard_normal((2, N, 4)).astype(np.float32) / 2 + RNG.standard_normal((2, 3, 4)).astype(np.float32)[
    :, np.arange(N) % 3]
VALUES = RNG.standard_normal((2, N, 5)).astype(np.float32)
Q = RNG.standard_normal((2, 2, 4)).astype(np.float32)


def empty(clusters: int = 8, keys: int = 2, values: int = 6) -> Sketch:
    return Sketch(centres=jnp.zeros((2, clusters, 4)), counts=jnp.zeros((2, clusters), jnp.int32),
                  keys=jnp.zeros((2, clusters, keys, 4)), tokens=jnp.zeros((2, values, 9)), mass=jnp.zeros(2))


def test_both_sums_are_right_in_the_mean() -> None:
    """Over 4000 seeds, within 5 standard errors: 24 numbers, false alarms below 1 in 50,000."""
    kv = jnp.concatenate([jnp.asarray(KEYS), jnp.asarray(VALUES)], -1)

    @jax.jit
    def run(seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = sketched(empty(), kv, jnp.int32(0), jnp.int32(N), jax.random.key(seed), 1.5)
            values, total, top = estimated(found, jnp.asarray(Q), 4)
            return values * jnp.exp(top)[..., None], total * jnp.exp(top)

        return jax.vmap(one)(seeds)

    values, total = (np.asarray(x, np.float64) for x in run(jnp.arange(4000)))
    weights = np.exp(np.einsum("grd,gnd->grn", Q, KEYS).astype(np.float64))
    for found, wanted in ((values, np.einsum("grn,gne->gre", weights, VALUES)), (total, weights.sum(-1))):
        error = found.std(0) / len(found) ** 0.5
        assert (error > 0).all() and (np.abs(found.mean(0) - wanted) < 5 * error).all()


def test_clusters_are_as_wide_as_they_may_be() -> None:
    """A key within the radius of a first key joins its cluster; where there is no more room, the nearest one's."""
    kv = jnp.concatenate([jnp.asarray(KEYS), jnp.asarray(VALUES)], -1)
    for clusters in (40, 3):
        found = sketched(empty(clusters), kv, jnp.int32(0), jnp.int32(N - 5), jax.random.key(0), 1.0)
        for g in range(2):
            firsts: list[int] = []
            counts: list[int] = []
            for i in range(N - 5):
                far = [float(np.linalg.norm(KEYS[g, i] - KEYS[g, j])) for j in firsts]
                if far and (min(far) <= 1.0 or len(firsts) == clusters):
                    counts[int(np.argmin(far))] += 1
                else:
                    firsts.append(i)
                    counts.append(1)
            assert found.counts[g, :len(counts)].tolist() == counts and int(found.counts[g].sum()) == N - 5
            np.testing.assert_array_equal(found.centres[g, :len(firsts)], KEYS[g, firsts])
        np.testing.assert_allclose(found.mass, np.square(VALUES[:, :N - 5]).sum((1, 2)), rtol=1e-5)


@pytest.mark.wide
def test_a_prompt_and_tokens_one_by_one_come_to_the_same() -> None:
    kind = SubGenConfig(1.0, 8, 2, 6, recent=5, every=3)
    shape = KVLayer(2, 4, 5, queries=4)
    entry = [KVEntry(jnp.asarray(KEYS).swapaxes(0, 1)[None], jnp.asarray(VALUES).swapaxes(0, 1)[None])]
    whole = kind([shape], 1, 64, jnp.float32).prefill_cache().commit(entry, jnp.arange(N)[None]).finish_prefill(
        ReadPrompt(None, None, jnp.zeros((1, 0), jnp.int32)))
    slow = kind([shape], 1, 64, jnp.float32)
    for i in range(N):
        slow = slow.commit([jax.tree.map(lambda x, i=i: x[:, i:i + 1], entry[0])], jnp.array([[i]]))
    assert isinstance(whole, SubGenCache) and isinstance(slow, SubGenCache)
    assert whole.done.tolist() == slow.done.tolist() == [33]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole.sketches, slow.sketches)
    q, own = jnp.asarray(Q).reshape(1, 1, 4, 4), jnp.ones((1, 1, 2, 5))
    one, other = (cache.attend(0, q, own[..., :4], own, causal(jnp.zeros((1, 1), jnp.int32), cache.length), scale=1)[0]
                  for cache in (whole, slow))
    np.testing.assert_allclose(one, other, atol=1e-5)
