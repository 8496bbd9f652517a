"""Models, data and helpers of `test_beams.py` that other tests use too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.models import Transformer, llama
from tests.laws.toy import Toy
from tests.small_models import random_lm

PROMPTS = [[1, 2, 3, 4], [9, 3], [5, 5, 5, 2, 7, 1]]
NEW, SMALL, EOS = 9, 6, 2


@functools.cache
def lm() -> dx.LM:
    network = llama(vocab=24, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256)
    return random_lm(Transformer(network), generation_config={"eos_token_id": 4})


@functools.cache
def small() -> dx.LM:
    network = Toy(SMALL)
    return dx.LM(network, network.init_params(3), SMALL, generation_config={"eos_token_id": EOS})


@functools.cache
def log_probs(prompt: tuple[int, ...], new: int) -> dict[tuple[int, ...], np.ndarray]:
    """The log-probabilities of the tokens of all texts of the small model, by EOS or after `new` tokens."""
    from decodax.core.window import causal

    tails = np.array(list(itertools.product(range(SMALL), repeat=new)))
    tokens = np.concatenate([np.tile(prompt, (len(tails), 1)), tails], 1)
    model = small().model
    out = model.apply(small().params, causal(jnp.asarray(tokens), jnp.zeros(len(tails), jnp.int32)),
                      model.init_cache(len(tails), 0))
    each = np.asarray(jax.nn.log_softmax(out.logits()[:, len(prompt) - 1:-1]), np.float64)
    own = np.take_along_axis(each, tails[..., None], -1)[..., 0]
    found = {}
    for tail, p in zip(tails.tolist(), own, strict=True):
        length = tail.index(EOS) + 1 if EOS in tail else new
        found[tuple(tail[:length])] = p[:length]
    return found
