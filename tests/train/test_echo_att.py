"""Layers that repeat the attention of others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches.prefill.listening import Listening
from decodax.core.window import causal
from decodax.io.load import LM
from decodax.models import Transformer, cla, echo_att, llama
from decodax.train import attention_similarity, echo_groups, fit_echo_att
from tests.caches.small import DEEP, PROMPTS, SMALL
from tests.small_models import random_lm

PLAIN = llama(vocab=16, width=16, layers=5, heads=4, kv_heads=2, mlp=24, context=256)
GROUPS = ((1, 2, 3),)
TEXTS = [np.random.default_rng(i).integers(0, 16, 24).tolist() for i in range(4)]


@functools.cache
def made(shared: bool = True) -> LM:
    return random_lm(Transformer(echo_att(PLAIN, GROUPS) if shared else PLAIN))


def test_attention_is_that_of_the_first_layer_of_a_group() -> None:
    """With values of each layer's own: against a softmax of the first one's scores, written out."""
    lm, seen = made(), []
    window = causal(jnp.asarray(TEXTS[:1], jnp.int32), jnp.zeros(1, jnp.int32))

    class Noting(Listening):
        def attend(self, layer, q, k, v, window, *, scale, **options):
            seen.append((q * scale, k, v))
            return super().attend(layer, q, k, v, window, scale=scale, **options)

    out = lm.model.apply(lm.params, window, Noting())
    q, k, _ = seen[1]
    weights = jax.nn.softmax(jnp.where(jnp.tri(24, dtype=bool), jnp.einsum(
        "qhd,khd->hqk", q[0], k[0].repeat(2, 1)), -jnp.inf), axis=-1)
    for layer in (2, 3):
        before, own = out.layers[layer - 1], lm.params["layers"][str(layer)]
        norm = lambda x, scale: x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale
        v = (norm(before, own["attn_in"]["scale"])[0] @ own["attn"]["v"]["kernel"]).reshape(24, 2, 4)
        x = before[0] + jnp.einsum("hqk,khd->qhd", weights, v.repeat(2, 1)).reshape(24, -1) @ own["attn"]["o"]["kernel"]
        inside = norm(x, own["mlp_in"]["scale"])
        inside = jax.nn.silu(inside @ own["mlp"]["gate"]["kernel"]) * (inside @ own["mlp"]["up"]["kernel"])
        np.testing.assert_allclose(out.layers[layer][0], x + inside @ own["mlp"]["down"]["kernel"], atol=2e-4)
    assert set(lm.params["layers"]["2"]["attn"]) == {"v", "o"}


def test_a_cache_holds_the_keys_of_the_first_layer_alone() -> None:
    shapes = [x.shape for x in made().model.init_cache(1, 64).kv]
    assert shapes == [(1, 2, 64, 4 + 4), (1, 2, 64, 4 + 3 * 4 + 1), (1, 2, 64, 4 + 4)]
    assert sum(x[-1] for x in shapes) < 5 * 8


def test_layers_are_put_together_by_what_they_attend_to() -> None:
    """A layer that is a copy attends as the one before it where the residual stream is nearly the same."""
    lm = made(False)
    layers = {**lm.params["layers"], "2": jax.tree.map(lambda x: x, lm.params["layers"]["1"])}
    for name in ("1", "2"):
        own = layers[name]
        layers[name] = {**own, "attn": {**own["attn"], "o": jax.tree.map(lambda x: 1e-3 * x, own["attn"]["o"])},
                        "mlp": {**own["mlp"], "down": jax.tree.map(lambda x: 1e-3 * x, own["mlp"]["down"])}}
    lm = dataclasses.replace(lm, params={**lm.params, "layers": layers})
    found = attention_similarity(lm, TEXTS[:2])
    assert found[1, 2] > 0.99 > found[2, 3] and np.allclose(np.diag(found), 1) and np.allclose(found, found.T)
    assert echo_groups(found, 0.99) == ((1, 2),)
    # with attention that is the same nothing changes but what two nearly equal layers differ by
    made_of = fit_echo_att(lm, TEXTS, least=0.99)
    assert [layer.echoes for layer in made_of.model.config.layers] == [None, None, 1, None, None]
    np.testing.assert_allclose(dx.score(made_of, TEXTS).mean, dx.score(lm, TEXTS).mean, atol=5e-3)


@pytest.mark.wide
def test_distillation_brings_back_what_the_conversion_lost() -> None:
    texts = [np.tile(np.random.default_rng(0).permutation(16), 2)[i:i + 16].tolist() for i in range(6)]
    teacher = fit_echo_att(made(False), texts, groups=((1,),), steps=0, more=60, rate=1e-2)
    scores = [float(np.mean(dx.score(each, texts).mean)) for each in (
        teacher, fit_echo_att(teacher, texts, groups=GROUPS),
        fit_echo_att(teacher, texts, groups=GROUPS, steps=30, more=10, rate=3e-3))]
    assert scores[0] > scores[1] < scores[2]


def test_models_and_texts_that_do_not_fit_are_refused_by_name() -> None:
    reading = Transformer(cla(llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24), share=2))
    shared = LM(model=reading, params=reading.init_params(jax.random.key(0)), vocab_size=16)
    for message, wrong in (
            (r"^groups: got \(\(2, 1\),\), takes groups of the 5 layers", lambda: echo_att(PLAIN, [(2, 1)])),
            (r"^groups: got \(\(1, 2\), \(2, 3\)\)", lambda: echo_att(PLAIN, [(1, 2), (2, 3)])),
            (r"^echoes: got layers that repeat the attention of others", lambda: echo_att(cla(PLAIN), [(0, 2)])),
            (r"^cache: got a Evicting, takes a dense", lambda: dx.generate(made(), PROMPTS, cache="knorm:budget=9",
                                                                              max_new_tokens=2)),
            (r"^layers: some read the keys and values of others, or", lambda: made().model.pieces(made().params)),
            (r"^layers: some repeat the attention", lambda: made().model.outputs(made().params, 0)),
            (r"^texts: got none", lambda: attention_similarity(SMALL, [])),
            (r"^texts: got lengths \[5, 26, 41\]", lambda: fit_echo_att(DEEP, PROMPTS)),
            (r"^least: got 0.5, which no two", lambda: fit_echo_att(DEEP, TEXTS)),
            (r"^steps, more, batch, rate: got -1", lambda: fit_echo_att(DEEP, TEXTS, steps=-1)),
            (r"^lm: got a model with sliding windows", lambda: attention_similarity(shared, TEXTS)),
            (r"^lm: got a int", lambda: fit_echo_att(3, TEXTS))):
        with pytest.raises(ValueError, match=message):
            wrong()
