"""Blocks that a network expects to be attended to next."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.bench.report import copies, parse
from decodax.cache import KVLayer
from decodax.caches import AttentionNet, make
from decodax.caches.sparse.attention_predictor import AttentionPredictorConfig, PromptToPredict
from decodax.core import drivers
from decodax.core.capabilities import ReadPrompt
from decodax.core.start import init_state
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.engine.methods import with_cache
from decodax.sampling import build
from decodax.train import fit_attention_predictor
from decodax.train.attention_predictor import attention_maps, first_net, squared_error
from tests.caches.small import DEEP, LOOKUP, MODEL, NET, OPTIONS, PARAMS, PROMPTS, SMALL

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "attention_predictor.json").read_text())
"""By attnpred_llama_attention.py of MIRALab-USTC/LLM-AttentionPredictor at 8196868: of each step and head what is
read."""
HEADS, D = 2, 8


def drawn() -> tuple[AttentionNet, np.ndarray, np.ndarray]:
    """The network, queries and keys `[60, H, d]`, as they were drawn for the authors' code."""
    r = np.random.RandomState(0)
    sizes = ((16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (1, 32, 1), (1,))
    arrays = [(r.standard_normal(size) / max(1, np.prod(size[1:])) ** 0.5).astype(np.float32).round(3)
              for size in sizes]
    r = np.random.RandomState(1)
    q, k = (r.standard_normal((60, HEADS, D)).astype(np.float32).round(3) * 1.5 for _ in range(2))
    return AttentionNet.of([*arrays[:4], arrays[4].reshape(-1), arrays[5][0]]), q, k


@pytest.mark.wide(but=("3-24",))
@pytest.mark.parametrize(("full", "prompt"), [(None, 37), (3, 24)])
def test_a_token_reads_what_it_reads_in_the_authors_code(full: int | None, prompt: int) -> None:
    """Token by token, with each one's attention as the next row of the image; values say what was read."""
    net, q, k = drawn()
    kind = AttentionPredictorConfig(net, budget=14, sinks=4, recent=4, block_size=2, history=6, full=full)
    cache = kind([KVLayer(HEADS, D, 60, queries=HEADS)], 1, 60, jnp.float32).prefill_cache()
    v = np.broadcast_to(np.eye(60, dtype=np.float32)[:, None], (60, HEADS, 60))
    assert isinstance(cache, PromptToPredict)

    def step(cache: Any, start: int, stop: int) -> tuple[jax.Array, Any]:
        window = causal(jnp.zeros((1, stop - start), jnp.int32), cache.length)
        out, entry = cache.attend(0, *(jnp.asarray(x[None, start:stop]) for x in (q, k, v)), window, scale=D ** -0.5)
        return out, cache.commit([entry], window.positions)

    for start in range(0, prompt, 16):      # in chunks
        _, cache = step(cache, start, min(start + 16, prompt))
    cache = cache.finish_prefill(ReadPrompt(model=None, params=None, tokens=jnp.zeros((1, prompt), jnp.int32)))
    one = jax.jit(lambda cache, q, k, v: _one(cache, q, k, v))
    for i, kept in enumerate(WANTED[f"{full},{prompt}"]):
        at = prompt + i
        out, cache = one(cache, *(jnp.asarray(x[None, at:at + 1]) for x in (q, k, v)))
        for head in range(HEADS):
            assert np.flatnonzero(out[0, 0, head]).tolist() == kept[head]
            scores = np.exp(k[kept[head], head] @ q[at, head] * D ** -0.5)
            np.testing.assert_allclose(out[0, 0, head][np.array(kept[head])], scores / scores.sum(), atol=1e-5)


def _one(cache: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    window = causal(jnp.zeros((1, 1), jnp.int32), cache.length)
    out, entry = cache.attend(0, q, k, v, window, scale=D ** -0.5)
    return out, cache.commit([entry], window.positions)


@pytest.mark.wide
def test_maps_are_those_of_the_model() -> None:
    """Each row adds up to 1, and the largest weights in blocks are as written out."""
    tokens = jnp.asarray(PROMPTS[0], jnp.int32)
    maps, images = attention_maps(MODEL, 4, PARAMS, tokens)
    assert maps.shape == (1, 4, 41, 41) and images.shape == (1, 4, 41, 11)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(images[0, 1, 30, 5], maps[0, 1, 30, 20:24].max())
    window = causal(tokens[None], jnp.zeros(1, jnp.int32))
    cache = AttentionPredictorConfig(NET, budget=10, sinks=2, recent=4, block_size=2, history=6)(
        [KVLayer(2, 4, queries=4)], 1, 64, jnp.float32).prefill_cache()
    out = MODEL.apply(PARAMS, window.replace(is_prefill=True), cache)
    cache = cache.commit(out.entries, window.positions)
    new = cache.finish_prefill(ReadPrompt(model=None, params=None, tokens=tokens[None]))
    images = attention_maps(MODEL, 2, PARAMS, tokens)[1]
    for at in range(35, 41):
        np.testing.assert_allclose(new.images[0][0, :, at % 6, :21], images[0, :, at], atol=1e-5)


def test_training_lowers_the_error(tmp_path: Path) -> None:
    r = np.random.default_rng(0)
    texts = [r.integers(0, 16, 40).tolist() for _ in range(5)]
    size = dict(sinks=2, recent=4, block=2, history=6)
    net = fit_attention_predictor(SMALL, texts[:4], steps=60, batch=4, rate=1e-2, channels=(3, 4), **size)
    net.save(tmp_path / "net.npz")
    assert make("attention-predictor", net=str(tmp_path / "net.npz")).net == net      # type: ignore[attr-defined]
    images = attention_maps(MODEL, 2, PARAMS, jnp.asarray(texts[4], jnp.int32))[1][0]

    @jax.jit
    def error(arrays: tuple[jax.Array, ...]) -> jax.Array:
        at = jnp.arange(15, 40)
        return jax.vmap(lambda at: squared_error(arrays, images, at, (at + 1) // 2, 6, 1, 2))(at).mean()

    assert float(error(net.arrays)) < 0.1 * float(error(first_net((3, 4)).arrays))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["attention-predictor", "token-butler", "retro-attention"])
def test_no_round_copies_keys_and_values(name: str) -> None:
    lm = with_cache(DEEP, make(name, **OPTIONS[name]))
    params, chain = Params(lm.params, None), build(8, vocab_size=16, temperature=0.8)
    begin = functools.partial(init_state, LOOKUP, lm.model, size=256, max_new=np.int32(30))
    s = jax.eval_shape(begin, params, chain, jax.ShapeDtypeStruct((8, 64), jnp.int32),
                       jax.ShapeDtypeStruct((8,), jnp.int32))
    if isinstance(s.cache, PromptToPredict):
        read = ReadPrompt(model=None, params=None, tokens=jnp.zeros((8, 64), jnp.int32))
        s = s.replace(cache=jax.eval_shape(lambda cache: cache.finish_prefill(read), s.cache))
    program = parse(drivers.advance.lower(LOOKUP, lm.model, params, chain, s, np.int32(5)).compile().as_text())
    assert program.loops()
    for size in {x.size for x in jax.tree.leaves(s.cache.kv)}:
        assert [x for loop in program.loops() for x in copies(program, size, loop.attribute("body"))] == []
