"""Mixtures of experts. Logits and greedy tokens against transformers are tests of `test_families.py`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.models import Experts, Transformer, llama
from decodax.models.experts import mix
from decodax.models.layers import ACTIVATIONS
from decodax.models.routing import route
from tests.models.small import PROMPTS
from tests.small_models import random_lm


@functools.cache
def mixture() -> Any:
    config = llama(vocab=64, width=16, layers=2, heads=4, kv_heads=2, mlp=24)
    layer = dataclasses.replace(config.layers[0], experts=Experts(count=6, chosen=2, width=12))
    return random_lm(Transformer(dataclasses.replace(config, layers=(config.layers[0], layer))), 2)


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts_for_every_token() -> None:
    """However many choose the same one: here all of them choose the first."""
    E, D, width, n = 5, 8, 6, 37
    e = Experts(count=E, chosen=2, width=width)
    keys = jax.random.split(jax.random.key(0), 5)
    gate, up = (jax.random.normal(key, (E, D, width)) for key in keys[:2])
    down, x = jax.random.normal(keys[2], (E, width, D)), jax.random.normal(keys[3], (n, D))
    logits = jax.random.normal(keys[4], (n, E)).at[:, 0].set(5.0)
    which, weights = route(logits, e)
    got = jax.jit(lambda *a: mix(*a, ACTIVATIONS["silu"]))(x, which, weights, gate, up, down)
    every = np.stack([(np.asarray(jax.nn.silu(x @ gate[i])) * (x @ up[i])) @ down[i] for i in range(E)], 1)
    p = np.exp(np.asarray(logits))
    for row in range(n):
        best = np.argsort(-p[row], kind="stable")[:2]
        want = (p[row, best] / p[row, best].sum()) @ every[row, best]
        np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=2e-5)


def test_a_token_is_computed_to_the_same_bits_in_any_company() -> None:
    e = Experts(count=6, chosen=3, width=24)
    keys = jax.random.split(jax.random.key(0), 6)
    gate, up = (jax.random.normal(key, (6, 32, 24)) for key in keys[:2])
    down, router = jax.random.normal(keys[2], (6, 24, 32)), jax.random.normal(keys[3], (32, 6))
    run = jax.jit(lambda x, logits: mix(x, *route(logits, e), gate, up, down, jax.nn.silu))
    x, others = jax.random.normal(keys[4], (50, 32)), jax.random.normal(keys[5], (50, 32))
    logits = x @ router
    whole = np.asarray(run(x, logits))
    for i in range(0, 50, 7):
        np.testing.assert_array_equal(run(x[i:i + 1], logits[i:i + 1])[0], whole[i])
    back = slice(None, None, -1)
    np.testing.assert_array_equal(run(x[back], logits[back])[back], whole)
    company = run(others.at[11].set(x[11]), (others @ router).at[11].set(logits[11]))
    np.testing.assert_array_equal(company[11], whole[11])


def test_a_mixture_can_be_trained() -> None:
    def loss(params: Any) -> jax.Array:
        return mixture().model.forward(params, jnp.array(PROMPTS[:1]))[..., 3].sum()

    found = jax.jit(jax.grad(loss))(mixture().params)["layers"]["1"]["mlp"]
    for part in ("router", "gate", "up", "down"):
        assert np.abs(found[part]["kernel"]).sum() > 0
