"""StreamingLLM (Xiao et al., 2024): positions are those in the cache, so a network of one layer, whose keys and values
depend on their tokens alone, reads a shortened text."""

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.caches.bounded.streaming_llm import StreamingLLMConfig
from decodax.models import Transformer, llama
from tests.dense import follows

NETWORK = Transformer(llama(vocab=32, width=16, layers=1, heads=4, kv_heads=2, mlp=24, context=256))
WEIGHTS = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(3)))
SMALL = dx.LM(model=NETWORK, params=WEIGHTS, vocab_size=32, generation_config={})
PROMPTS = [np.random.default_rng(0).integers(1, 32, n).tolist() for n in (17, 3, 9)]
SINKS, RECENT = 3, 6


def shortened(text: list[int]) -> list[int]:
    """The first `SINKS` and the last `RECENT` tokens of a text."""
    return text if len(text) <= SINKS + RECENT else [*text[:SINKS], *text[-RECENT:]]


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["autoregressive", "prompt-lookup:length=3"])
def test_tokens_are_those_of_the_shortened_text(algorithm: str) -> None:
    cache = StreamingLLMConfig(SINKS, RECENT)
    out = dx.generate(SMALL, PROMPTS, algorithm=algorithm, cache=cache, max_new_tokens=20, logprobs=0)
    for i, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for token, logprob in zip(out.row(i).tolist(), out.logprobs.raw[i], strict=False):
            expected = follows(SMALL, shortened(text), SINKS + RECENT)
            assert token == int(np.argmax(expected))
            np.testing.assert_allclose(logprob, expected[token], atol=1e-4)
            text.append(token)
    assert out.tokens.tolist() != dx.generate(SMALL, PROMPTS, max_new_tokens=20).tokens.tolist()
