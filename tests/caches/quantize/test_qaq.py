"""QAQ (Dong et al., 2024): a prompt's tokens in as many bits as a bound of each one's error takes."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import caches
from decodax.cache import KVLayer, dense
from decodax.caches.quantize.qaq import QAQConfig, decoded, encoded, key_error, value_error
from tests.caches.small import DEEP, PROMPTS

# of ClubieDong/QAQ-KVCacheQuantization (f8d47e0), src/quantizer.py: uniform codes for a layer's tokens, not symmetric
EXPECTED = json.loads((Path(__file__).parents[1] / "expected" / "qaq.json").read_text())
L, G, S, D = 2, 2, 14, 8
CASES = {"a": (0.1, 4, (0.02, 0.3), 10.0, (1, 6)), "b": (0.0, 1, (0.05, 0.1), 30.0, (2, 4))}


def drawn() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Keys and values `f[L, G, S, d]`, and attention `f[L, G, S, S]`."""
    r = np.random.default_rng(0)
    found = {name: (r.normal(0, 1, (L, 1, G, S, D)).astype(np.float32)
                    * np.exp(r.normal(0, .7, (L, 1, 1, S, 1))).astype(np.float32))[:, 0] for name in ("key", "value")}
    scores = np.where(np.tri(S, dtype=bool), r.normal(0, 2, (L, 1, G, S, S)).astype(np.float32)[:, 0], -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return found, weights / weights.sum(-1, keepdims=True)


@pytest.mark.wide(but=("b-key", "a-value", "b-value"))
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("case", CASES)
def test_bits_and_numbers_are_those_of_the_authors_code(case: str, name: str) -> None:
    share, last, error, norm, bits = CASES[case]
    kind, want = QAQConfig(bits, 8.0, error, norm, last, share), EXPECTED[f"{case}-{name}"]
    held, attention = drawn()
    late = jnp.arange(S) > S - last
    for layer in range(L):
        x = held[name][layer].swapaxes(0, 1).reshape(S, -1)
        bound: Any = key_error(jnp.int32(S), error[0], norm)
        if name == "value":
            bound = value_error(jnp.int32(S), error[1], jnp.asarray(attention[layer, :, -last:].max((0, 1))))
        pool = encoded(jnp.asarray(x), bound, jnp.ones(S, bool), late, kind, S * 2 * D)
        assert pool.bits.tolist() == want["bits"][layer]
        got = np.asarray(decoded(pool, G * D, jnp.float32)).reshape(S, G, D).swapaxes(0, 1)
        np.testing.assert_allclose(got, want["values"][layer], atol=1e-4)


@pytest.mark.wide(but=("3.4", "2.6"))
@pytest.mark.parametrize("most", [2.0, 2.6, 3.4, 8.0])
def test_codes_fit_the_pool_and_the_widest_give_way(most: float) -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(0, 1, (20, 16)).astype(np.float32)
    error, valid = jnp.asarray(draw.uniform(0.01, 0.5, 20).astype(np.float32)), jnp.arange(20) < 17
    kind = QAQConfig((2, 7), outliers_ratio=0.0)
    make = lambda size: encoded(jnp.asarray(x), error, valid, jnp.zeros(20, bool), kind, size)
    size = int(most * 17 * 2)
    free, bound = np.asarray(make(1000).bits), np.asarray(make(size).bits)
    assert free[:17].min() == 2 and free.max() >= 5 and not bound[17:].any()
    assert bound.sum() * 2 <= size
    assert (bound == np.minimum(free, bound.max())).all()
    # and no bound that is one higher would have fitted
    assert (bound == free).all() or np.minimum(free, bound.max() + 1).sum() * 2 > size
    # codes lie around the mean, so that one end may be cut where it is not in the middle
    far, (low, high) = np.abs(np.asarray(decoded(make(1000), 16, jnp.float32)) - x).max(1), (x.min(1), x.max(1))
    reach = (high - low) / 2.0 ** free.clip(1) + np.abs(x.mean(1) - (high + low) / 2)
    assert (far <= reach * 1.01)[:17].all()


def test_attended_tokens_take_more_bits() -> None:
    kind, shape = QAQConfig((1, 8), 8.0, (1.0, 0.05), 10.0, 2, 0.0), KVLayer(1, 8, queries=1)
    draw = np.random.default_rng(2)
    held = draw.normal(0, 1, (1, 30, 16)).astype(np.float32)
    held[0, 11, :8] = 4
    queries = np.full((2, 1, 8), 0.5, np.float32)
    _, values = kind.pools(shape, 30, (900, 900), jnp.asarray(held), jnp.asarray(queries), jnp.int32(30))
    bits = np.asarray(values.bits)
    assert bits[11] > bits[:11].max() and bits[29] == 8


def test_the_bytes_are_those_of_the_pool() -> None:
    """With heads of 64 and 3 bits a number on the average, a fifth of float16's for keys and values."""
    shapes, size = [(8, 64)] * 2, 1024
    bytes_of = lambda cache: sum(x.nbytes for x in jax.tree.leaves(cache))
    whole = bytes_of(dense(shapes, 1, size, jnp.float16))
    for most, share in ((3.0, 0.235), (2.0, 0.175)):
        held = QAQConfig(mean_bits=most, outliers_ratio=0.01).with_length(32)(shapes, 1, size, jnp.float16)
        assert bytes_of(held.pools) / whole < share


@pytest.mark.wide
def test_more_bits_are_nearer_to_dense() -> None:
    def run(cache: Any, **more: Any) -> np.ndarray:
        return dx.generate(DEEP, PROMPTS, cache=cache, max_new_tokens=12, seed=5, temperature=0.8, **more).tokens

    fine = caches.make("qaq", bits=(8, 8), mean_bits=8.0, outliers_ratio=0.3, last_n_attentions=2)
    coarse = caches.make("qaq", bits=(1, 1), mean_bits=1.0, outliers_ratio=0.0, last_n_attentions=1)
    alike = lambda cache: (run(cache) == run(None)).sum()
    assert alike(fine) > alike(coarse)
    assert (run(coarse, algorithm="prompt-lookup") == run(coarse)).all()
