"""Samplers of masked diffusion against their published loops, written out over whole forwards without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from decodax.algorithms.diffusion import MaskedDiffusion
from decodax.common.registry import ALGORITHMS
from decodax.io.load import LM
from tests.contracts.diffusion import SPEAKS
from tests.laws.cases import MASK, VOCABULARY, decode, model, prompts, texts
from tests.matrix import often


@functools.cache
def program(length, width):
    """The network on whole sequences, and on a window of `width` beside given keys and values: written with its own
    softmax over everything, so it shares no cache with the library."""
    network, weights = model("llama")

    def attend(k_old, v_old, layer, q, k, v, scale, **_):
        every_k, every_v = (jnp.repeat(jnp.concatenate([old[layer], new], 1), q.shape[2] // new.shape[2], 2)
                            for old, new in ((k_old, k), (v_old, v)))
        weight = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, every_k) * scale, -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weight, every_v), (k, v)

    @jax.jit
    def forward(tokens, positions, k_old, v_old):
        net = network.pieces(weights).network
        x = net.embedded(tokens[None], positions[None])
        hidden, kv, _ = net(x, positions[None], functools.partial(attend, k_old, v_old))
        return net.logits(hidden)[0], [k for k, _ in kv], [v for _, v in kv]

    return forward
NONE = [jnp.zeros((1, 0, 2, 4))] * 2


def log_probs(logits, temperature=1.0):
    """float64, without MASK."""
    x = np.asarray(logits, np.float64) / temperature
    x[:, MASK] = -np.inf
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def whole(x):
    return program(len(x), len(x))(jnp.asarray(x), jnp.arange(len(x)), NONE, NONE)


def llada(prompt, new, block, steps, shift):
    """LLaDA's sampler at temperature 0: semi-autoregressive blocks, low-confidence remasking."""
    x = np.array(prompt + [MASK] * new)
    for lo in range(len(prompt), len(x), block):
        for i in range(steps):
            lp = log_probs(whole(x)[0])
            if shift:
                lp = np.concatenate([lp[:1], lp[:-1]])
            confidence = np.where(x == MASK, lp.max(-1), -np.inf)
            confidence[:lo] = confidence[lo + block:] = -np.inf
            chosen = np.argsort(-confidence, kind="stable")[:block // steps + (i < block % steps)]
            x[chosen] = lp.argmax(-1)[chosen]
    return x[len(prompt):].tolist()


@pytest.mark.wide(but=("4-2-True",))
@pytest.mark.parametrize(("block", "steps", "shift"), [(8, 3, False), (4, 2, True)])
def test_the_sampler_is_lladas(block, steps, shift):
    ids = prompts(3, longest=9)
    alg = MaskedDiffusion(d.Adapter(MASK, shift), d.Blocks(block), unmask=d.Quota(steps))
    s = decode(alg, "llama", ids, {}, new=16)
    assert texts(s) == [llada(p, 16, block, steps, shift) for p in ids]
    assert np.asarray(s.stats.rounds).tolist() == [16 // block * steps] * 3


def dream(prompt, new, steps, order):
    """Dream's `_sample` at temperature 0, which draws nothing: shifted logits, quotas along the noise schedule."""
    x = np.array(prompt + [MASK] * new)
    times = np.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        lp = log_probs(whole(x)[0])
        lp = np.concatenate([lp[:1], lp[:-1]])
        p, masked = np.exp(lp), np.flatnonzero(x == MASK)
        top = np.sort(p, -1)
        confidence = {"maskgit_plus": top[:, -1], "topk_margin": top[:, -1] - top[:, -2],
                      "entropy": (p * np.where(p > 0, lp, 0)).sum(-1)}[order]
        n = len(masked) if i == steps - 1 else int(len(masked) * (1 - times[i + 1] / times[i]))
        chosen = masked[np.argsort(-confidence[masked], kind="stable")[:n]]
        x[chosen] = lp.argmax(-1)[chosen]
    return x[len(prompt):].tolist()


@pytest.mark.full
@pytest.mark.parametrize(("order", "steps"), often([("entropy", 16), ("topk_margin", 5)], [
    ("entropy", 16), ("topk_margin", 5), ("maskgit_plus", 5)]))
def test_the_sampler_is_dreams(order, steps):
    ids = prompts(2, longest=9)
    lm = LM(*model("llama"), VOCABULARY, diffusion=SPEAKS["shifted"])
    s = decode(ALGORITHMS["dream"].make(lm, steps=steps, alg=order, size=16), "llama", ids, {}, new=16)
    assert texts(s) == [dream(p, 16, steps, order) for p in ids]


def fast_dllm(prompt, new, block, threshold, cache):
    """Fast-dLLM: a full forward at each block's start, which unmasks too; then forwards of the block (dual) or of the
    block and what follows it (prefix) beside the keys and values of that full forward."""
    x = np.array(prompt + [MASK] * new)
    forwards = 0
    for lo in range(len(prompt), len(x), block):
        hi = lo + block
        keys = values = None
        while (x[lo:hi] == MASK).any():
            forwards += 1
            if keys is None:
                logits, keys, values = whole(x)
                lp = log_probs(logits)[lo:hi]
                ends = hi if cache == "dual" else len(x)
                drop = lambda old, lo=lo, ends=ends: [jnp.concatenate([o[:, :lo], o[:, ends:]], 1) for o in old]
                keys, values = drop(keys), drop(values)
            else:
                logits = program(len(x), ends - lo)(jnp.asarray(x[lo:ends]), jnp.arange(lo, ends), keys, values)[0]
                lp = log_probs(logits)[:block]
            confidence = np.where(x[lo:hi] == MASK, lp.max(-1), -np.inf)
            chosen = confidence >= np.log(threshold)
            chosen[confidence.argmax()] = True
            x[lo:hi][chosen] = lp.argmax(-1)[chosen]
    return x[len(prompt):].tolist(), forwards


@pytest.mark.full
@pytest.mark.parametrize("cache", often(["dual"], ["dual", "prefix"]))
def test_the_sampler_is_fast_dllms(cache):
    ids = prompts(2, longest=9)
    lm = LM(*model("llama"), VOCABULARY, diffusion=SPEAKS["full"])
    alg = ALGORITHMS["fast-dllm"].make(lm, block_length=8, threshold=0.2, cache=cache, suffix=16)
    s = decode(alg, "llama", ids, {}, new=16)
    made = [fast_dllm(p, 16, 8, 0.2, cache) for p in ids]
    assert texts(s) == [text for text, _ in made]
    assert np.asarray(s.stats.rounds).tolist() == [forwards for _, forwards in made]
    # the approximation shows, so the test would see another one
    assert texts(s) != [llada(p, 16, 8, 8, False) for p in ids]
