"""Models, data and helpers of `test_chains.py` that other tests use too."""

import jax.numpy as jnp

import decodax.algorithms.diffusion as d
from decodax.core import keys
from tests.algorithms.diffusion.toy import MASK


def view_of(rows, width, seed=0):
    """Views of all-open regions whose rows have keys of their own."""
    zero = jnp.zeros(rows, jnp.int32)
    full = lambda value, dtype: jnp.full((rows, width), value, dtype)
    key = keys.row_keys(jnp.full(rows, seed, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32), zero.astype(jnp.uint32))
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    return d.View(positions=positions, tokens=full(MASK, jnp.int32), open=full(True, bool), editable=full(True, bool),
                  active=full(True, bool), when=full(-1, jnp.int32), confidence=full(0, jnp.float32), start=zero,
                  end=zero + width, step=zero, round=zero, opened=zero + width, full=zero, kept=zero, refreshed=zero,
                  prompt_length=zero, min_new=zero, key=key, eos=jnp.zeros((rows, 0), jnp.int32))
