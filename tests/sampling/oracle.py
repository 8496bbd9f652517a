"""What the tests of transforms share: rows with histories, and a transform applied to each of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.core import keys
from decodax.sampling import Context, Transform

BATCH = 3


def random_logits(seed: int, vocab: int, batch: int = BATCH, spread: float = 3.0) -> np.ndarray:
    """`f32[batch, vocab]`."""
    return (np.random.default_rng(seed).normal(size=(batch, vocab)) * spread).astype(np.float32)


def random_histories(seed: int, vocab: int, length: int = 24, batch: int = BATCH) -> np.ndarray:
    """`i64[batch, length]` texts in which few tokens come again and again."""
    rng = np.random.default_rng(seed + 1000)
    pools = rng.integers(0, vocab, (batch, 5))
    return np.take_along_axis(pools, rng.integers(0, 5, (batch, length)), 1)


def row_keys(batch: int, seed: int = 0) -> jax.Array:
    return keys.row_keys(jnp.full(batch, seed, jnp.uint32), jnp.arange(batch, dtype=jnp.uint32),
                         jnp.zeros(batch, jnp.uint32))


def contexts(histories: Sequence[Sequence[int]] | np.ndarray, prompts: Any, spare: int = 5, seed: int = 0) -> Context:
    """Contexts of rows of any lengths; unknown tokens are -1."""
    lengths = [len(h) for h in histories]
    tokens = np.full((len(histories), max(lengths) + spare), -1, np.int32)
    for row, history in zip(tokens, histories, strict=True):
        row[:len(history)] = history
    prompts = np.broadcast_to(np.asarray(prompts, np.int32), (len(histories),))
    return Context(jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), jnp.asarray(prompts),
                   row_keys(len(histories), seed))


def apply(transform: Transform, logits: np.ndarray, histories: Any = None, prompts: Any = 0, states: Any = None,
          seed: int = 0) -> np.ndarray:
    """The transform's logits for each row: `f32[B, V]`."""
    histories = [[0]] * len(logits) if histories is None else histories
    return np.asarray(_apply(transform, states, contexts(histories, prompts, seed=seed), jnp.asarray(logits)))


@jax.jit
def _apply(transform: Transform, states: Any, ctx: Context, logits: jax.Array) -> jax.Array:
    return jax.vmap(lambda t, state, ctx, x: t.logits(state, ctx, x))(transform, states, ctx, logits)


def rows(value: Any, dtype: Any = jnp.float32, batch: int = BATCH) -> jax.Array:
    """One value for each row."""
    return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 1e-5) -> None:
    """The same tokens are forbidden and the rest is equal."""
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
