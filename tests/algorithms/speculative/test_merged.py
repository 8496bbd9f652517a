"""The merged trees of several sources: nodes of one prefix are one, and draws are tried against what they came from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import algorithms
from decodax.algorithms.speculative import MultiRound, Speculative
from decodax.algorithms.speculative.drafts import Merged
from decodax.algorithms.speculative.trees import Fixed
from tests.contracts.decoding import decode as batch
from tests.contracts.decoding import plain
from tests.contracts.verifying import ALARM, PROMPT, chi_square, joint
from tests.laws.cases import VOCABULARY, Table, decode, lm, texts

ROWS = 25_000       # a draw that is tried against the other source shows by far
SHAPE = Fixed.of([[0], [1], [0, 0]])


@pytest.mark.full
def test_the_distribution_is_the_targets_though_the_sources_often_agree():
    alg = Speculative(Merged((Table(2.0), Table(2.5)), SHAPE), MultiRound(replacement=True))
    s = decode(alg, "toy", [PROMPT] * ROWS, dict(temperature=1.0), new=3, size=16)
    made = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3]
    counts = np.bincount(made @ [VOCABULARY**2, VOCABULARY, 1], minlength=VOCABULARY**3)
    assert chi_square(counts, joint("temperature") * ROWS) > ALARM
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()


def test_nodes_of_one_prefix_are_one_with_the_children_of_both():
    tokens = jnp.array([[5, 6, 7, 5, 8, 9], [5, 5, 7, 5, 6, 7]])      # 5, 6, 5-7 and 5, 8, 5-9; 5, 5, 5-7 and 5, 6, 5-7
    merged = Merged((Table(), Table()), SHAPE)
    live = jnp.ones(tokens.shape, bool).at[1, 1].set(False)
    first = jax.jit(functools.partial(merged.first_of_prefix, parents=np.array([0, 0, 1, 0, 0, 4])))(tokens, live)
    assert first.tolist() == [[0, 1, 2, 3, 1, 5, 6], [0, 1, 2, 3, 1, 5, 3]]


@pytest.mark.full
def test_two_draft_models_make_specinfers_tree():
    """A greedy row has one result, and one of two models may be the target itself: then nothing of it is rejected."""
    alg = algorithms.make("specinfer", draft=(lm("sliding"), lm("llama")), branching=(2, 1))
    s = batch(alg, "llama")
    assert all(a == b for a, b in list(zip(texts(s), plain("llama")[0], strict=True))[::2])
    greedy, new = np.arange(len(texts(s))) % 2 == 0, np.array(list(map(len, texts(s))))
    assert (np.asarray(s.stats.rounds)[greedy] <= -(-new[greedy] // 3) + 1).all()
    assert algorithms.make("specinfer", draft=[lm("sliding")]) == algorithms.make("specinfer", draft=lm("sliding"))
