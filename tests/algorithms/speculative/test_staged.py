"""Staged speculation: the trunk is the draft model's own chain in fewer forwards, and a tree stands beside it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import DraftModel, NGram, Staged
from decodax.algorithms.speculative.trees import Chain
from decodax.cache import dense
from decodax.cache.entry import KVEntry
from decodax.core.types import Model, Out
from tests.laws.cases import VOCABULARY, decode, model

CALLS = []
TOY, WEIGHTS = model("toy")
NEAR = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape), WEIGHTS)


@dataclasses.dataclass(frozen=True)
class Successor(Model):
    """A model that mostly counts on, and notes its forwards."""

    noted: bool = True

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        return dense([(1, 4)], batch, capacity, jnp.float32)

    def apply(self, params, window, cache):
        if self.noted:
            jax.debug.callback(lambda: CALLS.append(window.width))
        nothing = jnp.zeros((*window.tokens.shape, 1, 4))
        hidden = 2.5 * jax.nn.one_hot((window.tokens + 1) % VOCABULARY, VOCABULARY)
        return Out(hidden=hidden + 0 * params, entries=(KVEntry(nothing, nothing),), head=lambda x: x)


def run(alg, weights, temperature=0.9):
    """The counts of a batch, and the draft model's forwards."""
    CALLS.clear()
    ids = [list(range(VOCABULARY)) * 2, [3, 4, 5, 6]]
    s = decode(alg, "toy", ids, dict(temperature=temperature), new=16, eos=[], draft=weights)
    counts = {k: np.asarray(getattr(s.stats, k)).tolist() for k in ("rounds", "drafted", "accepted")}
    jax.effects_barrier()
    return counts, len(CALLS)


@pytest.mark.wide
def test_the_trunk_is_the_draft_models_chain_in_fewer_forwards():
    small = DraftModel(Successor())
    plain, forwards = run(Speculative(small, shape=Chain(6)), jnp.zeros(()))
    staged, fewer = run(Speculative(Staged(small, NGram(4, 3), 6)), (jnp.zeros(()), None))
    assert staged == plain and sum(plain["accepted"]) > 0
    assert fewer < forwards


@pytest.mark.full
def test_another_model_may_guess_for_the_trunk():
    small, other = DraftModel(Successor()), DraftModel(Successor(noted=False))
    plain, forwards = run(Speculative(small, shape=Chain(6)), jnp.zeros(()))
    for guesses in (1, 3):
        staged, fewer = run(Speculative(Staged(small, other, 6, guesses=guesses)), (jnp.zeros(()), jnp.zeros(())))
        assert staged == plain
        # where all guesses hold, six tokens take the one that follows the text and 3 or 2 forwards more
        assert fewer <= forwards * (4 if guesses == 1 else 3) / 6 + 2


@pytest.mark.full
def test_branches_beside_the_trunk_are_accepted_too():
    rounds = lambda nodes, branches: sum(run(
        Speculative(Staged(DraftModel(TOY), NGram(4, 3), 6, nodes, branches=branches)), (NEAR, None))[0]["rounds"])
    assert rounds(20, 4) < rounds(6, 0)
