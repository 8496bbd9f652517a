"""Predictors of acceptance, fitted to what held."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import DraftClassifier, Speculative, fit_predictor
from decodax.algorithms.speculative.adaptive.predictor import examples
from decodax.algorithms.speculative.drafts import DraftModel, NGramModel
from decodax.algorithms.speculative.trees import ConfidenceChain
from decodax.algorithms.speculative.trees.threshold import DraftFeatures, entropy, likeliest
from decodax.core.window import causal
from decodax.io.load import LM
from tests.drafters.fresh import draft_classifier
from tests.laws.cases import VOCABULARY, model, prompts, start

NETWORK, WEIGHTS = model("toy")
TOY = LM(model=NETWORK, params=WEIGHTS, vocab_size=VOCABULARY)
GIVEN = dict(lm=TOY, draft=NGramModel(VOCABULARY, order=3), samples=prompts(8), length=4, max_new_tokens=32)


def test_the_classifier_is_a_network_with_two_layers_over_what_a_draft_shows():
    made, log_p = draft_classifier(), jax.nn.log_softmax(jnp.arange(12.0) / 3)
    first, second = np.array(made.first), np.array(made.second)
    p = np.exp(np.asarray(log_p))
    x = np.concatenate([[p[7], -(p * np.log(p)).sum(), np.log(3)], np.sort(p)[::-1][:10]])
    wanted = 1 / (1 + np.exp(-(np.maximum(x @ first + made.first_bias, 0) @ second + made.second_bias)))
    draft = DraftFeatures(log_p[None, 7], entropy(log_p[None]), jnp.int32(2), top=likeliest(log_p[None]))
    np.testing.assert_allclose(made(draft), [wanted], rtol=1e-5)
    np.testing.assert_allclose(likeliest(log_p[:3])[2:], [p[0], *[0] * 7])      # of a small vocabulary


@pytest.mark.full
def test_a_fitted_predictor_tells_drafts_that_hold_from_others():
    fitted = fit_predictor(**GIVEN)
    x, held = examples(verify=None, **GIVEN)
    assert 0.05 < held.mean() < 0.95 and len(held) > 100
    of = lambda x: DraftFeatures(*map(jnp.asarray, (np.log(x[:, 0]), x[:, 1], np.expm1(x[:, 2]))), top=jnp.asarray(
        x[:, 3:]))
    chance = np.asarray(fitted(of(x)))
    assert abs(chance.mean() - held.mean()) < 0.02                  # calibrated over all
    assert chance[held].mean() > chance[~held].mean() + 0.1
    careful = fit_predictor(**GIVEN, rejected=6.0)
    assert np.asarray(careful(of(x))).mean() < chance.mean() - 0.05


@dataclasses.dataclass(frozen=True)
class ByFeature:
    """Drafts on while the first hidden unit of the draft model is positive."""

    def __call__(self, draft):
        return (draft.hidden[:, 0] > 0).astype(jnp.float32)


@pytest.mark.wide
def test_a_predictor_sees_the_draft_models_hidden_states():
    """Each chain ends behind the first draft whose hidden state, of a forward over all of the text, says so."""
    alg = Speculative(DraftModel(NETWORK, WEIGHTS), shape=ConfidenceChain(5, 0.5, ByFeature()))
    ids = prompts(6)
    _, params, chain, s = start(alg, "toy", ids, {}, draft=WEIGHTS)
    window = jax.jit(lambda s: alg.propose(params, chain, s)[0])(s)
    counts = np.asarray(window.live.sum(1)) - 1
    texts = np.zeros((6, 32), np.int32)
    for row, prompt in enumerate(ids):
        texts[row, :len(prompt) + 5] = [*prompt, *np.asarray(window.tokens)[row, 1:]]
    hidden = jax.jit(lambda texts: NETWORK.apply(WEIGHTS, causal(texts, jnp.zeros(6, jnp.int32)),
                                                 NETWORK.init_cache(6, 0)).hidden)(texts)
    for row, prompt in enumerate(ids):
        stops = np.asarray(hidden)[row, len(prompt) - 1:len(prompt) + 5, 0] <= 0
        assert counts[row] == min(next((i for i, stop in enumerate(stops) if stop), 5) + 1, 5)
    assert len(set(counts.tolist())) > 1


def test_fitting_without_samples_is_refused():
    with pytest.raises(ValueError, match="samples: got 0 prompts"):
        fit_predictor(TOY, NGramModel(VOCABULARY), [])
    with pytest.raises(ValueError, match="rejected: got 0"):
        fit_predictor(TOY, NGramModel(VOCABULARY), [[1]], rejected=0)
    with pytest.raises(ValueError, match=r"weights: got 1 features and widths \[1, 2\], takes 13 and one width"):
        DraftClassifier(((1.0, 2.0),), (0.0, 0.0), (0.0,), 0.0)
