"""Classifier-free guidance against its definition, by full forwards of both texts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import causal
from decodax.models import Transformer, llama

NETWORK = Transformer(llama(vocab=24, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=64))
WEIGHTS = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(1)))
SMALL = dx.LM(model=NETWORK, params=WEIGHTS, vocab_size=24, generation_config={})
PROMPTS = [[1, 2, 3, 4], [9, 3, 9]]


@jax.jit
def read(tokens: Any) -> Any:
    window = causal(tokens, jnp.zeros(1, jnp.int32))
    out = NETWORK.apply(WEIGHTS, window, NETWORK.init_cache(1, 0))
    return jax.nn.log_softmax(out.head(out.hidden))[0]


def follows(text: list[int]) -> np.ndarray:
    """`f32[V]`: log-probabilities of what follows a text."""
    return np.asarray(read(jnp.asarray([text + [0] * (24 - len(text))], jnp.int32)))[len(text) - 1]


@pytest.mark.wide(but=("negative1",))
@pytest.mark.parametrize("negative", [None, [[7, 7, 5, 2, 8], [6]]])
def test_tokens_are_the_best_of_both_texts_by_the_formula(negative: Any) -> None:
    """Without a negative prompt the other text begins with the prompt's last token."""
    scale = 2.5
    out = dx.generate(SMALL, PROMPTS, guidance_scale=scale, negative_prompts=negative, max_new_tokens=10)
    plain = dx.generate(SMALL, PROMPTS, max_new_tokens=10)
    assert out.tokens.tolist() != plain.tokens.tolist()
    for i, prompt in enumerate(PROMPTS):
        text, other = list(prompt), list(prompt[-1:] if negative is None else negative[i])
        for token in out.row(i).tolist():
            c, u = follows(text), follows(other)
            assert token == int(np.argmax(u + scale * (c - u)))
            text, other = [*text, token], [*other, token]
    # of the second prompt the first round has drafts already
    drafted = dx.generate(SMALL, PROMPTS, algorithm="prompt-lookup:length=2", guidance_scale=scale,
                          negative_prompts=negative, max_new_tokens=10)
    assert drafted.tokens.tolist() == out.tokens.tolist()
    assert drafted.stats.drafted.min() > 0
