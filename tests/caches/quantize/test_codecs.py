"""Codecs that ask where tokens stand, what queries look at, or what was measured on a model."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import caches
from decodax.cache import KVLayer
from decodax.caches import Constant, KVFeatures
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.knorm import KeyNorm
from decodax.caches.evict.quantized_pruning import QuantizedPruningConfig
from decodax.caches.evict.selection import Top
from decodax.caches.prefill.listening import Listening
from decodax.caches.quantize.codecs import Span, unpack
from decodax.caches.quantize.cq import Codebooks, CQCodec
from decodax.caches.quantize.cskv import CSKVCodec
from decodax.caches.quantize.hadamard import hadamard
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.quantize.rotatekv import RotateKVCodec
from decodax.caches.quantize.squat import SQuatCodec
from decodax.caches.quantize.zipcache import ZipCacheConfig, restored, salience
from decodax.caches.rotation import after_rotation, before_rotation
from decodax.caches.shapes import layers_of
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal
from decodax.models.rope import Rope, Yarn
from decodax.train import fit_codebooks, fit_features, fit_order
from decodax.train.k_means import k_means
from decodax.train.samples import observed
from tests.caches.small import DEEP, PROMPTS


def test_codes_are_those_of_squat() -> None:
    """Of `generate_At_inv` and `squat_lagrangian` of Red-Hat-AI-Innovation-Team/SQuat at ff91f13, with the 6 largest
    singular values of 80 queries, 8 channels at a time."""
    random = np.random.RandomState(0)
    q = random.standard_normal((1, 2, 80, 24)).astype(np.float32) * np.linspace(3, .1, 24).astype(np.float32)
    k = random.standard_normal((1, 2, 64, 24)).astype(np.float32)
    codec = SQuatCodec(2, 2, 32, 8, 6, 0.001)
    own = codec.quantize_keys(jnp.asarray(k[0]), codec.weighing(jnp.einsum("gti,gtj->gij", q[0], q[0])))
    codes = np.asarray(unpack(own.codes, 2))
    assert hashlib.sha256(np.ascontiguousarray(codes).tobytes()).hexdigest()[:16] == "bf6647a9e19204bd"
    np.testing.assert_allclose([own.steps.sum(), own.lows.sum()], [133.80005, -200.57195], rtol=1e-5)
    plain = SQuatCodec(2, 2, 32, 8, 6, 0.0)
    other = plain.quantize_keys(jnp.asarray(k[0]), plain.weighing(jnp.zeros((2, 24, 24))))
    assert (np.asarray(unpack(other.codes, 2)) != codes).any()


@pytest.mark.wide
def test_salience_and_numbers_are_those_of_zipcache() -> None:
    """Of `MyLlamaFlashAttention2`, `true_mixedprec_compress_channelwise` and
    `true_channel_separate_mixedprec_tokenwise_compress` of ThisisBillhe/ZipCache at b6932b9, with 7 probes of 40
    queries, and for values one head."""
    random = np.random.RandomState(0)
    q, k, v = (jnp.asarray(random.standard_normal((heads, 40, 8)).astype(np.float32)) for heads in (4, 2, 1))
    at = jnp.array([36, 37, 38, 39, 3, 20, 11, 7])
    paid = salience(q[:, at].swapaxes(0, 1) * 8 ** -0.5, at, jnp.arange(8) < 7, k, jnp.int32(40))
    np.testing.assert_allclose(paid[1, :4], [0.03132255, 0.03167234, 0.021618, 0.0203061], atol=1e-6)
    np.testing.assert_allclose(paid[0, 35:], [0.04050162, 0.05761633, 0.04362181, 0.07701998, 0.02640369], atol=1e-6)
    low = [[4, 5, 6, 8, 11, 12, 13, 15, 16, 18, 19, 20, 21, 23, 24, 27],
           [4, 5, 6, 7, 8, 10, 12, 13, 14, 15, 17, 19, 24, 26, 27, 29]]
    assert np.sort(np.argsort(paid)[:, :16]).tolist() == low
    kind, valid = ZipCacheConfig(), jnp.arange(48) < 40
    assert kind.tables(100)[0][40] == 38 and kind.tables(100)[1][40] == 2 and kind.each(40) == (24, 16)
    both = jnp.pad(jnp.concatenate([k[:1], v], -1), ((0, 0), (0, 8), (0, 0)), constant_values=9)
    split = kind.split(both, jnp.pad(paid[:1], ((0, 0), (0, 8))), valid, 16, (32, 24), 8)
    back = np.zeros((40, 16), np.float32)
    for own, bits, places in zip(split, (4, 2), (sorted(set(range(40)) - set(low[0])), low[0]), strict=True):
        back[places] = restored(own, jnp.zeros(own.keys.shape[1], jnp.int32), bits, jnp.float32)[0, :len(places)]
    np.testing.assert_allclose(back[5, :4], [-0.38835275, -0.97746485, -0.61697859, -0.33717787], atol=1e-5)
    np.testing.assert_allclose(back[5, 8:12], [-0.54391307, 1.72117126, 0.84945995, 1.98873174], atol=1e-5)
    np.testing.assert_allclose(np.abs(back).reshape(40, 2, 8).sum((0, 2)), [253.747757, 262.102783], rtol=1e-5)


def test_a_graded_cache_holds_few_bytes() -> None:
    """At 8192 tokens and heads of 128: codes, steps and the latest tokens, over float16's."""
    cache = jax.eval_shape(lambda: ZipCacheConfig()(((8, 128),) * 2, 1, 8192, jnp.float16))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert held <= 0.27 * 2 * 8 * 8192 * 256 * 2


ROTATED = {
    2: (0.8, [0.47244284, 0.6419524, -0.34149414, 4.02415323], [0.4120183, 1.23415363, 0.08202338, 0.57606506],
        (399.1210022, 280.759552)),
    4: (1.0, [0.76806957, 0.35807711, -0.91079551, 4.8353777], [0.48366994, 1.71734798, -0.01084709, 0.89473772],
        (440.64502, 311.12097))}
"""By bits: the clip; numbers of a key and of a value, and the sums of the magnitudes of all, by `fake_quant` of
ZunhaiSu/RotateKV at 3055e2b with groups of 8, between its rotations and its order of channels."""


@pytest.mark.wide
@pytest.mark.parametrize("bits", ROTATED)
def test_numbers_are_those_of_rotatekv(bits: int) -> None:
    random = np.random.RandomState(0)
    k, v = (random.standard_normal((1, 4, 6, 16)).astype(np.float32)[0] for _ in range(2))
    k[..., 3] *= 9
    clip, key, value, sums = ROTATED[bits]
    codec = RotateKVCodec(Constant(np.random.RandomState(1).permutation(64)[None]), bits, 8, clip, 2, 0)
    shape, span = KVLayer(4, 16), Span(jnp.int32(0), None, 0)
    codec.check(shape)
    back = codec.decode(shape, codec.encode(shape, jnp.concatenate([k, v], -1), span), jnp.float32, span)
    np.testing.assert_allclose(back[1, 2, :4], key, atol=1e-5)
    np.testing.assert_allclose(back[3, 5, 16:20], value, atol=1e-5)
    np.testing.assert_allclose([jnp.abs(back[..., :16]).sum(), jnp.abs(back[..., 16:]).sum()], sums, rtol=1e-5)


@pytest.mark.full
def test_tokens_of_the_largest_activations_stay_whole() -> None:
    """Against the streams that the network shows."""
    model, params, text = DEEP.model, DEEP.params, PROMPTS[0]
    shapes = layers_of(model)
    tokens = jnp.zeros((2, 64), jnp.int32).at[0, :41].set(jnp.array(text)).at[1, :26].set(jnp.array(PROMPTS[1]))
    length = jnp.array([41, 26])
    window = causal(tokens, jnp.zeros(2, jnp.int32), jnp.arange(64)[None] < length[:, None])
    out = model.apply(params, window, Listening())
    assert out.layers is not None
    kept = tuple(jnp.concatenate(entry, -1).swapaxes(1, 2) for entry in out.entries)
    codec = RotateKVCodec(Constant(np.arange(8)[None].repeat(2, 0)), sinks=5)
    found = codec.study(shapes, kept, length, [None] * 2, ReadPrompt(model, params, tokens))
    x = np.asarray(params["embed"])[np.asarray(tokens)]
    for layer, stream in enumerate((x, np.asarray(out.layers[0]))):
        for row, n in enumerate((41, 26)):
            largest = np.argsort(-np.abs(stream[row, :n]).ravel(), kind="stable")[:5] // 16
            assert sorted(np.asarray(found[layer].at[row]).tolist()) == sorted(largest.tolist())
    span = Span(jnp.int32(0), jax.tree.map(lambda x: x[0], found[0]), 0)
    back = codec.decode(shapes[0], codec.encode(shapes[0], kept[0][0], span), jnp.float32, span)
    same = (np.abs(np.asarray(back - kept[0][0])) < 1e-6).all((0, 2))
    assert set(np.asarray(span.study.at).tolist()) <= set(np.flatnonzero(same)) and same.sum() < 41
    later = codec.decode(shapes[0], codec.encode(shapes[0], kept[0][0], span.replace(start=jnp.int32(64))), jnp.float32,
                         span.replace(start=jnp.int32(64)))
    assert (np.abs(np.asarray(later - kept[0][0])) > 1e-6).any()


def test_the_transform_is_its_own_inverse_and_spreads() -> None:
    h = hadamard(8)
    np.testing.assert_allclose(h @ h, np.eye(8), atol=1e-6)
    assert np.allclose(np.abs(h), 8 ** -0.5)


@pytest.mark.parametrize("rope", [None, Rope(8), Rope(6, interleaved=True), Rope(8, scaling=Yarn(4.0, 64))])
def test_keys_turn_back_to_what_they_were(rope: Any) -> None:
    shape, x = KVLayer(2, 8, rope=rope), jax.random.normal(jax.random.key(0), (2, 5, 8))
    there = after_rotation(shape, x, jnp.int32(7))
    np.testing.assert_allclose(before_rotation(shape, there, jnp.int32(7)), x, atol=1e-5)
    assert rope is None or not np.allclose(there, x, atol=1e-2)


TEXTS = [*PROMPTS, np.random.default_rng(7).integers(0, 16, 200).tolist()]


def test_centroids_are_those_of_weighted_k_means() -> None:
    """A fixed point of Lloyd's iteration, and the points themselves where there are few."""
    random = np.random.default_rng(0)
    x, weights = random.standard_normal((400, 2)), random.random(400)
    centres = k_means(x, weights, 8, 100, np.random.default_rng(1))
    of = np.square(x[:, None] - centres).sum(-1).argmin(1)
    np.testing.assert_allclose(centres, [np.average(x[of == i], 0, weights[of == i]) for i in range(8)], atol=1e-9)
    few = k_means(np.array([[1.0], [2.0], [1.0]]), np.ones(3), 4, 10, random)
    assert sorted(few.ravel().tolist()) == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.full
def test_more_bits_of_coupled_channels_are_nearer() -> None:
    own = observed(DEEP, TEXTS)
    shape = layers_of(DEEP.model)[1]
    keys = jnp.asarray(own[1].keys.swapaxes(0, 1))
    both = jnp.concatenate([after_rotation(shape, keys, jnp.int32(0)), own[1].values.swapaxes(0, 1)], -1)
    span, off = Span(jnp.int32(0), None, 1), []
    for channels, bits in ((4, 2), (2, 2), (2, 4)):
        codec = CQCodec(fit_codebooks(DEEP, TEXTS, channels, bits, fisher=bits == 4))
        codec.check(shape)
        codes = codec.encode(shape, both, span)
        assert codes[0].shape[-1] * 8 >= 4 // channels * bits
        off.append(float(jnp.square(codec.decode(shape, codes, jnp.float32, span) - both).mean()))
    assert off[0] > off[1] > off[2]


def test_gradients_weigh_what_the_loss_hangs_on() -> None:
    """By finite differences, of a value."""
    own = observed(DEEP, [PROMPTS[1]], gradients=True)
    assert all((x.key_weights >= 0).all() and x.value_weights.max() > 0 for x in own)
    assert float(own[1].value_weights[-1].max()) == 0       # the last token predicts nothing that is there


@pytest.mark.wide
def test_features_are_the_best_that_there_are() -> None:
    """Less error than other directions, and as much as the singular values say that are left out."""
    own, features = observed(DEEP, TEXTS), fit_features(DEEP, TEXTS, 3, 0.5)
    assert features.keys.value.shape == (2, 8, 3) and features.values.value.shape == (2, 8, 4)
    for layer in (0, 1):
        flat = own[layer].keys.reshape(-1, 8)
        basis = features.keys.value[layer]
        off = np.square(flat - flat @ basis @ basis.T).sum()
        np.testing.assert_allclose(off, np.square(np.linalg.svd(flat)[1][3:]).sum(), rtol=1e-3)
    shape = layers_of(DEEP.model)[0]
    full = CSKVCodec(fit_features(DEEP, TEXTS, 8, 8))
    x, span = jax.random.normal(jax.random.key(0), (2, 6, 8)), Span(jnp.int32(3), None, 0)
    np.testing.assert_allclose(full.decode(shape, full.encode(shape, x, span), jnp.float32, span), x, atol=1e-4)


def test_the_order_is_that_of_sums() -> None:
    order = fit_order(DEEP, TEXTS)
    assert (np.sort(order.value) == np.arange(8)).all()
    flat = observed(DEEP, TEXTS)[1].keys.reshape(-1, 8) @ hadamard(8)
    assert (np.diff(flat.sum(0)[order.value[1]]) >= -1e-3).all()


def test_a_codec_without_its_measurements_is_refused() -> None:
    shape = KVLayer(2, 4, queries=4)
    books = Codebooks(Constant(np.zeros((1, 2, 1, 4, 4))), Constant(np.zeros((1, 2, 1, 4, 3))))
    for expected, wrong in (
            (r"^codebooks: got none, takes what decodax.train.fit_codebooks measures", lambda: caches.make("cq")),
            (r"^features: got int, takes", lambda: caches.make("cskv", features=3)),
            (r"^order: got none", lambda: caches.make("rotatekv")),
            (r"^codebooks: got values of 2 heads of 3", lambda: CQCodec(books).check(shape)),
            (r"^features: got keys", lambda: CSKVCodec(KVFeatures(*(Constant(np.zeros((1, 3, 2))),) * 2)).check(shape)),
            (r"^heads: got 6 channels", lambda: RotateKVCodec(Constant(np.zeros((1, 6)))).check(KVLayer(2, 3))),
            (r"^cache: squat takes a model that says", lambda: SQuatCodec().check(KVLayer(2, 32))),
            (r"^texts: got none", lambda: fit_order(DEEP, [])),
            (r"^coding: got cq, takes a codec that does not ask", lambda: _pruned(books))):
        with pytest.raises(ValueError, match=expected):
            wrong()
    assert Constant(np.ones(2)) == Constant(np.ones(2)) != Constant(np.zeros(2))


def _pruned(books: Codebooks) -> Any:
    return QuantizedPruningConfig(Eviction(Top(KeyNorm()), 8), QuantizedConfig(CQCodec(books), 8, "cq"))
