"""Drafts at mask tokens: what the draft model computes after the text alone, and a cache of the text alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import AlignedDrafts, MaskedDrafts
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.core import drivers
from decodax.core.window import causal
from tests.algorithms.speculative.uneven import UNEVEN
from tests.laws.cases import VOCABULARY, decode, model, prompts, start, texts

MASK, MIXED = 5, dict(temperature=[0.0, 0.9, 1.3, 0.8, 0.0], top_p=[1, 1, 0.9, 1, 1],
                      repetition_penalty=[1, 1, 1, 1.4, 1.6])
SHAPES = {"chain": Chain(4), "tree": Fixed.of(UNEVEN)}


def draft(network="llama", **options):
    return MaskedDrafts(model(network)[0], vocab_size=VOCABULARY, drafts=4, mask=MASK, **options)


@pytest.mark.wide(but=("chain",))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_is_plain_decodings(shape):
    alg = Speculative(draft(), shape=SHAPES[shape])
    s = decode(alg, "llama", prompts(5), MIXED, eos=[1], draft=model("llama")[1])
    assert texts(s) == texts(decode(Autoregressive(), "llama", prompts(5), MIXED, eos=[1]))
    assert np.asarray(s.stats.accepted).sum() > 0


@pytest.mark.wide
def test_drafts_and_cache_are_those_of_the_text_alone():
    network, weights = model("llama")
    alg = Speculative(draft(chunk=3), shape=Chain(4))
    target, params, chain, s = start(alg, "llama", prompts(5), MIXED, new=30, draft=weights)
    s = drivers.advance(alg, target, params, chain, s, jnp.int32(4))
    assert np.asarray(s.running).all() and np.asarray(s.stats.accepted).any()
    bare = alg.drafter.source
    state, answer = jax.jit(lambda params, s: bare.start(params, s, s.algo[0], 4))(params, s)
    np.testing.assert_array_equal(state.cache.length, s.length)
    for row, n in enumerate(np.asarray(s.length)):
        tokens = jnp.asarray([[*s.tokens[row, :n].tolist(), *[MASK] * 3]], jnp.int32)
        alone = network.apply(weights, causal(tokens, jnp.zeros(1, jnp.int32)), network.init_cache(1, 0))
        np.testing.assert_allclose(state.hidden[row], alone.hidden[0, n - 1:], atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(answer.logits[row, 0], alone.logits()[0, n - 1], atol=2e-5, rtol=1e-5)


@pytest.mark.wide
def test_drafts_that_read_the_target_are_those_of_the_text_with_its_states_added():
    """PARD-2: each token has the projected states at the token before it, each mask those of the newest token."""
    network, weights = model("llama")
    projection = {"weight": jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)}
    source = AlignedDrafts(network, vocab_size=VOCABULARY, drafts=4, mask=MASK, states=(-1, 1), scale=0.1)
    alg = Speculative(source, shape=Chain(4))
    target, params, chain, s = start(alg, "llama", prompts(3), {}, new=30, width=7, draft=(weights, projection))
    s = drivers.advance(alg, target, params, chain, s, jnp.int32(4))
    assert np.asarray(s.running).all() and np.asarray(s.stats.accepted).any()
    state, _ = jax.jit(lambda params, s: source.start(params, s, s.algo[0], 3))(params, s)
    np.testing.assert_array_equal(state.cache.length, s.length)
    plain = decode(Autoregressive(), "llama", prompts(3), {}, new=30)
    for row, n in enumerate(np.asarray(s.length)[:2]):
        assert s.tokens[row, :n].tolist() == plain.tokens[row, :n].tolist()
        at, text = jnp.zeros(1, jnp.int32), s.tokens[row:row + 1, :n]
        out = target.apply(weights, causal(text, at), target.init_cache(1, 0))
        states = jnp.concatenate([out.hidden, out.layers[0]], -1)[0]
        before = jnp.concatenate([jnp.zeros((1, 32)), states[:n - 1], jnp.repeat(states[n - 2:n - 1], 3, 0)])
        tokens = jnp.concatenate([text, jnp.full((1, 3), MASK)], 1)
        mixed = weights["embed"][tokens] + 0.1 * before @ projection["weight"].T
        window = causal(tokens, at).replace(embeddings=mixed, embedded=jnp.ones(tokens.shape, bool))
        alone = network.apply(weights, window, network.init_cache(1, 0))
        np.testing.assert_allclose(state.hidden[row], alone.hidden[0, n - 1:], atol=2e-5, rtol=1e-5)


def test_the_mask_comes_from_the_models_config(tiny_model, tmp_path):
    lm = dx.load(tiny_model)
    with pytest.raises(ValueError, match=r"mask: the draft model's config\.json has no pard_token"):
        dx.generate(lm, "a", algorithm="pard", draft=lm, max_new_tokens=2)
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"pard_token": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = dx.algorithms.make("pard", lm, dx.load(tmp_path))
    assert made.draft.mask == 7 and made.draft.drafts == 8
    with pytest.raises(ValueError, match=r"mask: got 99999, takes the id of a token of the draft model"):
        dx.algorithms.make("pard", lm, lm, mask=99999)
