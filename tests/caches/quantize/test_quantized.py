"""Keys and values in few bits."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches.quantize.codecs import Codec, pack, unpack
from decodax.caches.quantize.gear import GEARCodec
from decodax.caches.quantize.kivi import KIVICodec, dequantize_keys, dequantize_values, quantize_keys, quantize_values
from decodax.caches.quantize.mustafar import MustafarCodec
from decodax.caches.quantize.quantized import QuantizedCache, QuantizedConfig
from decodax.caches.quantize.quantspec import QuantSpecCodec
from decodax.core.window import causal
from decodax.models import Transformer, llama
from tests.caches.small import MODEL, PROMPTS, SMALL
from tests.matrix import often

CODED = {2: ("685e1f328727a27f", "d629196490100a75"), 4: ("74d50877a2aa6c80", "692145b60557ade9"),
         8: ("524509063b31058d", "accbd40c0132748b")}
"""Digests of the codes of keys and values of `given()`, by `quant_and_pack_kcache` and `quant_and_pack_vcache` of
jy-yuan/KIVI at 876b4d2 with groups of 32, in float32, unpacked."""


def given() -> np.ndarray:
    """`f32[3, 64, 96]`, with a channel that is large."""
    x = np.random.RandomState(0).standard_normal((3, 64, 96)).astype(np.float32)
    x[:, :, 5] *= 20
    return x


def digest(codes: Any) -> str:
    return hashlib.sha256(np.asarray(codes).astype(np.uint8).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("bits", CODED)
def test_codes_are_those_of_kivi(bits: int) -> None:
    x = jnp.asarray(given())
    keys, values = quantize_keys(x, bits, 32), quantize_values(x, bits, 32)
    assert (digest(unpack(keys.codes, bits)), digest(unpack(values.codes, bits))) == CODED[bits]
    for back in (dequantize_keys(keys, bits, 32, jnp.float32), dequantize_values(values, bits, 32, jnp.float32)):
        assert back.shape == x.shape
    step = jnp.repeat(keys.steps, 32, 1)
    assert (jnp.abs(dequantize_keys(keys, bits, 32, jnp.float32) - x) <= 0.501 * step + 1e-6).all()
    step = jnp.repeat(values.steps, 32, 2)
    assert (jnp.abs(dequantize_values(values, bits, 32, jnp.float32) - x) <= 0.501 * step + 1e-6).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bits_are_packed_without_loss(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (2, 3, 16)).astype(np.uint8)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.shape == (2, 3, 2 * bits) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@pytest.mark.wide
def test_values_that_are_constant_over_a_group_are_kept() -> None:
    x = jnp.full((1, 8, 4), 3.5)
    np.testing.assert_array_equal(dequantize_keys(quantize_keys(x, 2, 8), 2, 8, jnp.float32), x)
    np.testing.assert_array_equal(dequantize_values(quantize_values(x, 2, 4), 2, 4, jnp.float32), x)


@pytest.mark.wide
@pytest.mark.parametrize("codec", often([KIVICodec(4, 2, 4)], [
    KIVICodec(4, 2, 4), QuantSpecCodec(4), QuantSpecCodec(4, lower=False), GEARCodec(2, 4, 8, 0.25, 2),
    MustafarCodec(0.5, 0.7)]))
def test_attention_is_that_to_the_decoded_codes(codec: Codec) -> None:
    """Behind a prompt, and behind the flush of a full rest, in rows of different lengths."""
    network = Transformer(llama(vocab=16, width=32, layers=1, heads=4, kv_heads=2, mlp=24, context=256))
    params = network.init_params(jax.random.key(0))
    kind = QuantizedConfig(codec, 8)
    model = network.with_cache(kind)
    cache, whole = model.init_cache(2, 64), network.init_cache(2, 64)
    tokens = jax.random.randint(jax.random.key(1), (2, 41), 0, 16)
    assert isinstance(cache, QuantizedCache)

    @jax.jit
    def step(cache: Any, whole: Any, token: Any, live: Any) -> tuple[Any, ...]:
        window, slots = causal(token, cache.length, live), jnp.where(live, cache.length[:, None], -1)
        out, want = model.apply(params, window, cache), network.apply(params, window, _shown(cache, whole))
        off = jnp.where(live, jnp.abs(out.hidden - want.hidden).max(-1), 0).max()
        return off, cache.commit(out.entries, slots), whole.commit(out.entries, slots)

    for i in range(41):
        # the second row stands still now and then
        off, cache, whole = step(cache, whole, tokens[:, i:i + 1], jnp.array([[True], [i % 3 != 0]]))
        assert off < 1e-4
    assert cache.length.tolist() == [41, 27] and cache.whole.tolist() == [1, 3]


def _shown(cache: QuantizedCache, whole: Any) -> Any:
    """The dense cache with what the codes stand for in place of what is in codes."""
    decode = lambda codes: cache.kind.codec.decode(cache.shapes[0], codes, jnp.float32)
    both = jax.vmap(decode)(cache.codes[0])[:, :, :whole.kv[0].shape[2]]
    at = jnp.arange(both.shape[2]) < (cache.length - cache.whole)[:, None]
    return whole.replace(kv=(jnp.where(at[:, None, :, None], both, whole.kv[0]),))


@pytest.mark.wide
def test_more_bits_are_nearer_to_the_dense_cache() -> None:
    """8 bits of small groups give its tokens."""
    options: dict[str, Any] = dict(max_new_tokens=20, logprobs=0)
    dense = dx.generate(SMALL, PROMPTS, **options)
    exact = dx.generate(SMALL, PROMPTS, cache="kivi:bits=8,group_size=4,residual_length=4", **options)
    assert exact.tokens.tolist() == dense.tokens.tolist()
    np.testing.assert_allclose(exact.logprobs.raw, dense.logprobs.raw, atol=0.1)


def size(cache: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


@pytest.mark.parametrize(("bits", "group", "share"), often([(4, 64, 0.30)], [(4, 64, 0.30), (2, 32, 0.22)]))
def test_bytes_are_those_of_the_bits(bits: int, group: int, share: float) -> None:
    """Codes, steps, lows and the latest tokens, over float16's 16 bits, at 8192 tokens and heads of 128."""
    shapes = ((8, 128),) * 2
    coded = jax.eval_shape(lambda: QuantizedConfig(KIVICodec(bits, bits, group))(shapes, 2, 8192, jnp.float16))
    assert size(coded) <= share * 2 * 2 * 8 * 8192 * 256 * 2


def test_an_empty_cache_has_no_room() -> None:
    assert MODEL.with_cache(QuantizedConfig(KIVICodec(8, 8, 4), 8)).init_cache(1, 0).capacity == 0


GEARED = {2: (0.4155920, 0.0747191, 0.0574421, 0.0609936), 4: (0.0171918, 0.0028634, 0.0022657, 0.0023399)}
"""Mean squared errors of keys and values of the matrix below by `gears_channelQ` and `gears_tokenQ` (groups of 32, 10%
of outliers), and with a matrix of rank 4 in 3 loops by `gearslkivi_channelQ_new` and `gearslkivi_tokenQ_new`, of
opengear-project/GEAR at efe0bfe. The last two begin with random numbers."""


@pytest.mark.wide
@pytest.mark.parametrize("bits", GEARED)
def test_errors_are_those_of_gear(bits: int) -> None:
    x = np.random.RandomState(0).standard_normal((1, 64, 64)).astype(np.float32)
    x[:, :, 5] *= 20
    codec, shape = GEARCodec(bits, 32, 64, 0.1, 4, 3), KVLayer(1, 64)
    codes = codec.encode(shape, jnp.concatenate([x, x], -1))
    plain = tuple(own.replace(left=0 * own.left) for own in codes)
    keys, values = (np.square(codec.decode(shape, plain, jnp.float32)[..., part] - x).mean()
                    for part in (slice(64), slice(64, None)))
    near_keys, near_values = (np.square(codec.decode(shape, codes, jnp.float32)[..., part] - x).mean()
                              for part in (slice(64), slice(64, None)))
    np.testing.assert_allclose([keys, values], GEARED[bits][:2], rtol=1e-3)
    np.testing.assert_allclose([near_keys, near_values], GEARED[bits][2:], rtol=0.05)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.7])
def test_numbers_from_the_threshold_on_stay(sparsity: float) -> None:
    """Of the `int(sparsity * d)`-th smallest magnitude, as in dhjoo98/mustafar at d83ee7e."""
    x = given()
    codec, shape = MustafarCodec(sparsity, 0.0), KVLayer(3, 96)
    codes = codec.encode(shape, jnp.concatenate([x, x], -1))
    threshold = np.sort(np.abs(x), axis=-1)[..., max(1, int(sparsity * 96)) - 1, None]
    back = codec.decode(shape, codes, jnp.float32)
    np.testing.assert_array_equal(back[..., :96], np.where(np.abs(x) >= threshold, x, 0))
    np.testing.assert_array_equal(back[..., 96:], x)
    assert codes[0].kept.shape[-1] == 96 - max(1, int(sparsity * 96)) + 1


@pytest.mark.wide
def test_a_second_half_of_bits_brings_numbers_nearer() -> None:
    """By about 16 times, and the first half alone is the plain 4 bits."""
    x = jnp.asarray(given())[:, :, :64]
    kv, shape = jnp.concatenate([x, x], -1), KVLayer(3, 64)
    codes = QuantSpecCodec(32).encode(shape, kv)
    plain = KIVICodec(4, 4, 32)
    upper, both = (QuantSpecCodec(32, lower=lower).decode(shape, codes, jnp.float32) for lower in (False, True))
    np.testing.assert_array_equal(upper, plain.decode(shape, plain.encode(shape, kv), jnp.float32))
    assert np.square(both - kv).mean() < np.square(upper - kv).mean() / 150


@pytest.mark.parametrize("outliers", [0.0, 0.001])
def test_a_line_has_an_outlier_on_each_side_or_none(outliers: float) -> None:
    x = given()
    codec, shape = GEARCodec(2, 32, 64, outliers, 1), KVLayer(3, 96)
    keys, values = codec.encode(shape, jnp.concatenate([x, x], -1))
    assert keys.at.shape[-1] == values.at.shape[-1] == (2 if outliers else 0)
    assert codec.decode(shape, (keys, values), jnp.float32).shape == (3, 64, 192)
