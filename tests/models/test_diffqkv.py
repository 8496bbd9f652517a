"""Fewer heads of keys than of values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import caches
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import Transformer, diffqkv, llama
from tests.caches.small import OPTIONS, PROMPTS
from tests.matrix import often

pytestmark = pytest.mark.wide

GROUPED = llama(vocab=16, width=16, layers=1, heads=8, kv_heads=4, head_dim=4, mlp=24, context=256)
CONFIG = diffqkv(GROUPED, key_heads=2)      # 8 heads of queries, wider than the model, 2 of keys and 4 of values
MODEL = Transformer(CONFIG)
PARAMS = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, MODEL.init_params(jax.random.key(5)))
SMALL = LM(model=MODEL, params=PARAMS, vocab_size=16)


def grouped() -> LM:
    """The network of four heads of keys, two of which are the same each."""
    params = jax.tree.map(lambda x: x, PARAMS)
    attn = params["layers"]["0"]["attn"]
    attn["k"]["kernel"] = attn["k"]["kernel"].reshape(16, 2, 4).repeat(2, 1).reshape(16, 16)
    return LM(model=Transformer(GROUPED), params=params, vocab_size=16)


def test_fewer_heads_of_keys_are_a_network_with_repeated_keys() -> None:
    tokens = jnp.asarray([PROMPTS[0]])
    same = grouped()
    np.testing.assert_allclose(MODEL.forward(PARAMS, tokens), same.model.forward(same.params, tokens), atol=1e-4)
    assert PARAMS["layers"]["0"]["attn"]["k"]["kernel"].shape == (16, 8)
    assert PARAMS["layers"]["0"]["attn"]["v"]["kernel"].shape == (16, 16)


@pytest.mark.parametrize("cache", often([None, "squat"], [
    None, "snapkv", "kivi", "streaming-llm", "squat", "zipcache"]))
def test_drafts_give_the_tokens_of_plain_decoding(cache: str | None) -> None:
    kind = None if cache is None else caches.make(cache, **OPTIONS[cache])
    one = lambda lm, **more: dx.generate(lm, PROMPTS, cache=kind, max_new_tokens=12, seed=5,
                                         temperature=[0.0, 0.9, 0.0], **more)
    plain, drafted = one(SMALL), one(SMALL, algorithm="prompt-lookup")
    assert drafted.tokens.tolist() == plain.tokens.tolist()
    if cache is None:
        assert plain.tokens.tolist() == one(grouped()).tokens.tolist()


def test_the_cache_holds_fewer_keys() -> None:
    cache, whole = (Job.begin(Request.read(lm, PROMPTS[:1])).state.cache.kv[0] for lm in (SMALL, grouped()))
    assert cache.shape[1] == 2 and cache.shape[3] == 4 + 2 * 4
    assert cache.size * 4 == whole.size * 3


def test_numbers_that_do_not_go_together_are_refused() -> None:
    for expected, wrong in (
            (r"^key_heads: got 3", lambda: diffqkv(GROUPED, 3)),
            (r"^value_heads: got 3", lambda: dataclasses.replace(GROUPED, value_heads=3)),
            (r"^value_heads: got more", lambda: dx.generate(SMALL, PROMPTS[:1], cache=caches.make(
                "criticalkv", budget=14, window_size=4, floor_alpha=0.2), max_new_tokens=2))):
        with pytest.raises(ValueError, match=expected):
            wrong()
