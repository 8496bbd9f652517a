"""Models, data and helpers of `test_linear.py` that other tests use too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from decodax.io.load import LM
from decodax.models import (
    Transformer,
    jrt,
    linear,
    linearized,
    llama,
)

BASE = llama(vocab=16, width=16, layers=3, heads=4, kv_heads=2, mlp=24, context=256)
CONFIGS = {
    "elu": linear(BASE),
    "elu beside softmax": linear(BASE, layers=(0, 2)),
    "linearized": linearized(BASE, group=8, kernel=9),
    "linearized beside softmax": linearized(BASE, (0, 2), group=4, kernel=13),
    "based": jrt(BASE, (1,), window=6, width=4, prefix=False),
    "jrt": jrt(BASE, (0, 1), window=6, width=4),
}


@functools.cache
def lm(name: str) -> LM:
    model = Transformer(CONFIGS[name])
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(3)))
    r = np.random.default_rng(4)
    for layer in params["layers"].values():     # fresh ones are zeros
        for own in ("factor", "taps"):
            if own in layer["attn"]:
                layer["attn"][own] = jnp.asarray(r.normal(size=layer["attn"][own].shape), jnp.float32)
    return LM(model=model, params=params, vocab_size=16)
