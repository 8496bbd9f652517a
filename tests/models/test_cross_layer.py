"""Layers that read the keys and values of earlier ones (CLA, YOCO)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import caches
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.io.saving import save_model
from decodax.models import Transformer, cla, llama, yoco
from tests.by_hand import logits
from tests.caches.small import OPTIONS, PROMPTS
from tests.matrix import often
from tests.small_models import random_lm

BASE = llama(vocab=16, width=16, layers=4, heads=4, kv_heads=2, mlp=24, context=256)
CONFIGS = {"cla": cla(BASE), "cla of 3": cla(BASE, 3), "yoco": yoco(BASE, 8)}


def lm(name: str) -> LM:
    return random_lm(Transformer(CONFIGS[name]), 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_by_hand(name: str) -> None:
    own = lm(name)
    out = own.model.forward(own.params, jnp.asarray([PROMPTS[0]]))[0]
    np.testing.assert_allclose(out, logits(CONFIGS[name], own.params, PROMPTS[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "cache"), often([("yoco", "snapkv")], [
    (name, cache) for name in CONFIGS for cache in ("snapkv", "kivi", "streaming-llm")]))
def test_drafts_give_the_tokens_of_plain_decoding_with_the_same_cache(name: str, cache: str) -> None:
    one = lambda **more: dx.generate(lm(name), PROMPTS, cache=caches.make(cache, **OPTIONS[cache]), max_new_tokens=20,
                                     seed=5, temperature=[0.0, 0.9, 0.0], **more).tokens.tolist()
    assert one(algorithm="prompt-lookup") == one()


@pytest.mark.wide(but=("cla of 3-2",))
@pytest.mark.parametrize(("name", "layers"), [("cla", 2), ("cla of 3", 2), ("yoco", 3)])
def test_a_cache_holds_the_layers_with_keys_and_values(name: str, layers: int) -> None:
    own = lm(name)
    assert len(Job.begin(Request.read(own, PROMPTS[:1])).state.cache.kv) == layers
    assert sum("k" in layer["attn"] for layer in own.params["layers"].values()) == layers


def test_methods_that_need_all_layers_with_keys_are_refused(tmp_path: Any) -> None:
    own = lm("cla")
    with pytest.raises(ValueError, match=r"^reads: got 1 for layer 2, takes an earlier layer with keys"):
        dataclasses.replace(CONFIGS["cla"], layers=(*CONFIGS["cla"].layers[:2], dataclasses.replace(
            BASE.layers[0], reads=1)))
    with pytest.raises(ValueError, match=r"^layers: some read the keys and values of others, so none can be left out"):
        dx.generate(own, PROMPTS, algorithm=dx.algorithms.make("self-speculative", own, skip=(1,)), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"^config: as a llama configuration it describes another model"):
        save_model(tmp_path, own.model, own.params)
    with pytest.raises(ValueError, match=r"^share: got 0"):
        cla(BASE, 0)


@pytest.mark.wide
def test_gradients_reach_every_weight() -> None:
    own = lm("cla")
    loss = lambda params: own.model.forward(params, jnp.asarray(PROMPTS[:1])).std()
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(jax.grad(loss)(own.params)))
