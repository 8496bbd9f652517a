"""A cache of which the older tokens are made fewer by their frequencies."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches.bounded.freqkv import FreqKVCache, FreqKVConfig, low_frequencies
from decodax.core.window import causal
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.rope import Rope, rotate
from tests.caches.small import MODEL, PARAMS, PROMPTS, SMALL

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "retrieval.json").read_text())["freqkv"]


@pytest.mark.wide
@pytest.mark.parametrize("width", [3, 9])
def test_attention_is_the_authors(width: int) -> None:
    """To a cache of 20 tokens that is full three times, with chunks of any width between."""
    r, T = np.random.RandomState(0), 45
    q, k, v = (r.standard_normal((T, n, 8)).astype(np.float32).round(3) for n in (4, 2, 2))
    rope = Rope(8)
    cache = FreqKVConfig(20, 3, 0.48)([KVLayer(2, 8, queries=4, rope=rope)], 1, 64, jnp.float32)
    assert isinstance(cache, FreqKVCache) and cache.kind.kept == 8
    cos, sin = rope.table(jnp.arange(T)[None], None)
    q, k = (np.asarray(rotate(jnp.asarray(x)[None], cos, sin, rope.interleaved))[0] for x in (q, k))
    at, sums = 0, np.zeros(T)
    while at < T:
        n = min(width, int(cache.max_commit()[0]), T - at)     # type: ignore[index]
        part = lambda x, at=at: jnp.pad(jnp.asarray(x), ((0, width), (0, 0), (0, 0)))[None, at:at + width]
        window = causal(jnp.zeros((1, width), jnp.int32), cache.length)
        out, entry = cache.attend(0, part(q), part(k), part(v), window, scale=8 ** -0.5)
        sums[at:at + n] = out[0, :n].reshape(n, -1).sum(-1)
        cache = cache.commit([entry], jnp.where(jnp.arange(width) < n, at + jnp.arange(width), -1)[None])
        at += n
    np.testing.assert_allclose(sums, WANTED["sums"], atol=1e-3)
    assert int(cache.gone[0]) == 27


def test_low_frequencies_are_the_authors() -> None:
    r = np.random.RandomState(0)
    for n in (4, 2, 2):
        r.standard_normal((45, n, 8))
    x = r.standard_normal((1, 2, 17, 4)).astype(np.float32).round(3)[0].swapaxes(0, 1).reshape(17, 8)
    np.testing.assert_allclose(low_frequencies(jnp.asarray(x), 8), WANTED["low"], atol=2e-4)


@pytest.mark.wide
def test_the_cache_has_one_size_whatever_the_text() -> None:
    job = Job.begin(Request.read(SMALL, PROMPTS, cache="freqkv:size=16,sinks=2", max_new_tokens=60))
    shapes = [x.shape for x in job.state.cache.kv]
    job.advance(None)
    assert shapes == [x.shape for x in job.state.cache.kv] and shapes[0][2] == 16
    assert job.state.length[:3].tolist() == [101, 86, 65]


def test_a_model_without_rotary_positions_is_refused() -> None:
    assert isinstance(MODEL, Transformer)
    config = dataclasses.replace(MODEL.config, learned_positions=64, layers=tuple(
        dataclasses.replace(layer, rope=None) for layer in MODEL.config.layers))
    plain = LM(model=Transformer(config), params=PARAMS, vocab_size=16)
    with pytest.raises(ValueError, match=r"^cache: freqkv moves tokens together, which takes a model with rotary"):
        dx.generate(plain, PROMPTS, cache="freqkv", max_new_tokens=2)
