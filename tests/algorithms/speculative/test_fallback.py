"""Two sources a row: the match's length decides, trees may stand behind, and a draft model's cache stays its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import SeedExact, Speculative
from decodax.algorithms.speculative.drafts import (
    DraftModel,
    Fallback,
    InputGuided,
    PromptLookup,
    SuffixAutomaton,
    TokenRecycling,
)
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.core.types import Params
from decodax.core.window import causal
from tests.algorithms.speculative.drafting import paths, propose, rows
from tests.laws.cases import decode, model, prompts

TREE = Fixed.of([[0], [1], [0, 0]])
TABLE = np.array([[i, (i + 1) % 10, (i + 2) % 10] for i in range(10)], np.int32)


def test_the_length_of_the_match_decides_and_not_that_of_the_draft():
    draft = Fallback(SuffixAutomaton(4), TokenRecycling(TREE, k=2, rows=10), at_least=3)
    long_match = [5, 6, 7, 9, 5, 6, 7]                      # 3 tokens match, 4 are drafted
    short_draft = [5, 6, 7, 5, 6, 7]                        # 3 match
    long_draft = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]             # 1 token matches, 4 would be drafted
    s = rows(long_match, short_draft, long_draft)
    p = propose(draft, s, params=Params(None, (None, TABLE.T.ravel())))
    assert paths(p, 0) == [(9,), (9, 5), (9, 5, 6), (9, 5, 6, 7)]
    assert paths(p, 1) == [(5,), (5, 6), (5, 6, 7)]
    assert paths(p, 2) == [(2,), (3,), (2, 3)]


@pytest.mark.wide
def test_a_draft_model_never_takes_the_texts_drafts_for_its_own():
    network, weights = model("sliding")
    alg = Speculative(Fallback(PromptLookup(4), DraftModel(network), at_least=2, shape=Chain(3)), SeedExact())
    ids = [p * 2 for p in prompts(4, longest=8, seed=3)]
    s = decode(alg, "llama", ids, dict(temperature=0.0), new=24, eos=[], draft=(None, weights))
    cache = s.algo[0].second.cache
    assert (np.asarray(s.stats.accepted) > 0).all() and (np.asarray(cache.length) > 20).all()
    whole = jax.jit(lambda: network.apply(weights, causal(s.tokens, jnp.zeros(4, jnp.int32)), network.init_cache(4, 0))
                    .entries)
    for layer, fresh in enumerate(whole()):
        held = cache.keys(layer)
        for row, length in enumerate(np.minimum(cache.length, s.length - 1)):
            assert np.allclose(held[row, :, :length], jnp.swapaxes(fresh.keys[row, :length], 0, 1), atol=1e-4)


def test_a_draft_without_match_lengths_cannot_be_the_first_of_a_fallback():
    with pytest.raises(ValueError, match="first: got InputGuided, takes a Draft of deterministic chains"):
        propose(Fallback(InputGuided(4), TokenRecycling(TREE, k=2, rows=10)), rows([1, 2]))
