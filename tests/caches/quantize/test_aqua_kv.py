"""Keys and values as what the layer before does not say of them."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches import Constant
from decodax.caches.quantize.aqua_kv import HIGGS, AQUAKVCodec, Predictors
from decodax.caches.quantize.codecs import Span, WholeTokens, unpack
from decodax.train import aqua_kv, fit_predictors
from decodax.train.aqua_kv import gaussian_pairs
from decodax.train.samples import LayerSamples
from tests.caches.small import DEEP, PROMPTS

CODES = [["d96c79c94b27c6de", "10ea52b5fbe1d795"],
         ["a6bcc236bea4a072", "daee94c62f6fe941"],
         ["944e71ca0a754cc4", "9965d90c88c3de35"]]
"""Digests of the numbers of pairs of keys and values of three layers of `given()`, by
SingleChunkQuantizedCacheWithPredictors of goodevening13/aquakv at e744183, with the predictors of its
fit_linear_regression in the order of its train_predictors.py, random pairs and groups of 16, without the half precision
of its quantizer."""

SUMS = [[[10.1803, 2.8162, -4.0853, -5.4956, -2.2741, 7.6621, 3.8905, 1.132],
         [11.3032, 3.1102, -2.8674, -6.8791, -3.688, 4.1378, 5.3694, 5.885]],
        [[10.3159, -1.341, -4.8459, -4.2019, -3.8823, 5.9245, 0.7772, 1.1761],
         [12.7761, 4.2345, -5.8828, -6.1977, -4.4427, 3.9782, 2.8036, 3.0826]],
        [[10.8728, -4.0852, -2.136, -1.3222, -4.5025, 2.1141, 4.5305, -0.8771],
         [13.6246, -0.8394, -3.1427, -2.5467, -4.333, 6.1258, 3.1954, -1.8497]]]
"""Sums of the keys and values of 8 tokens in each layer, as its cache reads them."""


def given() -> list[LayerSamples]:
    r, n, ks, vs = np.random.RandomState(0), 60, [], []         # type: ignore[var-annotated]
    base = r.standard_normal((n, 2, 8))
    for _ in range(3):
        ks.append((0.7 * (ks[-1] if ks else base) + 0.5 * r.standard_normal((n, 2, 8))).astype(np.float32).round(3))
        vs.append((0.6 * (vs[-1] if vs else base) + 0.3 * ks[-1] + 0.5 * r.standard_normal((n, 2, 8))).astype(
            np.float32).round(3))
    return [LayerSamples(k, v, np.ones_like(k), np.ones_like(v)) for k, v in zip(ks, vs, strict=True)]


def test_maps_and_codes_are_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, r = given(), np.random.RandomState(3)
    monkeypatch.setattr(aqua_kv, "observed", lambda *_: samples)
    few, many = (r.standard_normal((n, 2)).astype(np.float32).round(3) for n in (16, 256))
    made = fit_predictors(None, [], group_size=16, grid=few, first=many)
    np.testing.assert_allclose([np.abs(x.value[2, :-1]).sum() for x in (made.keys, made.values)], [31.226, 72.921],
                               rtol=1e-3)
    codec, shape = AQUAKVCodec(made, 16, 0), KVLayer(2, 8)
    codes: list[Any] = []
    below = None
    for layer, own in enumerate(samples):
        kv = jnp.concatenate([jnp.asarray(own.keys), jnp.asarray(own.values)], -1).swapaxes(0, 1)
        span = Span(jnp.int32(0), None, layer, below)
        codes.append(codec.encode(shape, kv, span))
        below = codec.below(shape, codes[-1], jnp.float32, span)
        numbers = [np.asarray(x[0] if layer == 0 else unpack(x[0], 4)).astype(np.uint8) for x, _ in codes[-1]]
        assert [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in numbers] == CODES[layer]
        both = codec.decode(shape, tuple(codes), jnp.float32, Span(jnp.int32(0), None, layer))
        for x, wanted in zip((both[..., :8], both[..., 8:]), SUMS[layer], strict=True):
            np.testing.assert_allclose(x.sum((0, 2))[:8], wanted, atol=5e-3)


@pytest.mark.wide
def test_pairs_are_nearly_as_good_as_the_authors() -> None:
    """Whose tables have squared errors of 0.108 and 0.0078 a number."""
    x = np.random.default_rng(9).standard_normal((50_000, 2))
    for count, most, loops in ((16, 0.109, 100), (256, 0.0083, 15)):
        grid = gaussian_pairs(count, loops=loops)
        far = np.concatenate([np.square(part[:, None] - grid[None]).sum(-1).min(1) for part in np.array_split(x, 20)])
        assert far.mean() / 2 < most


@pytest.mark.wide
def test_measured_maps_lose_less_than_none() -> None:
    """Of a small network, on the texts that they were measured on; the first tokens are whole."""
    texts = [np.random.default_rng(i).integers(0, 16, 100).tolist() for i in range(4)]
    pairs = gaussian_pairs(16, 20_000, 20), gaussian_pairs(256, 20_000, 5)
    made = fit_predictors(DEEP, texts, grid=pairs[0], first=pairs[1])
    none = Predictors(Constant(0 * made.keys.value), Constant(0 * made.values.value), made.grid, made.first)
    samples = aqua_kv.observed(DEEP, texts)
    error = []
    for own in (made, none):
        codec, shape, below = AQUAKVCodec(own), KVLayer(2, 4), None
        study = WholeTokens(at=jnp.arange(4), kv=jnp.full((2, 4, 8), 7.0))
        for layer, x in enumerate(samples):
            kv = jnp.concatenate([jnp.asarray(x.keys), jnp.asarray(x.values)], -1).swapaxes(0, 1)
            span = Span(jnp.int32(0), study, layer, below)
            codes = codec.encode(shape, kv, span)
            below = codec.below(shape, codes, jnp.float32, span)
        rest = jnp.concatenate([y.reshape(-1, 2, 4).swapaxes(0, 1) for y in below], -1) - kv       # type: ignore[union-attr]
        error.append(float(jnp.square(rest).mean()))
    assert error[0] < 0.8 * error[1]
    cache = dx.caches.aqua_kv(made, residual_length=8)
    assert dx.generate(DEEP, PROMPTS, cache=cache, max_new_tokens=4).lengths.tolist() == [4, 4, 4]


def test_pairs_are_read_as_they_were_written() -> None:
    """But for what the grid cannot say: numbers of its own pairs come back."""
    grid = np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32)
    pairs, which = HIGGS(Constant(grid), 8), np.random.default_rng(1).integers(0, 16, (5, 8))
    x = pairs.decode((jnp.asarray((which[:, :4] | which[:, 4:] << 4).astype(np.uint8)), jnp.full((5, 2), 3.0)), 16,
                     jnp.float32)
    assert x.shape == (5, 16)
    spread = jax.vmap(lambda x: x.reshape(2, 8) @ jnp.asarray(np.linalg.inv(_hadamard(8))))(x) * 8 ** 0.5 / 3
    np.testing.assert_allclose(spread.reshape(5, 8, 2), grid[which], atol=1e-5)


def _hadamard(n: int) -> np.ndarray:
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]) / n ** 0.5
