"""Tokens that a predictor holds important."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches import Butler, make
from decodax.caches.sparse.token_butler import PredictedReading, TokenButlerCache
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import window_attention
from decodax.train import fit_token_butler
from decodax.train.token_butler import Scored, estimated, first_butler
from tests.caches.small import BUTLER, DEEP, PROMPTS

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "token_butler.json").read_text())
"""By predictor.py and utils.py of abdelfattah-lab/TokenButler at d74798d, with rotations as transformers 4 has them."""
T, WIDTH, HEADS, LAYERS, MARKS = 30, 32, 2, 3, 4
TEXTS = [np.random.default_rng(i).integers(0, 16, 24).tolist() for i in range(4)]


def given() -> tuple[np.ndarray, Butler]:
    """What the predictor reads, and its weights: drawn as for the authors' code, in the order of its parameters."""
    r = np.random.RandomState(0)
    x = r.standard_normal((1, T, WIDTH)).astype(np.float32)
    x = x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6)

    def draw(*shape: int) -> np.ndarray:
        spread = shape[-1] ** 0.5 if len(shape) > 1 else 3
        return (r.standard_normal(shape) / spread).astype(np.float32).round(3).T

    order = [draw(*shape) for shape in ((16, 32), (16, 16), (16, 16), (16, 16), (16,), (16,), (32, 16), (32,), (32, 32),
                                        (32,), (6, 32), (24, 6), (6, 32), (24, 6))]
    for i in (11, 13):      # their queries and keys of all heads lie one behind the other, of each head all layers
        order[i] = order[i].reshape(6, HEADS, LAYERS, MARKS)[:, :, 1:]
    names = ("reduce", "query", "key", "value", "scale", "shift", "up", "up_bias", "down", "down_bias", "query_in",
             "query_out", "key_in", "key_out")
    return x, Butler(**dict(zip(names, map(jnp.asarray, order), strict=True)), norm=jnp.ones(WIDTH), theta=500.0)


def made() -> tuple[np.ndarray, np.ndarray]:
    x, butler = given()
    window = causal(jnp.zeros((1, T), jnp.int32), jnp.zeros(1, jnp.int32))
    attend = lambda q, k, v, scale: (window_attention(q, k, v, window.visible(), window.positions, scale=scale), ())
    queries, keys, _ = jax.jit(lambda x: butler(x, window.positions, attend))(jnp.asarray(x))
    return np.asarray(queries[0]), np.asarray(keys[0])


def test_the_predictor_is_that_of_the_authors() -> None:
    queries, keys = made()
    logits = np.einsum("qhlm,khlm->lhqk", queries, keys) * MARKS ** -0.5
    np.testing.assert_allclose(logits.sum(-1), WANTED["logits"], atol=2e-3)


@pytest.mark.parametrize("behind", [0, 3])
def test_a_query_reads_the_tokens_that_it_reads_there(behind: int) -> None:
    """A third of the text so far and the first two, of each head, whether they are cached or in the window."""
    queries, keys = made()
    _, butler = given()
    kind = PredictedReading(0.3, 2, butler.layer, butler.width)
    r = np.random.default_rng(0)
    k, q = r.standard_normal((2, 1, T, HEADS, 8)).astype(np.float32)
    v = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (1, T, HEADS, T))

    @jax.jit
    def reads(at: jax.Array, first: jax.Array) -> jax.Array:
        """What is read by the last of `behind + 1` tokens from `first` on."""
        cache = kind([KVLayer(HEADS, 8, T, queries=HEADS)] * LAYERS, 1, T, jnp.float32)
        assert isinstance(cache, TokenButlerCache)
        both = lambda x, marks, layer: jnp.concatenate([x, jnp.asarray(marks)[None, :, :, layer - 1]], -1)
        entries = [KVEntry(k if layer == 0 else both(k, keys, layer), v) for layer in range(LAYERS)]
        own = butler.layer
        entries.append(KVEntry(*(jnp.zeros((1, T, *own[:2])),) * 2))
        slots = jnp.arange(T, dtype=jnp.int32)[None]
        cache = cache.commit(entries, jnp.where(slots < first, slots, -1))
        window = causal(jnp.zeros((1, behind + 1), jnp.int32), cache.length)
        some = lambda x: jax.lax.dynamic_slice_in_dim(x, first, behind + 1, 1)
        return jnp.stack([cache.attend(layer, some(both(q, queries, layer)), some(entries[layer].keys), some(v), window,
                                       scale=8 ** -0.5)[0][0, -1] for layer in (1, 2)])

    for i, at in enumerate((5, 17, 29)):
        found = np.asarray(reads(jnp.int32(at), jnp.int32(at - behind)))
        for layer, head in np.ndindex(2, HEADS):
            kept = WANTED["kept"][layer][head][i]
            assert np.flatnonzero(found[layer, head]).tolist() == kept
            scores = np.exp(k[0, kept, head] @ q[0, at, head] * 8 ** -0.5)
            np.testing.assert_allclose(found[layer, head, kept], scores / scores.sum(), atol=1e-5)


def test_true_logits_are_those_of_the_model() -> None:
    """Behind a softmax they give what the layer's attention gives."""
    tokens = jnp.asarray(TEXTS[:1], jnp.int32)
    _, wanted = estimated(DEEP.model, DEEP.params, BUTLER, tokens)
    window = causal(tokens, jnp.zeros(1, jnp.int32))
    entry = DEEP.model.apply(DEEP.params, window, Scored()).entries[1]
    r = np.random.default_rng(0).standard_normal((1, 24, 2, 4)).astype(np.float32)
    out = window_attention(entry.queries, entry.keys, jnp.asarray(r), window.visible(), window.positions, scale=1.0)
    weights = jax.nn.softmax(jnp.where(jnp.tri(24, dtype=bool), wanted[0, 0], -jnp.inf), axis=-1)
    np.testing.assert_allclose(out[0], jnp.einsum("hqk,khd->qhd", weights, r[0].repeat(2, 1)), atol=1e-4)


@pytest.mark.wide
def test_training_brings_estimates_nearer_and_keeps_what_attention_wants(tmp_path: Path) -> None:
    """Also of a text that it has not seen; the predictor is written and read."""
    butler = fit_token_butler(DEEP, TEXTS[:3], steps=120, rate=1e-2, reduce=2, inner=16, width=4)
    butler.save(tmp_path / "butler.npz")
    again = make("token-butler", butler=str(tmp_path / "butler.npz")).butler      # type: ignore[attr-defined]
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again, butler)) and again.theta == butler.theta
    first = first_butler(DEEP, reduce=2, inner=16, width=4)
    for text in TEXTS[2:]:
        error = []
        for each in (first, butler):
            found, wanted = estimated(DEEP.model, DEEP.params, each, jnp.asarray([text], jnp.int32))
            error.append(float(jnp.square(found - wanted).mean()))
        assert error[1] < 0.7 * error[0]


def test_a_butler_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^butler: got that of a model with 3 layers of 2 heads, 32 wide, takes one "
                                         r"for 2 layers of 4, 16 wide"):
        dx.generate(DEEP, PROMPTS, max_new_tokens=2, cache=make("token-butler", butler=given()[1]))
