"""Small models with random weights, for the tests of every shelf."""

import functools
from typing import Any

import jax

from decodax.io.load import LM
from decodax.models import Transformer, llama

PROMPTS = [[1, 2, 3, 4], [9, 3], [5, 5, 5, 2, 7, 1]]
"""Prompts for `net`."""


def random_lm(model: Any, seed: int = 1, by: float = 8, **options: Any) -> LM:
    """A model whose fresh kernels are multiplied by a factor: fresh ones give flat logits, these a shape."""
    params = jax.tree.map(lambda x: by * x if x.ndim > 1 else x, model.init_params(jax.random.key(seed)))
    return LM(model=model, params=params, vocab_size=model.config.vocab, **options)


@functools.cache
def net(layers: int = 2, seed: int = 1, tied: bool = False) -> LM:
    """A transformer over 24 tokens; token 4 ends a text. `expected.json` of the contrastive searches has its numbers.
    """
    network = llama(vocab=24, width=16, layers=layers, heads=4, kv_heads=2, mlp=24, context=256, tied=tied)
    return random_lm(Transformer(network), seed, generation_config={"eos_token_id": 4})
