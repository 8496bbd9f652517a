"""Small models with random weights, for the tests of every shelf."""

from typing import Any

import jax

from decodax.io.load import LM


def random_lm(model: Any, seed: int = 1, by: float = 8, **options: Any) -> LM:
    """A model whose fresh kernels are multiplied by a factor: fresh ones give flat logits, these a shape."""
    params = jax.tree.map(lambda x: by * x if x.ndim > 1 else x, model.init_params(jax.random.key(seed)))
    return LM(model=model, params=params, vocab_size=model.config.vocab, **options)
