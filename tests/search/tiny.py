"""Models, data and helpers of `test_searches.py` that other tests use too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.core.window import causal
from decodax.models import Transformer, llama
from tests.small_models import random_lm

V, NEW, EOS = 5, 4, 2


@functools.cache
def tiny() -> dx.LM:
    network = llama(vocab=V, width=8, layers=1, heads=2, kv_heads=1, mlp=8, context=64)
    return random_lm(Transformer(network), 4, by=6, generation_config={"eos_token_id": EOS})


@functools.cache
def law(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """The probability of each text."""
    lm = tiny()
    texts = [t for n in range(1, NEW + 1) for t in itertools.product(range(V), repeat=n)
             if EOS not in t[:-1] and (n == NEW or t[-1] == EOS)]
    full = np.array(list(itertools.product(range(V), repeat=NEW)), np.int32)
    tokens = np.concatenate([np.tile(prompt, (len(full), 1)), full], 1)
    out = lm.model.apply(lm.params, causal(jnp.asarray(tokens), jnp.zeros(len(tokens), jnp.int32)),
                         lm.model.init_cache(len(tokens), 16))
    log_p = np.asarray(jax.nn.log_softmax(out.logits()), np.float64)[:, len(prompt) - 1:-1]
    table = {tuple(row): log_p[i] for i, row in enumerate(full.tolist())}
    return {t: float(np.exp(sum(table[(*t, *[0] * (NEW - len(t)))][k, x] for k, x in enumerate(t)))) for t in texts}
