"""Layers that share the directions of their keys and values."""

import jax.numpy as jnp
import numpy as np
import pytest

from decodax import caches
from decodax.caches.quantize.minicache import MiniCacheConfig, merged

AT = [[2, 13, 34], [9, 35, 37]]
LATER, EARLIER = [-2.11915, 0.45542, -0.75963, -1.70413], [1.6744, -0.81677, -1.12415, 0.14092]
SUMS = 653.18262, 535.06104
"""Of `compress_minicache_pair` and `restore_minicache_pair` of Zefan-Cai/KVCache-Factory at c97f9d7: the tokens that
stay, the first numbers of a later and of an earlier token, and the sums of all magnitudes of both layers."""


@pytest.mark.wide
def test_two_layers_share_the_directions_of_minicache() -> None:
    random = np.random.RandomState(3)
    earlier = random.standard_normal((2, 41, 8)).astype(np.float32)
    later = (earlier + 0.7 * random.standard_normal((2, 41, 8))).astype(np.float32)
    padded = [jnp.pad(jnp.asarray(x), ((0, 0), (0, 7), (0, 0)), constant_values=9) for x in (earlier, later)]
    own = merged(*padded, jnp.int32(41), 0.6, 5, 0.05)
    assert [sorted(row[row < 48].tolist()) for row in np.asarray(own.at)] == AT
    one, other = (np.asarray(own.restored(which))[:, :41] for which in (True, False))
    np.testing.assert_allclose(one[0, 5, :4], LATER, atol=1e-5)
    np.testing.assert_allclose(other[1, 30, :4], EARLIER, atol=1e-5)
    np.testing.assert_allclose([np.abs(one).sum(), np.abs(other).sum()], SUMS, rtol=1e-6)


def test_pairs_begin_in_the_middle_and_a_layer_may_be_left_over() -> None:
    cache = MiniCacheConfig().with_length(8)([(2, 4)] * 7, 1, 64, jnp.float32)
    assert (len(cache.prompt), len(cache.pairs), cache.kv[0].shape) == (3, 2, (1, 2, 8, 8))     # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^cache: minicache takes layers of one shape"):
        MiniCacheConfig(0)([(2, 4), (1, 4)], 1, 64, jnp.float32)
    with pytest.raises(ValueError, match=r"^interpolation: got 2"):
        caches.make("minicache", interpolation=2)
