"""Approximate caches decode as the published loops of `cache_loops.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from decodax.algorithms.diffusion import MaskedDiffusion
from decodax.common.registry import ALGORITHMS
from decodax.core import drivers
from decodax.core.round import run
from decodax.core.types import Params
from decodax.io.load import LM
from decodax.models.diffusion import Diffusion
from tests.algorithms.diffusion.cache_loops import (
    BLOCK,
    NEW,
    dkv_decode,
    dkv_greedy,
    dllm_cache,
    elastic,
    fast_dllm_2,
    fast_dllm_dream,
    flashdlm,
    freecache,
    net,
    recap,
    vicinity,
)
from tests.laws.cases import MASK, VOCABULARY, decode, model, prompts, start, texts
from tests.matrix import often


def test_the_network_is_the_library_s():
    network, weights = model("llama")
    tokens = np.array(prompts(1)[0])
    mask = np.ones((1, len(tokens), len(tokens)), bool)
    logits = np.array(network.forward(weights, tokens[None], mask=mask))[0]
    logits[:, MASK] = -np.inf
    ours = net().forward(tokens, np.arange(len(tokens)))
    theirs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(ours[:, :MASK], theirs[:, :MASK], atol=2e-5)


A = d.Adapter(MASK)
IDS = prompts(3, longest=9)
QUOTA = dict(windows=d.Blocks(BLOCK), unmask=d.Quota(5))
EXACT = MaskedDiffusion(A, **QUOTA)


@functools.cache
def made(alg):
    s = decode(alg, "llama", IDS, {}, new=NEW)
    return texts(s), np.asarray(s.stats.rounds).tolist()


@pytest.mark.wide
@pytest.mark.parametrize("packed", [pytest.param((), marks=pytest.mark.full), (20,)])
def test_delayed_is_dkv_cache_decode(packed):
    alg = MaskedDiffusion(A, **QUOTA, caching=d.DelayedTokens(1, 4, packed))
    assert made(alg)[0] == [dkv_decode(p, 5, 4)[0] for p in IDS]
    assert made(alg)[0] != made(EXACT)[0]


@pytest.mark.full
def test_greedy_is_dkv_cache_greedy():
    order = dict(windows=d.Blocks(BLOCK), score=d.Random(once=True), unmask=d.Quota(5))
    alg = MaskedDiffusion(A, **order, caching=d.DKVCacheGreedy(d.Quota(5), window=2, refresh=3, packed=(8,)))
    assert made(alg)[0] == [dkv_greedy(p, i, 5, 3, 2) for i, p in enumerate(IDS)]
    assert made(alg)[0] != [dkv_greedy(p, i, 5, 1, 2) for i, p in enumerate(IDS)]


@pytest.mark.wide
@pytest.mark.parametrize("warmup", often([3], [0, 3]))
def test_vicinity_is_dinfers(warmup):
    caching = d.Vicinity(before=2, after=1, warmup=warmup)
    alg = MaskedDiffusion(A, d.Blocks(BLOCK), unmask=d.Threshold(0.3), caching=caching)
    wanted = [vicinity(p, 0.3, 2, 1, warmup) for p in IDS]
    assert made(alg) == ([text for text, _ in wanted], [steps for _, steps in wanted])


@pytest.mark.wide
def test_frozen_is_freecache():
    assert made(MaskedDiffusion(A, **QUOTA, caching=d.Frozen(NEW)))[0] == [freecache(p, 5) for p in IDS]


@pytest.mark.wide
def test_targets_are_recaps():
    lm = LM(*model("llama"), VOCABULARY, diffusion=Diffusion(MASK))
    alg = ALGORITHMS["recap"].make(lm, steps=8, every=3, pre_full_iters=1, choice_temperature=0.0, size=NEW)
    assert made(alg)[0] == [recap(p, 8, 3, 1) for p in IDS]
    assert made(alg)[0] != made(dataclasses.replace(alg, caching=d.NoCache()))[0]


@pytest.mark.wide
def test_guided_and_frozen_is_flashdlm():
    network, weights = model("llama")
    lm = LM(network, weights, VOCABULARY)
    alg = ALGORITHMS["flashdlm"].make(dataclasses.replace(lm, diffusion=Diffusion(MASK)), draft=lm, top=6,
                                      window_size=5)
    params = Params(weights, weights)
    _, _, chain, s = start(alg, "llama", IDS, {}, new=NEW, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(99))
    wanted = [flashdlm(p, 6, 5) for p in IDS]
    assert (texts(s), np.asarray(s.stats.rounds).tolist()) == ([t for t, _ in wanted], [n for _, n in wanted])
    assert max(n for _, n in wanted) < NEW


@pytest.mark.wide
@pytest.mark.parametrize("cache", often(["dual"], ["dual", "prefix"]))
def test_the_anchored_cache_is_fast_dllms_for_dream(cache):
    lm = LM(*model("llama"), VOCABULARY, diffusion=Diffusion(MASK, shift=True))
    alg = ALGORITHMS["fast-dllm"].make(lm, block_length=BLOCK, threshold=0.2, cache=cache, suffix=NEW)
    wanted = [fast_dllm_dream(p, 0.2, cache == "dual") for p in IDS]
    assert made(alg) == ([text for text, _ in wanted], [n for _, n in wanted])


@pytest.mark.full       # its authors' own loop decides by default, in tests/conformance
@pytest.mark.parametrize("cache", ["block", "dual"])
def test_the_cache_inside_a_block_is_fast_dllm_2s(cache):
    lm = LM(*model("llama"), VOCABULARY, diffusion=Diffusion(MASK, shift=True, attention="block-causal", block=BLOCK))
    alg = ALGORITHMS["fast-dllm-2"].make(lm, small_block_size=4, threshold=0.1, cache=cache)
    wanted = [fast_dllm_2(p, 0.1, 4, cache == "dual") for p in IDS]
    assert made(alg)[0] == wanted
    assert cache == "block" or wanted != [fast_dllm_2(p, 0.1, 4, False) for p in IDS]


def test_the_cache_inside_a_block_needs_blocks():
    lm = LM(*model("llama"), VOCABULARY, diffusion=Diffusion(MASK))
    with pytest.raises(ValueError, match="cache: got 'dual', takes 'block'"):
        ALGORITHMS["fast-dllm-2"].make(lm, cache="dual")


@pytest.mark.wide
@pytest.mark.parametrize("gamma", [0.998])
def test_drift_is_elastic_cache(gamma):
    alg = MaskedDiffusion(A, d.Leading(NEW, 5), unmask=d.Threshold(0.2), caching=d.Drift(MASK, 5, gamma))
    s = decode(alg, "llama", IDS, {}, new=NEW)
    wanted = [elastic(p, 0.2, 5, gamma) for p in IDS]
    got = texts(s), np.asarray(s.stats.rounds).tolist(), np.asarray(s.cache.renewals).tolist()
    assert got == tuple(list(column) for column in zip(*wanted, strict=True))
    # some forwards drifted and some did not
    assert all(0 < renewals < steps - 1 for _, steps, renewals in wanted)


@pytest.mark.wide
def test_similarity_is_dllm_cache():
    alg = MaskedDiffusion(A, **QUOTA, caching=d.Similarity(5, 3, 0.3, size=NEW))
    wanted = [dllm_cache(p, 5, 5, 3, 0.3) for p in IDS]
    assert made(alg)[0] == wanted != made(EXACT)[0]
    assert wanted != [dllm_cache(p, 5, 5, 3, 0.5) for p in IDS]


@pytest.mark.full
def test_rounds_compute_no_more_than_the_published_loop():
    alg = MaskedDiffusion(A, **QUOTA, caching=d.DelayedTokens(1, 4, (20,)))
    wide, *_, narrow = alg.kinds
    computed = np.zeros(3, int)

    def counting(unfinished, body, carry):
        body = jax.jit(body)
        while bool(unfinished(carry)):
            s, before = carry[1], np.asarray(carry[1].stats.rounds)
            nodes = np.where(alg.needs_refresh(s), wide.live_nodes(s), narrow.live_nodes(s))
            carry = body(carry)
            computed[:] += nodes * (np.asarray(carry[1].stats.rounds) - before)
        return carry

    network, params, chain, s = start(alg, "llama", IDS, {}, new=NEW)
    assert texts(run(alg, network, params, chain, s, 99, loop=counting)) == made(alg)[0]
    assert computed.tolist() == [dkv_decode(p, 5, 4)[1] for p in IDS]
