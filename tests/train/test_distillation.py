"""The loss with which a draft model is distilled on answers, in NumPy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.train.language_model import NextTokens, hardest
from decodax.train.tuning import DistilledAnswers

LOGITS = {name: jax.random.normal(jax.random.key(i), (2, 10, 7)) for i, name in enumerate(("own", "teacher", "known"))}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 11)), jnp.int32)
LEARNED = jnp.arange(11) >= jnp.array([[4], [6]])


@dataclass(frozen=True)
class Given:
    name: str

    def forward(self, params, tokens):
        return LOGITS[self.name] * params


@pytest.mark.parametrize("reference", [None, Given("known")])
def test_the_divergence_counts_at_answers_and_with_a_reference_where_the_student_is_furthest_from_it(reference):
    loss = DistilledAnswers(Given("own"), Given("teacher"), 0.8, reference, 0.4)
    one = jnp.float32(1)
    found, scalars = loss(one, (TOKENS, LEARNED), (one, one))
    p, q, r = (np.asarray(jax.nn.log_softmax(LOGITS[name]), np.float64) for name in ("teacher", "own", "known"))
    at = np.asarray(LEARNED[:, 1:])
    own, known = ((np.exp(p) * (p - x)).sum(-1)[at] for x in (q, r))
    chosen = own if reference is None else own[np.argsort(own - known)[-5:]]        # 0.4 of 12, rounded up
    truth = -np.take_along_axis(q, np.asarray(TOKENS)[:, 1:, None], 2)[..., 0][at].mean()
    assert float(found) == pytest.approx(0.8 * chosen.mean() + 0.2 * truth, rel=1e-5)
    assert float(scalars["divergence"]) == pytest.approx(own.mean(), rel=1e-5)
    assert float(scalars["acceptance"]) == pytest.approx(np.minimum(np.exp(p), np.exp(q)).sum(-1)[at].mean(), rel=1e-5)


@pytest.mark.parametrize(("reference", "share"), [(None, 0.7), (Given("known"), 1.0)])
def test_with_a_reference_the_loss_is_the_divergence_alone(reference, share):
    """As in the authors' trainer; the cross-entropy would also count the tokens that are left out."""
    one = jnp.float32(1)
    losses = [DistilledAnswers(Given("own"), Given("teacher"), mix, reference)(one, (TOKENS, LEARNED), (one, one))[0]
              for mix in (None, share)]
    assert losses[0] == losses[1]
    assert NextTokens(Given("own"), "float32", Given("teacher"), None, reference).share == share
    kept = [NextTokens(Given("own"), "float32", Given("teacher"), mix, reference)(one, TOKENS, (one, one))[0]
            for mix in (None, share)]
    assert kept[0] == kept[1]


def test_what_does_not_count_does_not_move_the_threshold():
    gap = jnp.array([9.0, 1.0, 2.0, 3.0, 8.0])
    counted = jnp.array([False, True, True, True, False])
    assert hardest(gap, jnp.zeros(5), 0.5, counted).tolist() == [False, False, True, True, False]
    assert hardest(gap[1:4], jnp.zeros(3), 0.5).tolist() == [False, True, True]
