"""Classifier-free guidance against its definition, by full forwards of both texts."""

from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.models import Transformer, llama
from tests.dense import follows

NETWORK = Transformer(llama(vocab=24, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=64))
WEIGHTS = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(1)))
SMALL = dx.LM(model=NETWORK, params=WEIGHTS, vocab_size=24, generation_config={})
PROMPTS = [[1, 2, 3, 4], [9, 3, 9]]


@pytest.mark.wide
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
            c, u = follows(SMALL, text, 24), follows(SMALL, other, 24)
            assert token == int(np.argmax(u + scale * (c - u)))
            text, other = [*text, token], [*other, token]
    # of the second prompt the first round has drafts already
    drafted = dx.generate(SMALL, PROMPTS, algorithm="prompt-lookup:length=2", guidance_scale=scale,
                          negative_prompts=negative, max_new_tokens=10)
    assert drafted.tokens.tolist() == out.tokens.tolist()
    assert drafted.stats.drafted.min() > 0
