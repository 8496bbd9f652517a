"""Models, data and helpers of `test_verification.py` that other tests use too."""

import functools

import jax

from tests.laws.cases import model

NETWORK, WEIGHTS = model("llama")
BLOCK, NEW, SIZE = 8, 16, 64
IDS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]


@functools.cache
def weights(seed):
    """Other models of the same shape: flat ones, sure ones, and whatever lies between."""
    keys = iter(jax.random.split(jax.random.key(seed), 64))
    return jax.tree.map(lambda x: x + (0.3 + 0.3 * seed) * x.std() * jax.random.normal(next(keys), x.shape), WEIGHTS)
