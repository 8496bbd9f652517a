"""Models, data and helpers of `test_adadec.py` that other tests use too."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.core.window import causal
from tests.small_models import net


@functools.cache
def sharp() -> dx.LM:
    """`net` with a head that is sure of itself now and then."""
    weights = jax.tree_util.tree_map_with_path(
        lambda path, x: 5 * x if "head" in jax.tree_util.keystr(path) else x, net().params)
    return dataclasses.replace(net(), params=weights)


@functools.partial(jax.jit, static_argnums=0)
def _apply(model: Any, params: Any, tokens: Any) -> Any:
    rows = tokens.shape[0]
    out = model.apply(params, causal(tokens, jnp.zeros(rows, jnp.int32)), model.init_cache(rows, 48))
    return jax.nn.log_softmax(out.logits())


def following(lm: dx.LM, texts: list[list[int]]) -> np.ndarray:
    """Log-probabilities behind texts, `f64[n, V]`."""
    padded = np.zeros((-(-len(texts) // 4) * 4, 48), np.int32)
    for i, text in enumerate(texts):
        padded[i, :len(text)] = text
    out = np.asarray(_apply(lm.model, lm.params, padded), np.float64)
    return np.stack([out[i, len(text) - 1] for i, text in enumerate(texts)])
