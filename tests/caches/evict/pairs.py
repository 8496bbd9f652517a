"""Models, data and helpers of `test_drafted.py` that other tests use too."""

import dataclasses

import jax

from decodax.io.load import LM
from tests.caches.evict.pressed import MODEL, weights

LARGE = LM(model=MODEL, params=weights(), vocab_size=320)
SMALLER = dataclasses.replace(LARGE, params=jax.tree.map(lambda x: 0.8 * x if x.ndim > 1 else x, weights()))
