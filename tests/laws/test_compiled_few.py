"""Few programs: which calls share what is compiled, counted in the drivers' own caches."""

import jax
import numpy as np

from decodax.autoregressive import Autoregressive
from decodax.core import drivers
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.policy import build
from decodax.speculative import Rejection, Speculative
from decodax.speculative.drafts import PromptLookup, TokenRecycling
from decodax.speculative.shapes import Fixed

VOCABULARY = 32
NETWORK = Transformer(llama(vocab=VOCABULARY, width=16, layers=1, heads=2, kv_heads=1, mlp=24, context=4096))
WEIGHTS = NETWORK.init_params(jax.random.key(0))
DRIVERS = {"begin": drivers.begin, "prefill": drivers.commit_prompts, "fan_out": drivers.fan_out,
           "advance": drivers.advance}


class compiles:
    """How many programs of each driver are compiled inside."""

    def __enter__(self):
        jax.clear_caches()
        return self

    def __exit__(self, *error):
        self.count = {name: driver._cache_size() for name, driver in DRIVERS.items()}
        self.total = sum(self.count.values())


def prefilled(alg, **policy):
    chain = build(2, vocab_size=VOCABULARY, **policy)
    s = drivers.begin(alg, NETWORK, Params(WEIGHTS), chain, np.ones((2, 8), np.int32), np.array([8, 5], np.int32),
                      size=64, max_new=np.int32(9))
    return drivers.prefill(alg, NETWORK, Params(WEIGHTS), s, width=8)


def test_algorithms_and_policies_share_one_prefill():
    with compiles() as all_of_them:
        prefilled(Autoregressive())
        prefilled(Autoregressive(), temperature=0.7, top_p=0.9)
        prefilled(Speculative(PromptLookup(length=4)), repetition_penalty=1.2)
        prefilled(Speculative(PromptLookup(length=9), Rejection()), temperature=1.0)
    assert all_of_them.count["prefill"] == 1


def test_a_draft_that_reads_prompts_has_a_prefill_of_its_own_for_all_verifiers():
    recycling = TokenRecycling(Fixed.balanced(2, 2), k=2, rows=VOCABULARY)
    with compiles() as all_of_them:
        prefilled(Autoregressive())
        s = prefilled(Speculative(recycling))
        prefilled(Speculative(recycling, Rejection()), temperature=0.7)
    assert all_of_them.count["prefill"] == 2
    assert (np.asarray(s.algo[0]) >= 0).any()       # it has learnt
