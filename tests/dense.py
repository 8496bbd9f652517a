"""Log-probabilities by a forward of a whole text, without a cache: what other ways to decode are held against."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.core.window import causal


@functools.partial(jax.jit, static_argnums=0)
def _read(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    out = model.apply(params, causal(tokens, jnp.zeros(1, jnp.int32)), model.init_cache(1, 0))
    return jax.nn.log_softmax(out.head(out.hidden))[0]


def follows(lm: Any, text: list[int], size: int) -> np.ndarray:
    """Returns `f32[V]`, the log-probabilities of the token after a text of at most `size` tokens."""
    tokens = jnp.asarray([text + [0] * (size - len(text))], jnp.int32)
    return np.asarray(_read(lm.model, lm.params, tokens))[len(text) - 1]
