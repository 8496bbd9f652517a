"""Keys without the channels that a model can do without."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches import Constant
from decodax.caches.quantize.leank import LeanKCodec, sparsified
from decodax.caches.quantize.quantized import QuantizedCache, QuantizedConfig
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal
from decodax.train import Probe, fit_channels
from decodax.train.leank import ScaledChannels
from tests.caches.small import DEEP

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "retrieval.json").read_text())["leank"]


def given() -> tuple[np.ndarray, ...]:
    """Factors `f32[3, 2, 8]`; queries, keys and values of 30 tokens."""
    r = np.random.RandomState(0)
    factors = r.random_sample((3, 2, 8)).astype(np.float32)
    return factors, *(r.standard_normal((30, n, 8)).astype(np.float32).round(3) for n in (4, 2, 2))


def test_channels_and_attention_with_factors_are_the_authors() -> None:
    factors, q, k, v = given()
    assert sparsified(factors, 0.6, 2).astype(int).tolist() == WANTED["channels"]
    cache = ScaledChannels(factors=(jnp.asarray(factors[0]),), start=jnp.int32(22), sinks=3, recent=6)
    window = causal(jnp.zeros((1, 30), jnp.int32), jnp.zeros(1, jnp.int32))
    out, _ = cache.attend(0, *(jnp.asarray(x)[None] for x in (q, k, v)), window, scale=8 ** -0.5)
    np.testing.assert_allclose(out[0].reshape(30, -1).sum(-1), WANTED["sums"], atol=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize("count", [30, 4])
def test_a_query_sees_the_channels_that_stay(count: int) -> None:
    """Against attention written out, behind a prompt and tokens that follow; a head without channels sees the first
    tokens and the latest alone."""
    _, q, k, v = given()
    own = np.zeros((1, 2, 8), bool)
    own[0, 0, [1, 4, 6]] = True
    kind = QuantizedConfig(LeanKCodec(Constant(own), 3), 4, "leank", 5)
    entry = lambda at: [KVEntry(jnp.asarray(k[at])[None], jnp.asarray(v[at])[None])]
    cache = kind([KVLayer(2, 8, queries=4)], 1, 64, jnp.float32).prefill_cache()
    cache = cache.commit(entry(slice(0, count - 3)), jnp.arange(count - 3)[None]).finish_prefill(
        ReadPrompt(None, None, jnp.zeros((1, 0), jnp.int32)))
    for i in range(count - 3, count):
        cache = cache.commit(entry(slice(i, i + 1)), jnp.array([[i]]))
    assert isinstance(cache, QuantizedCache)
    late = int(cache.held[0] - cache.whole[0])
    sinks = min(3, count - 3)
    assert late == max(count - 5, 0) // 4 * 4
    out, _ = cache.attend(0, jnp.asarray(q[None, :1]), *(jnp.zeros((1, 1, 2, 8)),) * 2,
                          causal(jnp.zeros((1, 1), jnp.int32), cache.length), scale=8 ** -0.5)
    for h in range(4):
        g, at = h // 2, np.arange(count)
        whole = (at < sinks) | (at >= late)
        keys = np.where(whole[:, None], k[:count, g], k[:count, g] * own[0, g])
        seen = whole if g else whole | True
        keys = np.concatenate([keys[seen], np.zeros((1, 8))])        # and its own
        weights = jax.nn.softmax(8 ** -0.5 * keys @ q[0, h])
        np.testing.assert_allclose(out[0, 0, h], weights[:-1] @ v[:count, g][seen], atol=1e-5)


@pytest.mark.wide
def test_learned_channels_are_better_than_others() -> None:
    """By what the last hidden states of answers differ, on the texts they were learned on."""
    tokens = [np.random.default_rng(i).integers(0, 16, 60).tolist() for i in range(4)]
    probes = [Probe(text, 44, 60) for text in tokens]
    made = fit_channels(DEEP, probes, ratio=0.5, align=1, steps=(60, 20), sinks=1, recent=2, rates=(0.05, 0.01))
    number = int(made.value.sum())
    assert made.value.shape == (2, 2, 4) and 6 <= number <= 10

    @jax.jit
    def error(params: Any, factors: Any) -> Any:
        total = 0.0
        for text in tokens:
            window = causal(jnp.asarray([text]), jnp.zeros(1, jnp.int32))
            hidden = [DEEP.model.apply(params, window, ScaledChannels(factors=tuple(f), start=jnp.int32(44), sinks=1,
                                                              recent=2)).hidden[0, 44:]
                      for f in (factors, jnp.ones_like(factors))]
            total += jnp.square(hidden[0] - hidden[1]).mean()
        return total

    others = []
    for seed in range(12):
        mask = np.zeros(16, np.float32)
        mask[np.random.default_rng(seed).permutation(16)[:number]] = 1
        others.append(float(error(DEEP.params, jnp.asarray(mask.reshape(2, 2, 4)))))
    assert float(error(DEEP.params, jnp.asarray(made.value, jnp.float32))) < np.median(others)
