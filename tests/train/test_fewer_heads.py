"""Models of which several heads of keys and values became one."""

import ast
import csv
import dataclasses
import inspect
import json
import shutil
import tempfile
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import DecoderConfig, Layer, NormConfig, Rope, Transformer, cla, diffqkv, llama
from decodax.train import fit_kv_heads, mean_kv_heads

BASE = llama(vocab=16, width=16, layers=2, heads=8, kv_heads=4, head_dim=4, mlp=24, context=256)
CONFIGS = {
    "llama": BASE,
    "interleaved, half of the channels": dataclasses.replace(BASE, layers=(Layer(Rope(2, interleaved=True)),) * 2),
    "no rotation": dataclasses.replace(BASE, layers=(Layer(),) * 2, learned_positions=64, qkv_bias=True, out_bias=True,
                                       norm=NormConfig("layer", bias=True)),
    "shared layers": cla(BASE)}
PROMPTS = [np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((41, 26, 5))]


def made(config: DecoderConfig) -> LM:
    model = Transformer(config)
    keys = iter(jax.random.split(jax.random.key(3), 200))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x + 0.3 * jax.random.normal(next(keys), x.shape),
                          model.init_params(jax.random.key(5)))
    return LM(model=model, params=params, vocab_size=16)


def alike(lm: Any) -> LM:
    """The model in which the second and the fourth head are made of those before them: values by any matrix, keys by a
    turn and a factor at each frequency."""
    config, r = lm.model.config, np.random.default_rng(2)
    params = jax.tree.map(np.array, lm.params)
    for i, layer in enumerate(config.layers):
        if layer.reads is not None:
            continue
        turned, inter = (0, False) if layer.rope is None else (layer.rope.width, layer.rope.interleaved)
        for head in (1, 3):
            keys, values = r.standard_normal((2, 4, 4))
            keys[:turned], keys[:, :turned] = 0, 0
            for f in range(turned // 2):
                a, b = (2 * f, 2 * f + 1) if inter else (f, f + turned // 2)
                x, y = r.standard_normal(2)
                keys[a, a] = keys[b, b] = x
                keys[a, b], keys[b, a] = y, -y
            attn = params["layers"][str(i)]["attn"]
            for part, map_ in (("k", keys), ("v", values)):
                for x in attn[part].values():
                    parts = x.reshape(-1, 4, 4)
                    parts[:, head] = parts[:, head - 1] @ map_
    return dataclasses.replace(lm, params=jax.tree.map(jnp.asarray, params))


@pytest.mark.wide
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "llama" else pytest.mark.wide)
                                  for name in CONFIGS])
def test_nothing_is_lost_where_heads_are_made_of_others(name: str) -> None:
    lm, tokens = alike(made(CONFIGS[name])), jnp.asarray([PROMPTS[0]])
    wanted = lm.model.forward(lm.params, tokens)
    assert isinstance(lm.model, Transformer)
    few = fit_kv_heads(lm, PROMPTS, 2)
    assert few.model.config.kv_heads == 2 and few.params["layers"]["0"]["attn"]["k"]["kernel"].shape == (16, 8)
    np.testing.assert_allclose(few.model.forward(few.params, tokens), wanted, atol=1e-4)
    # and where as many stay as there are
    whole = fit_kv_heads(lm, PROMPTS, 4)
    np.testing.assert_allclose(whole.model.forward(whole.params, tokens), wanted, atol=1e-4)
    assert not np.allclose(mean_kv_heads(lm, 2).model.forward(mean_kv_heads(lm, 2).params, tokens), wanted, atol=0.1)


@pytest.mark.wide
def test_the_mean_of_equal_heads_is_the_head() -> None:
    lm, tokens = made(BASE), jnp.asarray([PROMPTS[0]])
    params = jax.tree.map(np.array, lm.params)
    for layer in params["layers"].values():
        for part in "kv":
            heads = layer["attn"][part]["kernel"].reshape(16, 4, 4)
            heads[:, 1], heads[:, 3] = heads[:, 0], heads[:, 2]
    lm = dataclasses.replace(lm, params=jax.tree.map(jnp.asarray, params))
    few = mean_kv_heads(lm, 2)
    np.testing.assert_allclose(few.model.forward(few.params, tokens), lm.model.forward(lm.params, tokens), atol=1e-5)


@pytest.mark.wide
def test_the_cache_of_half_the_heads_is_half_as_large() -> None:
    lm = made(BASE)
    few = fit_kv_heads(lm, PROMPTS, 2)
    size = lambda lm: sum(x.nbytes for x in Job.begin(Request.read(lm, PROMPTS[:1])).state.cache.kv)
    assert 2 * size(few) == size(lm)


@pytest.mark.wide
def test_a_trained_model_loses_less_than_by_means() -> None:
    """On texts that were not measured."""
    lm = dx.load("pycode")
    text = lambda module: lm.tokenizer.encode(inspect.getsource(module))[:512]
    few = fit_kv_heads(lm, [text(module) for module in (json, ast, csv, dataclasses, inspect, textwrap)], 1)
    loss = lambda lm: -np.mean(np.concatenate(dx.score(lm, [text(shutil), text(tempfile)]).logprobs))
    before, after, mean = loss(lm), loss(few), loss(mean_kv_heads(lm, 1))
    assert before < after < before + 0.2 < before + 1.0 < mean


@pytest.mark.wide
def test_a_model_with_fewer_heads_is_saved_and_loaded(tmp_path: Any) -> None:
    lm = dx.load("pycode")
    few = fit_kv_heads(lm, [lm.tokenizer.encode(inspect.getsource(json))], 1)
    dx.save(few, tmp_path)
    again = dx.load(tmp_path)
    assert again.model.config.kv_heads == 1
    assert again.tokenizer.encode("def") == lm.tokenizer.encode("def")
    same = jax.tree.map(lambda a, b: bool((a == b).all()), again.params, few.params)
    assert all(jax.tree.leaves(same))


def test_bad_arguments_are_refused_by_name() -> None:
    lm = made(BASE)
    packed = dataclasses.replace(lm, model=Transformer(dataclasses.replace(BASE, width=32, head_dim=32)))
    packed = dataclasses.replace(packed, params=packed.model.init_params(jax.random.key(0)))
    normed = dataclasses.replace(lm, model=Transformer(dataclasses.replace(BASE, qk_norm="head")))
    for message, wrong in (
            (r"^kv_heads: got 3, takes a divisor of the 4", lambda: fit_kv_heads(lm, PROMPTS, 3)),
            (r"^texts: got none", lambda: fit_kv_heads(lm, [], 2)),
            (r"^lm: got a Transformer; takes what decodax.load gave", lambda: fit_kv_heads(lm.model, PROMPTS, 2)),
            (r"^lm: got a Transformer that fills masks", lambda: mean_kv_heads(dx.load("tasks-diffusion"), 1)),
            (r"^lm: got a model with norms", lambda: mean_kv_heads(normed, 2)),
            (r"^lm: got a model with norms .* with more heads", lambda: mean_kv_heads(
                dataclasses.replace(lm, model=Transformer(diffqkv(BASE, 2))), 1)),
            (r"^lm: got weights that are packed", lambda: mean_kv_heads(dx.quantize(packed, "int8"), 2))):
        with pytest.raises(ValueError, match=message):
            wrong()
