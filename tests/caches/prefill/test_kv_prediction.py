"""Prompts that a smaller model reads, and what maps make of its cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import caches
from decodax.caches import KVMaps
from decodax.caches.prefill.listening import Listening
from decodax.caches.shapes import layers_of
from decodax.core.window import causal
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import Chunks, Rope, Transformer, cla, llama
from decodax.train import fit_kv_prediction, train_kv_prediction
from decodax.train.kv_prediction import auxiliary_layers, losses
from tests.caches.small import DEEP, GUESSED, GUESSES, ITSELF, PROMPTS
from tests.small_models import random_lm

TEXTS = [np.random.default_rng(i).integers(0, 16, 60).tolist() for i in range(4)]


def other(vocab: int = 16, **options: Any) -> LM:
    """One layer of one head that is rotated in another way."""
    config = llama(vocab=vocab, width=12, layers=1, heads=2, kv_heads=1, mlp=20, head_dim=6, context=256)
    rope = Rope(4, theta=50.0, interleaved=True, **options)
    config = dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], rope=rope),))
    return random_lm(Transformer(config), 7)


def turn(x: np.ndarray, theta: float, width: int, interleaved: bool, sign: int) -> np.ndarray:
    """`f[T, G, d]`, rotated forwards or back, written out pair by pair."""
    out = x.astype(np.float64).copy()
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        angle = sign * np.arange(len(x))[:, None] * theta ** (-2 * i / width)
        out[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
        out[..., b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)
    return out


@pytest.mark.wide
def test_a_cache_holds_what_the_maps_make_of_the_auxiliary_models() -> None:
    """Of a model with other heads and another rotation, for prompts of several lengths."""
    small, r = other(), np.random.default_rng(3)
    keys, values = (tuple(r.standard_normal((7, 8)).astype(np.float32) for _ in range(2)) for _ in range(2))
    kind = caches.make("kv-prediction", auxiliary=small, maps=KVMaps(keys=keys, values=values, layers=(0, 0)))
    cache = Job.begin(Request.read(DEEP, PROMPTS, cache=kind, max_new_tokens=3)).state.cache
    assert cache.length[:3].tolist() == [len(prompt) - 1 for prompt in PROMPTS]
    for row, prompt in enumerate(PROMPTS):
        n = len(prompt) - 1
        window = causal(jnp.asarray([prompt[:-1]], jnp.int32), jnp.zeros(1, jnp.int32))
        entry = small.model.apply(small.params, window, Listening()).entries[0]
        k, v = np.asarray(entry.keys[0]), np.asarray(entry.values[0])
        k = turn(k, 50.0, 4, True, -1)
        for layer in range(2):
            found = np.asarray(cache.base.kv[layer])[row, :, :n].swapaxes(0, 1)
            wanted = k.reshape(n, 6) @ keys[layer][:6] + keys[layer][6]
            np.testing.assert_allclose(found[..., :4], turn(wanted.reshape(n, 2, 4), 10_000.0, 4, False, 1), atol=1e-3)
            wanted = v.reshape(n, 6) @ values[layer][:6] + values[layer][6]
            np.testing.assert_allclose(found[..., 4:], wanted.reshape(n, 2, 4), atol=1e-3)


def test_each_layer_reads_the_layer_that_it_reads_in_the_paper() -> None:
    """By the configurations of apple/corenet at 7bbedac, projects/kv-prediction."""
    assert auxiliary_layers(28, 16) == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12,
                                        13, 14, 15)
    assert auxiliary_layers(36, 28) == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, *range(8, 28))
    assert auxiliary_layers(28, 7) == tuple(i for i in range(7) for _ in range(4))


def test_a_model_that_predicts_itself_loses_nothing() -> None:
    """The maps that are measured of it are those that leave all as it is, and all losses say so."""
    made = fit_kv_prediction(DEEP, DEEP, TEXTS, damping=1e-9)
    assert made.layers == (0, 1)
    for found, wanted in zip(made.keys + made.values, ITSELF.keys + ITSELF.values, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3)
    of = tuple(layers_of(DEEP.model))
    tokens = np.asarray([TEXTS[0] + [0, 0, 0, 0]], np.int32)
    error, loss, own = losses(DEEP.model, DEEP.model, of, of, (DEEP.params, DEEP.params), ITSELF, jnp.asarray(tokens),
                         jnp.int32(60))
    assert error < 1e-4
    np.testing.assert_allclose((loss, own), (-dx.score(DEEP, [TEXTS[0]]).mean[0],) * 2, rtol=1e-4)


@pytest.mark.wide
def test_training_lowers_the_losses() -> None:
    found = []
    for steps in (0, 60):
        made = fit_kv_prediction(DEEP, other(), TEXTS, steps=steps, rate=1e-2)
        of, to = (tuple(layers_of(each.model)) for each in (other(), DEEP))
        each = [losses(DEEP.model, other().model, of, to, (DEEP.params, other().params), made,
                       jnp.asarray([text], jnp.int32), jnp.int32(60)) for text in TEXTS]
        found.append(np.asarray(each).mean(0))
    assert found[1][:2].sum() < 0.97 * found[0][:2].sum() and (found[1][:2] < found[0][:2]).all()
    assert found[1][2] == found[0][2]       # the auxiliary model stays as it is


@pytest.mark.wide
def test_an_auxiliary_model_is_trained_with_its_maps() -> None:
    """By all three losses, which are less than with maps that are trained as long alone; the other model stays."""
    before, shapes = [np.array(x) for x in jax.tree.leaves(DEEP.params)], tuple(layers_of(DEEP.model))
    alone = fit_kv_prediction(DEEP, other(), TEXTS, steps=60, rate=1e-2), other()
    both = train_kv_prediction(DEEP, other(), TEXTS, steps=60, rate=1e-2)
    found = [np.mean([losses(DEEP.model, lm.model, tuple(layers_of(lm.model)), shapes, (DEEP.params, lm.params), maps,
                             jnp.asarray([text], jnp.int32), jnp.int32(60)) for text in TEXTS], 0)
             for maps, lm in (alone, both)]
    assert (found[1] < found[0]).all()
    for was, x in zip(before, jax.tree.leaves(DEEP.params), strict=True):
        np.testing.assert_array_equal(was, x)
    out = dx.generate(DEEP, PROMPTS, max_new_tokens=2, cache=caches.make("kv-prediction", auxiliary=both[1],
                                                                         maps=both[0]))
    assert out.lengths.tolist() == [2] * 3


@pytest.mark.wide
def test_questions_after_a_context_are_read_by_the_model_itself() -> None:
    """So a model that predicts itself answers as if it had read both."""
    kind = caches.make("kv-prediction", auxiliary=DEEP, maps=ITSELF)
    out = dx.generate(DEEP, [[5, 6], [7]], context=[1, 2, 3, 4], cache=kind, max_new_tokens=6)
    whole = dx.generate(DEEP, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7]], max_new_tokens=6)
    assert out.tokens.tolist() == whole.tokens.tolist()


def test_models_and_maps_that_do_not_fit_are_refused_by_name() -> None:
    small = other()
    shared = Transformer(cla(llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24), share=2))
    sharing = LM(model=shared, params=shared.init_params(jax.random.key(0)), vocab_size=16)
    run = lambda lm=DEEP, auxiliary=GUESSES, maps=GUESSED: dx.generate(
        lm, PROMPTS, max_new_tokens=2, cache=caches.make("kv-prediction", auxiliary=auxiliary, maps=maps))
    for message, wrong in (
            (r"^auxiliary: got none, takes a smaller model", lambda: caches.make("kv-prediction", maps=GUESSED)),
            (r"^maps: got none, takes what decodax.train.kv_prediction", lambda: caches.make("kv-prediction",
                                                                                          auxiliary=GUESSES)),
            (r"^auxiliary: got a model of 12 ids, the one that answers has 16", lambda: run(auxiliary=other(12))),
            (r"^auxiliary: got 'numerals', whose tokens are not those of 'pycode'", lambda: run(
                dx.load("pycode"), dx.load("numerals"))),
            (r"^maps: got keys \[9, 8\] for layer 0, takes \[7, 8\]", lambda: run(auxiliary=small)),
            (r"^maps: got 1 of keys, 2 of values", lambda: run(maps=GUESSED.replace(keys=GUESSED.keys[:1]))),
            (r"^maps: got layer 1 of the auxiliary model for layer 1, it has 1", lambda: run(maps=ITSELF)),
            (r"^auxiliary: got a model with dual chunk attention", lambda: run(auxiliary=other(chunks=Chunks(8, 2)))),
            (r"^lm: got a model with layers that read the keys and values of others", lambda: run(sharing)),
            (r"^layers: got \(0, 1\), takes for each of 2 layers one of the 1", lambda: fit_kv_prediction(
                DEEP, GUESSES, TEXTS, layers=(0, 1))),
            (r"^steps: got -1", lambda: fit_kv_prediction(DEEP, GUESSES, TEXTS, steps=-1)),
            (r"^steps: got 0, takes 1 or more", lambda: train_kv_prediction(DEEP, GUESSES, TEXTS, steps=0)),
            (r"^auxiliary: got weights that are no floating point numbers", lambda: train_kv_prediction(
                DEEP, dataclasses.replace(GUESSES, params=jax.tree.map(lambda x: x.astype(jnp.int8), GUESSES.params)),
                TEXTS)),
            (r"^texts: got none", lambda: fit_kv_prediction(DEEP, GUESSES, []))):
        with pytest.raises(ValueError, match=message):
            wrong()
