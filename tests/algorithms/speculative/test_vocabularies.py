"""Draft models whose logits have more or fewer entries than the target's, as vocabularies padded to different sizes
have: every system that takes one keeps its guarantee."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from decodax import algorithms
from decodax.algorithms.speculative import MultiRound, Rejection, Speculative
from decodax.algorithms.speculative.drafts import DraftModel
from decodax.algorithms.speculative.drafts.model.draft_model import Resized
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.common.registry import ALGORITHMS
from decodax.core.types import Out
from decodax.models.transformer import Transformer
from tests.contracts.decoding import decode, plain
from tests.contracts.verifying import ALARM, PROMPT, chi_square, joint
from tests.laws.cases import VOCABULARY, lm, texts
from tests.laws.cases import decode as sample
from tests.laws.toy import Toy
from tests.matrix import often
from tests.small_models import random_lm

ROWS = 12_000
SIZES = VOCABULARY - 5, VOCABULARY + 5
TREE = Fixed.of([[0], [1], [0, 0]])


def padded(size):
    """A draft model with so many ids."""
    network = lm("sliding").model
    return random_lm(Transformer(dataclasses.replace(network.config, vocab=size)), 3, tokenizer=lm("sliding").tokenizer)


@pytest.mark.full
@pytest.mark.parametrize(("size", "rule", "shape"), often(
    [(SIZES[0], Rejection(), Chain(2))],
    [(size, *rule) for rule in ((Rejection(), Chain(2)), (MultiRound(), TREE)) for size in SIZES]))
def test_the_distribution_is_the_targets(size, rule, shape):
    small = Toy(size)
    s = sample(Speculative(DraftModel(small), rule, shape), "toy", [PROMPT] * ROWS, dict(temperature=1.0), new=3,
               size=16, draft=small.init_params(1))
    made = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3]
    counts = np.bincount(made @ [VOCABULARY**2, VOCABULARY, 1], minlength=VOCABULARY**3)
    assert chi_square(counts, joint("temperature") * ROWS) > ALARM
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()


TAKES = [n for n, e in ALGORITHMS.items() if e.takes_draft and e.needs == "a draft model"]
FEW = [("staged", SIZES[1])]          # a smaller one is that of the distribution above


@pytest.mark.wide
@pytest.mark.parametrize(("name", "size"), often(FEW, itertools.product(TAKES, SIZES)))
def test_every_system_with_a_draft_model_keeps_its_guarantee(name, size):
    s = decode(algorithms.make(name, lm("llama"), padded(size)), "llama")
    same = [a == b for a, b in zip(texts(s), plain("llama")[0], strict=True)]
    if ALGORITHMS[name].guarantee == "seed-exact":
        assert all(same)
    elif ALGORITHMS[name].guarantee == "distribution-exact":
        assert all(same[::2])           # a greedy row has one result
    assert not s.running.any()
    assert all(0 <= t < VOCABULARY for row in texts(s) for t in row)
    assert np.asarray(s.stats.drafted).sum() > 0


def test_q_is_the_drafts_own_distribution_on_the_ids_that_both_have():
    class Fixed:
        def apply(self, params, window, cache):
            return Out(hidden=params, entries=(), head=lambda x: x)

    logits = np.log([[[0.1, 0.2, 0.3, 0.4]]])
    chances = lambda entries: np.asarray(jax.nn.softmax(Resized(Fixed(), None, entries).apply(logits, None, None)
                                                        .logits()))[0, 0]
    assert np.allclose(chances(6), [0.1, 0.2, 0.3, 0.4, 0, 0])
    assert np.allclose(chances(2), [1 / 3, 2 / 3])
    assert np.allclose(chances(None), [0.1, 0.2, 0.3, 0.4])
