"""Adapters on a mesh. It imports no torch, beside which collectives on CPU crash."""

import jax
import numpy as np
import pytest

import decodax as dx
from tests.meshes import mesh_of

pytestmark = pytest.mark.mesh


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_with_adapters_are_the_same(kind):
    mesh = mesh_of(kind, data=4, model=2)
    alone, parted = dx.load("sums"), dx.load("sums", mesh=mesh)
    some = {}
    for i, name in enumerate(("one", "two")):
        made = dx.adapters.init(alone.params, jax.random.key(i), 4, dx.adapters.PARTS)
        noise = iter(jax.random.split(jax.random.key(10 + i), 1000))
        some[name] = jax.tree.map(lambda x, noise=noise: x + 0.05 * jax.random.normal(next(noise), x.shape), made)
    asked, named = ["34+51-07=\n", "12*13=\n", "99-98=\n", "11+11=\n"], ["one", None, "two", "one"]
    want, got = (dx.generate(lm.with_adapters(some), asked, adapter=named, max_new_tokens=12).tokens
                 for lm in (alone, parted))
    np.testing.assert_array_equal(got, want)
    assert (dx.generate(alone, asked, max_new_tokens=12).tokens != want).any()
    want, got = (dx.generate(lm.with_adapter(some["one"]), asked, max_new_tokens=12).tokens for lm in (alone, parted))
    np.testing.assert_array_equal(got, want)
    merged = parted.with_adapter(some["one"]).params
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(parted.params), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
