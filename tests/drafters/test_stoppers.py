"""Networks that decide how many tokens are drafted: SpecDec++'s acceptance head and AdaEAGLE's draft lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.adaptive import fit_stoppers
from decodax.algorithms.speculative.adaptive.fit_stoppers import acceptance_examples, length_examples
from decodax.algorithms.speculative.adaptive.stoppers import DraftLength, accepted, draft_length, scores
from decodax.algorithms.speculative.heads.adaeagle import SurePrediction
from decodax.algorithms.speculative.trees import ConfidenceChain
from decodax.core import drivers
from decodax.core.window import causal
from tests.drafters.fresh import acceptance_head, fresh, length_network
from tests.laws.cases import lm, prompts, start

LENGTH = 5


def hidden(which: str, tokens: np.ndarray) -> np.ndarray:
    """Hidden states of a model for whole texts, `f32[B, N, D]`."""
    model = lm(which).model
    run = lambda params, x: model.apply(params, causal(x, jnp.zeros(len(x), jnp.int32)), model.init_cache(len(x), 0))
    return np.asarray(jax.jit(lambda params, x: run(params, x).hidden)(lm(which).params, jnp.asarray(tokens)))


def test_the_head_is_the_authors() -> None:
    """Numbers of `AcceptancePredictionHead` with 3 blocks and of the weighted loss of `train.py`, from
    Kaffaljidhmah2/SpecDec_pp at 937aee2, for soft labels 0.2, 0.9 and 0.5 and the weights 6 and 1."""
    draw = lambda shape, seed: np.round(0.4 * np.random.default_rng(seed).normal(size=shape), 3).astype(np.float32)
    head = {"block": draw((4, 4), 1), "block_bias": draw(4, 2), "out": draw((4, 2), 3), "out_bias": draw(2, 4)}
    logits = scores(head, jnp.asarray(draw((3, 4), 5)))
    authors = [[-0.41174, 0.89065], [1.50314, -0.9676], [2.26688, -1.80018]]
    np.testing.assert_allclose(logits, authors, atol=1e-5)
    soft = np.array([0.2, 0.9, 0.5])
    labels = np.stack([6 * (1 - soft), soft], -1)
    loss = -(labels * np.asarray(jax.nn.log_softmax(logits))).sum() / labels.sum()
    assert loss == pytest.approx(1.18923, abs=1e-5)


def test_a_chain_ends_where_a_rejection_is_likely() -> None:
    """A draft's own prediction is known when the next one is drafted, so there are two of them at least."""
    head, threshold, ids = acceptance_head(lm("sliding")), 0.8, prompts(6)
    alg: Any = dx.algorithms.make("specdec++", lm("llama"), lm("sliding"), length=LENGTH, threshold=threshold,
                                  head=head)
    bare = alg.bare()
    _, params, chain, s = start(bare, "llama", ids, {}, draft=alg.weights)
    window = jax.jit(lambda s: bare.propose(params, chain, s)[0])(s)
    counts, tokens = np.asarray(window.live.sum(1)) - 1, np.asarray(window.tokens)
    texts = np.zeros((6, 32), np.int32)
    for text, prompt, drafts in zip(texts, ids, tokens, strict=True):
        text[:len(prompt) + LENGTH] = [*prompt, *drafts[1:]]
    chance = np.asarray(accepted(head, jnp.asarray(hidden("sliding", texts))))
    for row, prompt in enumerate(ids):
        held = np.cumprod(chance[row, len(prompt):len(prompt) + LENGTH])
        assert counts[row] == min(2 + int((1 - held <= threshold).cumprod().sum()), LENGTH)
    assert len(set(counts.tolist())) > 1


def test_as_many_tokens_are_drafted_as_the_targets_hidden_state_predicts() -> None:
    target, ids = lm("llama"), prompts(4)
    network, drafter = length_network(target), fresh("eagle", target)
    alg = dx.algorithms.make("adaeagle", target, drafter, length=LENGTH, network=network)
    bare = alg.bare()
    _, params, policy, s = start(bare, "llama", ids, {}, draft=alg.weights, new=40)
    seen: set[float] = set()
    for _ in range(4):
        before, newest = np.asarray(s.stats.drafted), np.asarray(s.length) - 1
        states = hidden("llama", np.asarray(s.tokens))
        s = drivers.advance(bare, target.model, params, policy, s, jnp.int32(1))
        wanted = np.asarray(draft_length(network, jnp.asarray(states[np.arange(4), newest - 1])))
        wanted = np.clip(np.round(wanted), 1, LENGTH)
        np.testing.assert_array_equal(np.asarray(s.stats.drafted) - before, wanted)
        seen |= set(wanted.tolist())
    assert len(seen) > 1


@pytest.mark.wide
def test_a_threshold_ends_a_chain_before_the_predicted_length() -> None:
    target, draft, ids = lm("llama"), lm("sliding"), prompts(6)
    source = DraftLength(dx.drafts.DraftModel(draft), length_network(target))

    def proposed(shape: Any) -> tuple[np.ndarray, np.ndarray]:
        bare = Speculative(source, shape=shape).bare()
        _, params, chain, s = start(bare, "llama", ids, {}, draft=source.weights)
        window = jax.jit(lambda s: bare.propose(params, chain, s)[0])(s)
        return np.asarray(window.live.sum(1)) - 1, np.asarray(window.tokens)

    predicted, tokens = proposed(ConfidenceChain(LENGTH, 0.5, None))
    texts = np.zeros((6, 32), np.int32)
    for text, prompt, drafts in zip(texts, ids, tokens, strict=True):
        text[:len(prompt) + LENGTH] = [*prompt, *drafts[1:]]
    one = draft.model.apply(draft.params, causal(texts[:1, :1], jnp.zeros(1, jnp.int32)), draft.model.init_cache(1, 0))
    top = np.asarray(jax.nn.softmax(one.head(hidden("sliding", texts))).max(-1))
    sure = np.stack([np.cumprod(row[len(prompt) - 1:][:LENGTH]) for row, prompt in zip(top, ids, strict=True)])
    threshold = float(np.median(sure[:, 1]))
    counts, _ = proposed(SurePrediction(LENGTH, threshold))
    wanted = [min(n, 1 + int((row >= threshold).sum())) for n, row in zip(predicted, sure, strict=True)]
    assert counts.tolist() == wanted and 0 < (counts < predicted).sum() < 6
    assert proposed(SurePrediction(LENGTH, 0.0))[0].tolist() == predicted.tolist()
    alg: Any = dx.algorithms.make("adaeagle", target, fresh("eagle", target), network=length_network(target),
                                  threshold=0.4)
    assert alg.shape == SurePrediction(8, 0.4)


@pytest.mark.wide
def test_examples_of_acceptance_do_not_depend_on_what_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = acceptance_examples(lm("llama"), lm("sliding"), prompts(5), 0.15, 1.0, 24)
    monkeypatch.setattr(fit_stoppers, "ROWS", 2)
    monkeypatch.setattr(fit_stoppers, "PLACES", 7)
    parts = acceptance_examples(lm("llama"), lm("sliding"), prompts(5), 0.15, 1.0, 24)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.wide
def test_the_head_is_trained_on_what_the_target_would_accept() -> None:
    target, draft, samples = lm("llama"), lm("sliding"), prompts(8)
    states, chance = acceptance_examples(target, draft, samples, 0.15, 1.0, 48)
    assert 150 < len(chance) < 8 * 48 and 0.1 < float(chance.mean()) < 0.99 and states.shape == (len(chance), 16)
    head = dx.train.fit_acceptance_head(target, draft, samples, rejected=1.0, max_new_tokens=48, rate=1e-2)
    predicted = np.asarray(accepted(head, states))
    assert abs(predicted.mean() - chance.mean()) < 0.02 and np.corrcoef(predicted, chance)[0, 1] > 0.5
    drawn = lambda **given: dx.generate(target, samples, seed=1, max_new_tokens=16, temperature=1.0, **given).tokens
    method = dx.algorithms.specdec_plus_plus(head=head)
    assert drawn(algorithm=method, draft=draft).tolist() == drawn().tolist()
    with pytest.raises(ValueError, match="mixed: got 1, takes 0 to below 1"):
        dx.train.fit_acceptance_head(target, draft, samples, mixed=1)


@pytest.mark.wide
def test_draft_lengths_are_trained_on_accepted_drafts() -> None:
    target, samples = lm("llama"), prompts(8)
    source = dx.drafts.DraftModel(lm("sliding"))
    features, counts = length_examples(target, source, samples, 4, None, 48)
    assert counts.min() >= 0 and counts.max() <= 4 and len(set(counts.tolist())) > 2
    network = dx.train.fit_draft_length(target, source, samples, length=4, max_new_tokens=48)
    predicted = np.asarray(draft_length(network, jnp.asarray(features)))
    assert ((predicted - counts) ** 2).mean() < 0.9 * counts.var()
