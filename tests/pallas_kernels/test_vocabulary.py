"""The largest of a vocabulary."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from decodax.pallas_kernels.vocabulary import top_k
from decodax.pallas_kernels.vocabulary.selection import by_blocks


@pytest.mark.parametrize("size", [5000, 128 * 40])
@pytest.mark.parametrize("k", [1, 8])
def test_blocks_give_the_largest_and_of_equal_entries_the_first(size: int, k: int) -> None:
    r = np.random.default_rng(size + k)
    x = r.integers(0, 60, (4, 3, size)).astype(np.float32)         # many ties
    x[1] = -np.inf
    x[2, 1, size - 1] = np.inf
    x[3, 2] = r.normal(size=size)
    for got, want in zip(by_blocks(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.mesh
def test_a_divided_vocabulary_gives_what_a_whole_one_does() -> None:
    x = np.random.default_rng(0).integers(0, 40, (4, 2, 4096)).astype(np.float32)
    want = jax.lax.top_k(x, 8)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        got = jax.jit(lambda x: top_k(x, 8))(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
