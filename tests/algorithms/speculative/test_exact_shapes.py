"""Whatever the shape of its trees, a drafter with an exact verifier keeps the target's tokens or distribution."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import MultiRound, Rejection, Speculative
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees import (
    CaPE,
    ConfidenceChain,
    DySpec,
    Fixed,
    Sliced,
    StochasticBeam,
)
from decodax.algorithms.speculative.trees.layers import drawn_from, grow_layers
from tests.algorithms.speculative.uneven import UNEVEN
from tests.contracts.verifying import ALARM, PROMPT, chi_square, joint
from tests.contracts.verifying import POLICIES as LAW_POLICIES
from tests.laws.cases import VOCABULARY, Table, decode, prompts, texts
from tests.matrix import often

# laws

MIXED = dict(temperature=[0.0, 0.9, 1.3, 0.8, 0.0], top_p=[1, 1, 0.9, 1, 1], repetition_penalty=[1, 1, 1, 1.4, 1.6])
# the others draft for seed-exact systems, which `tests/contracts/test_algorithm.py` runs; by default a sliced tree is
# tested in `test_target_rooted.py`
EXACT = [Fixed.of(UNEVEN), Sliced(Fixed.of(UNEVEN), 0.4), DySpec(8, 3, 4), StochasticBeam(3, 3)]


@functools.cache
def plain():
    return texts(decode(Autoregressive(), "toy", prompts(5), MIXED, eos=[1]))


@pytest.mark.wide
@pytest.mark.parametrize("shape", often(EXACT[2:3], EXACT), ids=lambda s: type(s).__name__)
def test_with_seed_exact_the_output_is_plain_decodings(shape):
    """Greedy, sampled, truncated and penalised rows in one batch."""
    s = decode(Speculative(Table(), shape=shape), "toy", prompts(5), MIXED, eos=[1])
    assert texts(s) == plain()
    assert np.asarray(s.stats.accepted).sum() > 0


TREES = 25_000        # enough to see the wrong one below by far


@dataclasses.dataclass(frozen=True)
class Pruned(Shape):
    """Wrong: of sampled children it keeps those that are likely themselves."""

    length: int = 2

    def grow(self, grower, state):
        def rank(g, slots, children, path):
            value = path[..., None] + drawn_from(children)
            return value, value

        return grow_layers(grower, state, rank, jnp.zeros((grower.s.batch, 1)), nodes=3, depth=2, width=3, fanout=3)


DRAWN = [(DySpec(nodes=5, length=2, fanout=3), MultiRound(), True), (StochasticBeam(3, 2), MultiRound(), True),
         (Pruned(), MultiRound(), False), (ConfidenceChain(3, 0.2), Rejection(), True),
         (CaPE(2, ((0.4, 3), (1.0, 1)), nodes=4), MultiRound(), True),
         (Sliced(Fixed.balanced(2, 2), 0.4), MultiRound(), True)]


@pytest.mark.wide
@pytest.mark.parametrize(("shape", "verify", "exact"), often(DRAWN[2:3], DRAWN), ids=lambda x: type(x).__name__)
def test_sampled_trees_keep_the_targets_distribution(shape, verify, exact):
    """And a tree that prunes draws by their own probability does not: the test sees it, in the first two tokens."""
    alg = Speculative(Table(), verify, shape)
    s = decode(alg, "toy", [PROMPT] * TREES, LAW_POLICIES["temperature"], new=3, size=16)
    made, wanted = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3], joint("temperature")
    p_values = []
    for n in (2, 3):
        counts = np.bincount(made[:, :n] @ VOCABULARY ** np.arange(n)[::-1], minlength=VOCABULARY**n)
        p_values.append(chi_square(counts, wanted.reshape(VOCABULARY**n, -1).sum(1) * TREES))
    assert (min(p_values) > ALARM) == exact, p_values
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()
