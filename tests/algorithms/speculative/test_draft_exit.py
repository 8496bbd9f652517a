"""Draft & Verify: the threshold that ends a draft follows the acceptance, and the search finds what may be skipped."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import algorithms
from decodax.algorithms.speculative import Speculative, fit_skipped_layers
from decodax.algorithms.speculative.drafts import DraftExit, LayerSkip
from decodax.algorithms.speculative.drafts.self.self_speculative import maximise, posterior, shares
from decodax.core import drivers
from decodax.core.target import for_target
from decodax.io.load import LM
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from tests.contracts.decoding import SAMPLES
from tests.laws import cases
from tests.laws.cases import VOCABULARY, lm, prompts

NETWORK, WEIGHTS = cases.model("llama")
ALG = Speculative(DraftExit(LayerSkip(skip_mlp=(1,)), 4, gamma=0.1, epsilon=0.2))


@pytest.mark.wide
def test_the_threshold_follows_the_acceptance():
    """The authors' update (`decoding.py` of dilab-zju/self-speculative-decoding), worked out beside three rounds."""
    network, params, chain, s = cases.start(ALG, "llama", prompts(5), dict(temperature=0.9), new=16)
    rate, gamma = np.zeros(5), np.full(5, 0.1)
    lengths = set()
    for _ in range(4):
        before = {x: np.asarray(getattr(s.stats, x)).copy() for x in ("drafted", "accepted")}
        s = drivers.advance(ALG, network, params, chain, s, jnp.int32(1))
        drafted, accepted = (np.asarray(getattr(s.stats, x)) - before[x] for x in before)
        for i in range(5):
            rate[i] = 0.5 * rate[i] + 0.5 * accepted[i] / drafted[i]
            new = gamma[i] + 0.2 if rate[i] < 0.9 else gamma[i] if drafted[i] == 4 else gamma[i] - 0.2
            gamma[i] = 0.9 * gamma[i] + 0.1 * new
        np.testing.assert_allclose(s.algo[0].rate, rate, rtol=1e-5)
        np.testing.assert_allclose(s.algo[0].gamma, gamma, rtol=1e-5)
        lengths |= set(drafted.tolist())
    assert len(lengths) > 1


@pytest.mark.wide
def test_a_chain_ends_after_the_doubtful_draft():
    _, params, chain, s = cases.start(ALG, "llama", prompts(5), dict(temperature=0.9), new=16)
    window = jax.jit(lambda s: for_target(ALG, NETWORK).propose(params, chain, s)[0])(s)
    count, tokens = np.asarray(window.live.sum(1)) - 1, np.array(s.tokens)
    for row, length in enumerate(np.asarray(s.length)):
        tokens[row, length:length + 4] = window.tokens[row, 1:]

    @jax.jit
    def shallow(tokens):
        hidden, head = NETWORK.features(WEIGHTS, tokens, keep=LayerSkip(skip_mlp=(1,)).for_target(NETWORK).keep)
        return jax.nn.softmax(head(hidden))

    p = np.asarray(shallow(tokens))
    for row, n in enumerate(count):
        at = int(s.length[row]) - 1 + np.arange(4)
        sure = p[row, at, tokens[row, at + 1]] >= 0.1
        assert n == (4 if sure[:3].all() else 1 + np.argmin(sure))
    assert len(set(count.tolist())) > 1


def test_the_gaussian_process_goes_through_what_was_measured():
    x = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    y = x @ [3.0, -2.0, 1.0, 0.5] + x[:, 0] * x[:, 1]
    mean, deviation = posterior(x[::2], y[::2], x)
    assert np.abs(mean[::2] - y[::2]).max() < 0.3 and deviation[::2].max() < deviation[1::2].min()
    assert np.corrcoef(mean[1::2], y[1::2])[0, 1] > 0.8


def test_the_search_finds_in_few_trials_what_chance_does_not():
    draw = np.random.default_rng(0)
    weights, pairs = draw.normal(size=16), draw.normal(size=(16, 16)) * 0.3
    function = lambda x: float(weights @ x + x @ pairs @ x)
    everything = np.array(list(itertools.product([False, True], repeat=16)))
    values = everything @ weights + ((everything @ pairs) * everything).sum(1)
    _, found = maximise(function, 16, 100)
    assert (values > found).mean() < 0.001                  # a hundred random ones: one in a hundred


@pytest.mark.full
def test_layers_that_do_nothing_are_skipped():
    network = Transformer(llama(vocab=VOCABULARY, width=16, layers=3, heads=4, kv_heads=2, mlp=24, context=256))
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, network.init_params(jax.random.key(1)))
    params = params | {"layers": params["layers"] | {"1": jax.tree.map(jnp.zeros_like, params["layers"]["1"])}}
    idle = LM(model=network, params=params, vocab_size=VOCABULARY)
    found = fit_skipped_layers(idle, prompts(4), trials=12, length=4, max_new_tokens=12)
    assert 1 in found.attention and 1 in found.mlp and found.gain > 1
    part = shares(params, 3)
    assert part.sum() < 1 and np.allclose(part, np.tile(part[:2], 3)) and part[1] > part[0]


def test_the_system_asks_for_samples_or_for_what_a_search_found():
    with pytest.raises(ValueError, match="'self-speculative' needs samples=, prompts as token ids"):
        algorithms.make("self-speculative", lm("llama"))
    with pytest.raises(ValueError, match="takes one of the two"):
        algorithms.make("self-speculative", lm("llama"), samples=SAMPLES[0], skip=(1,))
    assert algorithms.make("self-speculative", lm("llama"), skip=(1,)).draft.source == LayerSkip(skip=(1,))
