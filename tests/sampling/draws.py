"""Models, data and helpers of `test_draw.py` that other tests use too."""

import jax
import jax.numpy as jnp
import numpy as np

from decodax.core.window import causal
from decodax.sampling import Policy, build
from tests.sampling.lifted import Decoding, out_of
from tests.sampling.oracle import row_keys

DRAWS, VOCAB = 20_000, 16


@jax.jit
def draw(policy: Policy, logits: jax.Array, key: jax.Array) -> jax.Array:
    """One token a row, as plain decoding draws it."""
    batch = logits.shape[0]
    tokens, length = jnp.zeros((batch, 4), jnp.int32), jnp.ones(batch, jnp.int32)
    s = Decoding(tokens, length, length, key, policy.init(tokens, length, length, key))
    return policy.over(s, causal(tokens[:, :1], length - 1), out_of(logits[:, None])).draw()[:, 0]


def frequencies(logits: np.ndarray, seed: int = 0, **settings) -> np.ndarray:
    policy = build(1, **settings).select(jnp.zeros(DRAWS, jnp.int32))
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    return np.bincount(np.asarray(draw(policy, many, row_keys(DRAWS, seed))), minlength=len(logits))


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Pearson's statistic over the bins that can occur."""
    kept = p > 0
    assert counts[~kept].sum() == 0
    return float(((counts[kept] - DRAWS * p[kept]) ** 2 / (DRAWS * p[kept])).sum())
