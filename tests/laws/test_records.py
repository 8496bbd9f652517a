"""Cached decoding agrees with a full forward, in its greedy tokens and in its log-probabilities."""

import functools
import itertools

import jax
import numpy as np
import pytest

from decodax.models.transformer import Transformer
from tests.laws.cases import ALGORITHMS, POLICIES, decode, model, prompts, texts
from tests.matrix import often


@functools.partial(jax.jit, static_argnums=0)
def forward(network, weights, tokens):
    """Log-probabilities of what follows each token of whole texts; what stands behind the shorter ones is not seen."""
    return jax.nn.log_softmax(network.forward(weights, tokens))


LEFT_TO_RIGHT = [a for a in ALGORITHMS if not a.startswith("llada")]


@pytest.mark.wide(but=("lookup-llama", "lookup-rejection-sliding"))
@pytest.mark.parametrize(("algorithm", "which"), often(
    [("autoregressive", "sliding"), ("lookup", "llama"), ("lookup-rejection", "sliding")],
    itertools.product(LEFT_TO_RIGHT, ("llama", "sliding"))))
def test_log_probabilities_equal_those_of_a_full_forward(algorithm, which):
    ids = prompts(4)
    s = decode(ALGORITHMS[algorithm], which, ids, dict(temperature=0.8, top_k=5), top_logprobs=3)
    network, weights = model(which)
    assert isinstance(network, Transformer)
    every = np.asarray(forward(network, weights, s.tokens))
    for i, (prompt, made, full) in enumerate(zip(ids, texts(s), every, strict=True)):
        at = np.arange(len(prompt), len(prompt) + len(made))
        assert np.allclose(np.asarray(s.record.raw)[i, at], full[at - 1, made], atol=2e-5)
        top = np.sort(full[at - 1], -1)[:, ::-1][:, :3]
        assert np.allclose(np.asarray(s.record.top)[i, at], top, atol=2e-5)
        assert np.allclose(np.take_along_axis(full[at - 1], np.asarray(s.record.top_ids)[i, at], 1), top, atol=2e-5)
        # the policy: temperature 0.8, then the five largest
        warm = np.where(full[at - 1] >= np.sort(full[at - 1], -1)[:, -5:-4], full[at - 1] / 0.8, -np.inf)
        warm = warm - np.log(np.exp(warm).sum(-1, keepdims=True))
        assert np.allclose(np.asarray(s.record.processed)[i, at], warm[np.arange(len(at)), made], atol=5e-5)


@pytest.mark.parametrize("which", ["llama", "sliding"])
def test_greedy_tokens_are_the_argmax_of_a_full_forward(which):
    ids = prompts(5)
    network, weights = model(which)
    s = decode(ALGORITHMS["autoregressive"], which, ids, {})
    for prompt, made, full in zip(ids, texts(s), np.asarray(forward(network, weights, s.tokens)), strict=True):
        assert made == full[len(prompt) - 1:len(prompt) + len(made) - 1].argmax(-1).tolist()


@pytest.mark.wide
@pytest.mark.parametrize("policy", often(["together"], ["greedy", "together", "stateful"]))
def test_speculation_reports_the_log_probabilities_of_plain_decoding(policy):
    ids = prompts(4)
    plain, drafted = (decode(ALGORITHMS[a], "llama", ids, POLICIES[policy], top_logprobs=2)
                      for a in ("autoregressive", "lookup"))
    assert texts(plain) == texts(drafted)
    for i in range(4):
        span = slice(int(plain.prompt_length[i]), int(plain.length[i]))
        for field in ("raw", "processed", "top"):
            one, other = (getattr(s.record, field)[i, span] for s in (plain, drafted))
            assert np.allclose(one, other, atol=2e-5)
